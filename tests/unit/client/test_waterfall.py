"""The waterfall: what is drawn of which spans, at which width. The pictures are compared as they are."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.client.given_spans import BEGIN_NS, MS, Story, one_lost_source, span_id

from tensorhub.cli.trace.span_tree import forest, rows, without_other_transfers
from tensorhub.cli.trace.waterfall import ASCII, UNICODE, Glyphs, axis_of, draw, took, trouble
from tensorhub_common.protocol.spans import FinishedSpan

GOLDEN = Path(__file__).parent / "waterfalls"
WANTED = {span_id(16)}


def picture(spans: Sequence[FinishedSpan], wanted: set[str], width: int, glyphs: Glyphs = UNICODE) -> str:
    lines = draw(without_other_transfers(forest(spans), wanted), wanted, width, glyphs)
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20])
def test_a_transfer_that_lost_a_source(width: int) -> None:
    """After a change that is meant run this once with REWRITE=1 in the environment, and look at the diff."""
    drawn = picture(one_lost_source(), WANTED, width)
    if os.environ.get("REWRITE"):
        (GOLDEN / f"lost-source-{width}.txt").write_text(drawn)
    assert drawn == (GOLDEN / f"lost-source-{width}.txt").read_text()


@pytest.mark.parametrize("width", range(1, 140))
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    for line in picture(one_lost_source(), WANTED, width).splitlines():
        assert len(line) <= max(width, 20), line


def test_a_terminal_without_unicode_gets_other_glyphs() -> None:
    drawn = picture(one_lost_source(), WANTED, 100, ASCII)
    assert not set(drawn) & set("█◂▸✗")
    assert "read x lost" in drawn


def test_other_transfers_of_the_version_are_left_out_or_drawn_together() -> None:
    assert "agent-3" not in picture(one_lost_source(), WANTED, 120)
    assert "agent-3" in picture(one_lost_source(), {span_id(16), span_id(32)}, 120)


def test_a_transfer_below_another_one_s_is_not_left_out_with_it() -> None:
    story = Story()
    story.add(1, None, "transfer", "agent agent-1", 0, 9)
    story.add(2, 1, "round.decided", "registry registry-0", 0, 1)
    story.add(16, 2, "transfer", "agent agent-2", 0, 9)
    story.add(17, 16, "read", "agent agent-2", 1, 9)
    story.add(3, 1, "transfer", "agent agent-3", 0, 9)
    drawn = picture(story.spans, WANTED, 80)
    assert "agent-2" in drawn
    assert "agent-3" not in drawn


def test_what_was_lost_is_red_and_nothing_is_colored_in_a_pipe() -> None:
    lines = draw(forest(one_lost_source()), WANTED, 100)
    (lost,) = [line for line in lines if "✗" in line.plain]
    assert "red" in str(lost.style)
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(*lines, sep="\n")
    assert "\x1b" not in captured.get()


def test_a_publication_of_long_ago_does_not_press_the_transfer_into_a_column() -> None:
    story = Story()
    story.add(1, None, "publish", "sdk 4242", -3_600_000, -3_599_000)
    story.add(16, 1, "transfer", "agent agent-1", -5_000, 200)
    story.add(17, 16, "round", "agent agent-1", -5_000, 100)
    story.add(18, 16, "read", "agent agent-1", 100, 200)
    axis = axis_of(story.spans, WANTED)
    assert (axis.start, axis.end) == (BEGIN_NS + 100 * MS, BEGIN_NS + 200 * MS)
    drawn = picture(story.spans, WANTED, 80)
    assert "◂ 60.0 min before" in drawn
    assert drawn.count("◂") == 3


def test_nothing_to_draw_is_a_head_and_no_fault() -> None:
    assert picture([], set(), 80).count("\n") == 1


def test_spans_without_attributes_and_times_are_drawn_all_the_same() -> None:
    story = Story()
    story.add(16, 99, "transfer", "agent ", 0, 0)
    story.add(17, 16, "read", "agent agent-1", 5, 1, about={"bytes": "many", "transport": ("a", "b")})
    assert "0 B, 0.00 GB/s" in picture(story.spans, WANTED, 80)


def test_a_read_that_took_a_delta_says_from_where_and_how_much_of_the_bytes_came() -> None:
    story = Story()
    story.add(16, 99, "transfer", "agent ", 0, 9)
    about: dict[str, str | int | tuple[str, ...]] = {
        "bytes": 1_000_000,
        "encodings": ("delta",),
        "wire_bytes": 18_000,
        "base": 11,
        "encodings_why": "delta: 25 MB/s in this read",
    }
    story.add(17, 16, "read", "agent agent-1", 1, 5, about=about)
    assert "delta from 11, 1.8 % of the bytes (delta: 25 MB/s in this read)" in picture(story.spans, WANTED, 200)


# ------------------------------------------------------------------------------------------------------------- tree


def test_every_span_is_in_the_forest_once_whatever_came() -> None:
    chance = random.Random(7)
    for _ in range(300):
        story = Story()
        count = chance.randrange(1, 12)
        for number in range(count):
            # Parents that are missing, that come later, that are the span itself, and rings of them.
            parent = chance.choice([None, chance.randrange(count + 3)])
            story.add(number, parent, "a", "agent a", chance.randrange(9), chance.randrange(9, 18))
        chance.shuffle(story.spans)
        drawn = [span.span for _, span in rows(forest(story.spans))]
        assert sorted(drawn) == sorted(span.span for span in story.spans)


def test_children_stand_below_their_parent_in_the_order_of_time() -> None:
    drawn = [(depth, span.name) for depth, span in rows(forest(one_lost_source()))]
    assert drawn[:5] == [
        (0, "publish"),
        (1, "publish.agent"),
        (2, "digest"),
        (1, "version.published"),
        (1, "transfer"),
    ]


def test_a_span_that_is_so_deep_that_recursion_would_end_is_drawn() -> None:
    story = Story()
    for number in range(3_000):
        story.add(number, number - 1 if number else None, "a", "agent a", number, 4_000)
    assert picture(story.spans, set(), 80).count("\n") == 3_001


# ------------------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("nanoseconds", "said"),
    [
        (-5, "0 µs"),
        (0, "0 µs"),
        (420_000, "420 µs"),
        (1_250_000, "1.2 ms"),
        (352_000_000, "352 ms"),
        (1_250_000_000, "1.2 s"),
        (119_000_000_000, "119 s"),
        (600_000_000_000, "10.0 min"),
        (36_000_000_000_000, "10.0 h"),
    ],
)
def test_a_duration_in_a_few_characters(nanoseconds: int, said: str) -> None:
    assert took(nanoseconds) == said


def test_a_source_that_was_lost_is_told_by_its_end_alone() -> None:
    story = Story()
    assert trouble(story.add(1, None, "read", "agent a", 0, 1, about={"end": "lost: it stalled"})) == "lost: it stalled"
    assert trouble(story.add(2, None, "read", "agent a", 0, 1, about={"end": "done"})) == ""
