"""`tensorhub trace`: which transfers are listed and chosen, how they are drawn, and how it ends."""

import os
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs
from rich.console import Console
from tests.unit.client.conftest import Run, command

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli.commands import trace
from tensorhub.cli.trace.span_tree import forest, rows, without_other_transfers
from tensorhub.cli.trace.waterfall import ASCII, UNICODE, Glyphs, axis_of, draw, took, trouble
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.introspection.span_query import CollectedSpans
from tensorhub_common.protocol.queries import AgentInfo, Status
from tensorhub_common.protocol.spans import TRANSFER, Attribute, FinishedSpan, SpanLink, SpansAsk, TransfersAsk

GOLDEN = Path(__file__).parent / "waterfalls"
EVERYBODY = frozenset({"registry-0", "planner-0", "agent-0", "agent-1"})
TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
BEGIN_NS: Final = 1_763_692_800_000_000_000
MS: Final = 1_000_000


def span_id(number: int) -> str:
    return f"{number:016x}"


WANTED = {span_id(16)}


@dataclass
class Story:
    """Makes spans with times in milliseconds."""

    trace: str = TRACE
    spans: list[FinishedSpan] = field(default_factory=list)

    def add(
        self, number: int, parent: int | None, name: str, where: str, from_ms: float, to_ms: float, **more: Any
    ) -> FinishedSpan:
        """Add a span; `about` are its attributes, by names without what ours begin with."""
        service, _, instance = where.partition(" ")
        about = {f"tensorhub.{key}": value for key, value in more.pop("about", {}).items()}
        span = FinishedSpan(
            trace=self.trace,
            span=span_id(number),
            parent=None if parent is None else span_id(parent),
            name=name,
            service=f"tensorhub-{service}",
            instance=instance,
            start_ns=BEGIN_NS + round(from_ms * MS),
            end_ns=BEGIN_NS + round(to_ms * MS),
            attributes=about,
            **{"error": None, "links": (), **more},
        )
        self.spans.append(span)
        return span


About = dict[str, Attribute]
ABOUT: Final[About] = {"job": "run-7", "model": "policy", "version": 12, "shard": 0}
LOST: Final = "lost: its connection was reset"
COUNTS: Final[About] = {"bytes": 1 << 28, "pieces": 64, "retries": 3, "sources": 2, "transports": ("local", "ucxx")}
OF_LOST: About = {"transport": "ucxx", "why": "the same site; number 1 of 2 there by load"}
OF_LOST |= {"source.agent": "agent-2", "bytes": 50_000_000, "pieces": 12, "retries": 3, "GBps": 1.25, "end": LOST}
OF_DONE: About = {"transport": "local", "why": "the same host", "source.agent": "agent-0"}
OF_DONE |= {"bytes": 218_435_456, "pieces": 52, "retries": 0, "GBps": 1.21, "end": "done"}


def one_lost_source() -> list[FinishedSpan]:
    """A publication, a transfer that lost one of two sources, and another replica's transfer of the same version."""
    story = Story()
    story.add(1, None, "publish", "sdk 4242", 0, 30)
    story.add(2, 1, "publish.agent", "agent agent-0", 1, 29)
    story.add(3, 2, "digest", "agent agent-0", 1, 25)
    story.add(4, 1, "version.published", "registry registry-0", 26, 28)
    story.add(16, 1, "transfer", "agent agent-1", 40, 240, about={**ABOUT, "replica": "rollout-0", **COUNTS})
    story.add(17, 16, "update", "sdk 4243", 40, 241)
    story.add(18, 16, "round", "agent agent-1", 40, 44)
    story.add(19, 16, "plan", "agent agent-1", 44, 48)
    story.add(20, 19, "planner.plan", "planner planner-0", 45, 47)
    story.add(21, 16, "lease", "agent agent-1", 48, 50)
    story.add(22, 21, "lease.grant", "agent agent-0", 48.5, 48.54)
    story.add(23, 16, "read", "agent agent-1", 50, 90, error=LOST, about=OF_LOST)
    story.add(24, 16, "read", "agent agent-1", 50, 230, about=OF_DONE)
    story.add(25, 16, "verify", "agent agent-1", 230, 231)
    story.add(26, 16, "ready", "agent agent-1", 231, 240)
    story.add(32, 1, "transfer", "agent agent-3", 41, 300, about={**ABOUT, "replica": "rollout-1"})
    story.add(33, 32, "read", "agent agent-3", 60, 290, about={"source.agent": "agent-0", "bytes": 1 << 28})
    return story.spans


IN_GROUP: Final[About] = {"job": "run-7", "model": "policy", "group": "p-17", "index": 3}


def one_moved_response() -> list[FinishedSpan]:
    """A response whose first instance was lost, linked to the trainer's call."""
    call = Story("c" * 32)
    submit = call.add(1, None, "submit", "sdk 4242", -50, -20)
    story = Story("d" * 32)
    link = SpanLink(trace=submit.trace, span=submit.span)
    whole: About = {**IN_GROUP, "reason": "stop", "tokens": 96, "versions": ("11", "12"), "attempts": 2}
    story.add(64, None, "response", "rollout rollout-0", -30, 900, about=whole, links=(link,))
    story.add(65, 64, "queue", "rollout rollout-0", -30, 0)
    first: About = {"instance": "runner-0", "tokens_from": 0, "tokens": 40, "versions": ("11",), "end": "lost"}
    first |= {"why": "done soonest there", "withdrawn_why": "runner-1 is done 3.2 s sooner with it"}
    gone = "runner-0 was lost: it was silent for 0.5 s"
    story.add(66, 64, "attempt", "rollout rollout-0", 0, 500, about={**first, "first_token_s": 0.05}, error=gone)
    second: About = {"instance": "runner-1", "tokens_from": 40, "tokens": 56, "versions": ("11", "12")}
    second |= {"first_token_s": 0.1, "end": "completed"}
    story.add(67, 64, "attempt", "rollout rollout-0", 502, 890, about=second)
    story.add(68, 64, "store", "rollout rollout-0", 890, 900)
    story.add(69, 64, "delivery", "rollout rollout-0", 900, 1100)
    return call.spans + story.spans


class Hub:
    """Answers as all processes of a hub together."""

    def __init__(self) -> None:
        self.spans = one_lost_source()
        self.processes = EVERYBODY
        self.left_out = 0
        self.has_old_processes = False
        """Those that know no responses answer with transfers."""
        self.known = {"agent-0", "agent-1", "registry-0"}
        self.asked: list[TransfersAsk | SpansAsk] = []

    async def gather(self, _: object, job: str, ask: TransfersAsk | SpansAsk, known: Collection[str]) -> CollectedSpans:
        self.asked.append(ask)
        assert known == self.known
        wanted = self.spans if self.processes else []
        if isinstance(ask, TransfersAsk):
            names = {TRANSFER, ask.kind} if self.has_old_processes else {ask.kind}
            wanted = [each for each in wanted if each.name in names and each.span.startswith(ask.begins)]
            wanted = [each for each in wanted if ask.group in {None, each.attributes.get("tensorhub.group")}]
            wanted = [each for each in wanted if ask.replica in {None, each.attributes.get("tensorhub.replica")}]
        else:
            wanted = [each for each in wanted if ask.trace in {each.trace, *(link.trace for link in each.links)}]
        return CollectedSpans(spans=tuple(wanted), processes=self.processes, left_out=self.left_out)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    async def status(*_: Any) -> Status:
        agents = [
            AgentInfo(agent=f"agent-{n}", host="h", site="s", live=n < 2, incarnation=1, shards=0) for n in range(3)
        ]
        return Status(job="run-7", seq=1, registry="registry-0", term=1, models=(), agents=tuple(agents))

    async def bus(*_: Any) -> None:
        return None

    monkeypatch.setattr(RegistryClient, "status", status)
    monkeypatch.setattr(RegistryClient, "bus", bus)
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    answering = Hub()
    monkeypatch.setattr(trace, "collect_spans", answering.gather)
    return answering


@pytest.fixture
def run(hub: Hub) -> Run:
    return lambda *arguments: command("trace", *arguments, "--job", "run-7")


def test_the_table_has_the_latest_first_and_each_end(hub: Hub, run: Run) -> None:
    """The wait for a version is no part of what its transfer took."""
    head, first, second = run().out.splitlines()
    titles = "ID MODEL VERSION REPLICA SHARD WHEN TOOK BYTES GB/S TRANSPORTS SOURCES RETRIES END"
    assert " ".join(head.split()) == titles
    assert "rollout-1" in first
    cells = second.split()
    assert span_id(16).startswith(cells[0])
    assert cells[1:5] == ["policy", "12", "rollout-0", "0"]
    assert cells[7:] == ["200", "ms", "256.0", "MiB", "1.34", "local,ucxx", "2", "3", "done"]
    about = {**ABOUT, "bytes": 10**9, "round_s": 59.5, "GBps": 4.25}
    gone = "VersionUnavailable: gone"
    hub.spans = [Story().add(16, None, "transfer", "agent agent-1", 0, 60_000, about=about, error=gone)]
    assert " 500 ms  953.7 MiB  4.25 " in run().out
    assert run().out.splitlines()[1].endswith(gone)
    hub.spans = []
    ended = run()
    assert (ended.code, ended.out.count("\n"), "run-7" in ended.out) == (0, 1, True)


def test_who_did_not_answer_and_what_did_not_fit_is_told(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.processes, hub.left_out = EVERYBODY - {"agent-1"}, 7
    ended = run("--version", "12")
    assert ended.code == 0
    assert "agent-1 did not answer" in ended.err
    assert "7 spans are left out" in ended.err

    async def silent(*_: Any) -> Status:
        raise RegistryUnavailable("no registry answered about job 'run-7' within 1 s")

    hub.known, hub.processes, hub.left_out = set(), EVERYBODY, 0
    monkeypatch.setattr(RegistryClient, "status", silent)
    ended = run()
    assert (ended.code, ended.out.count("\n"), ended.err.count("\n")) == (0, 3, 1)
    assert "no registry answered about job 'run-7' within 1 s" in ended.err


def test_a_transfer_a_trace_and_a_version_are_drawn(hub: Hub, run: Run) -> None:
    one, all_of_trace = run(span_id(16)), run(TRACE)
    assert (one.code, all_of_trace.code) == (0, 0)
    assert LOST in one.out
    assert "\x1b" not in one.out
    assert hub.asked[-1] == SpansAsk(trace=TRACE)
    assert all_of_trace.out == run("--version", "12").out
    assert "agent-3" in all_of_trace.out
    for chosen in (one, run(TRACE, "--replica", "rollout-0"), run("--version", "12", "--replica", "rollout-0")):
        assert f"transfer {span_id(16)}  policy version 12 to rollout-0, shard 0" in chosen.out
        assert "agent-3" not in chosen.out
    for words in (["--json"], ["--version", "12", "--json"]):
        objects = run(*words).objects
        assert {tuple(each) for each in objects} == {FinishedSpan.__struct_fields__}
        assert len(objects) == (2 if words == ["--json"] else len(one_lost_source()))


def test_a_trace_without_a_transfer_is_drawn_as_what_there_is(hub: Hub, run: Run) -> None:
    """A read that failed before a version was decided: the log names its trace."""
    hub.spans = []
    about: About = {"job": "run-7", "model": "policy", "replica": "rollout-9", "shard": 3}
    story = Story("e" * 32, hub.spans)
    error = "VersionUnavailable: no version was to be had"
    story.add(80, None, "wait", "agent agent-1", 0, 10_000, about=about, error=error)
    story.add(81, 80, "update", "sdk 77", 0, 10_001, about=about, error=error)
    ended = run("E" * 32)
    assert ended.code == 0, ended.err
    title, *drawn = ended.out.splitlines()
    assert title.startswith(f"wait {span_id(80)}  policy to rollout-9, shard 3")
    assert title.endswith(f"failed, trace {'e' * 32}")
    firsts = [line.split()[0] for line in drawn]
    assert firsts == ["SPAN", "wait", "VersionUnavailable:", "update", "VersionUnavailable:"]
    assert drawn[1].endswith("10.0 s")


def test_what_a_transfer_is_linked_to_is_drawn_too(hub: Hub, run: Run) -> None:
    published = Story()
    publish = published.add(1, None, "publish", "sdk 1", 0, 1)
    later = Story(trace="f" * 32)
    link = SpanLink(trace=publish.trace, span=publish.span)
    later.add(0xABC, None, "transfer", "agent agent-1", 50, 60, links=(link,), about=ABOUT)
    hub.spans = published.spans + later.spans
    drawn = run(span_id(0xABC)).out
    assert "publish" in drawn
    assert drawn.index("publish") < drawn.index("  0  ") or "before" in drawn


def test_responses_are_listed_and_one_is_drawn_with_the_call_that_wanted_it(hub: Hub, run: Run) -> None:
    hub.spans += one_moved_response()
    for hub.has_old_processes in (False, True):
        head, row = run("--responses").out.splitlines()
        assert " ".join(head.split()) == "GROUP INDEX MODEL VERSIONS WHEN TOOK TOKENS ATTEMPTS END"
        assert row.split()[:4] == ["p-17", "3", "policy", "11,12"]
        assert row.split()[-5:] == ["930", "ms", "96", "2", "stop"]
    (span,) = run("--responses", "--json").objects
    assert span["name"] == "response"
    drawn = run("--response", "p-17/3").out
    title = drawn.splitlines()[0]
    assert title.startswith("response p-17/3  96 tokens of model policy version 11,12  ")
    assert title.endswith(f"stop, trace {'d' * 32}")
    assert drawn[len(title) + 1 :] == picture(one_moved_response(), {span_id(64)}, 120)
    assert drawn[len(title) + 1 :] == (GOLDEN / "response-120.txt").read_text()


def test_without_responses_there_is_one_line(hub: Hub, run: Run) -> None:
    ended = run("--responses")
    assert (ended.code, ended.out.count("\n")) == (0, 1)
    assert "no response of job run-7 is kept yet" in ended.out
    assert run("--response", "p-17/3").is_one_line(1, "tensorhub trace --responses --job run-7")


@pytest.mark.parametrize("arguments", [["--response", "p-17"], ["--response", "/3"], ["--response", "p-17/x"]])
def test_a_response_is_named_by_its_group_and_index(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).code == 2
    assert run("--response", "p-17/3", "--version", "12").code == 2


def two_models(hub: Hub) -> None:
    Story(spans=hub.spans).add(77, None, "transfer", "agent a", 0, 1, about={**ABOUT, "model": "critic"})


def without_spans(hub: Hub) -> None:
    hub.processes = frozenset()


LISTED = "'tensorhub trace --job run-7' lists those that are kept"


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (None, ["f" * 32], f"trace {'f' * 32}"),
        (None, [TRACE, "--replica", "nobody"], f"trace {TRACE}"),
        (None, ["beef"], LISTED),
        (None, ["zz/.."], LISTED),
        (None, ["--version", "12", "--replica", "nobody"], LISTED),
        (None, ["0000"], "give more of the id"),
        (two_models, ["--version", "12"], "critic, policy"),
        (without_spans, [], "doctor"),
    ],
)
def test_what_can_not_be_drawn_is_one_line(
    hub: Hub, run: Run, change: Callable[[Hub], None] | None, arguments: list[str], said: str
) -> None:
    if change is not None:
        change(hub)
    assert run(*arguments).is_one_line(1, said)


# -------------------------------------------------------------------------------------------------------- the picture


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


def test_it_is_drawn_for_each_width_and_terminal() -> None:
    for width in range(1, 140):
        assert all(len(line) <= max(width, 20) for line in picture(one_lost_source(), WANTED, width).splitlines())
    drawn = picture(one_lost_source(), WANTED, 100, ASCII)
    assert not set(drawn) & set("█◂▸✗")
    assert "read x lost" in drawn
    lines = draw(forest(one_lost_source()), WANTED, 100)
    (lost,) = [line for line in lines if "✗" in line.plain]
    assert "red" in str(lost.style)
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(*lines, sep="\n")
    assert "\x1b" not in captured.get()


def test_other_transfers_are_left_out_but_not_one_below_them() -> None:
    assert "agent-3" not in picture(one_lost_source(), WANTED, 120)
    assert "agent-3" in picture(one_lost_source(), {span_id(16), span_id(32)}, 120)
    story = Story()
    story.add(1, None, "transfer", "agent agent-1", 0, 9)
    story.add(2, 1, "round.decided", "registry registry-0", 0, 1)
    story.add(16, 2, "transfer", "agent agent-2", 0, 9)
    story.add(17, 16, "read", "agent agent-2", 1, 9)
    story.add(3, 1, "transfer", "agent agent-3", 0, 9)
    drawn = picture(story.spans, WANTED, 80)
    assert ("agent-2" in drawn, "agent-3" in drawn) == (True, False)


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


def test_a_delta_nothing_and_spans_without_attributes_and_times_are_drawn_all_the_same() -> None:
    assert picture([], set(), 80).count("\n") == 1
    story = Story()
    story.add(16, 99, "transfer", "agent ", 0, 0)
    story.add(17, 16, "read", "agent agent-1", 5, 1, about={"bytes": "many", "transport": ("a", "b")})
    assert "0 B, 0.00 GB/s" in picture(story.spans, WANTED, 80)
    why = "delta: 25 MB/s in this read"
    delta: About = {"bytes": 10**6, "encodings": ("delta",), "wire_bytes": 18_000, "base": 11, "encodings_why": why}
    story.add(18, 16, "read", "agent agent-1", 1, 5, about=delta)
    assert f"delta from 11, 1.8 % of the bytes ({why})" in picture(story.spans, WANTED, 200)


def test_children_stand_below_their_parent_in_the_order_of_time_and_each_span_once_whatever_came() -> None:
    drawn = [(depth, span.name) for depth, span in rows(forest(one_lost_source()))]
    first = [(0, "publish"), (1, "publish.agent"), (2, "digest"), (1, "version.published"), (1, "transfer")]
    assert drawn[:5] == first
    chance = random.Random(7)
    for _ in range(300):
        story = Story()
        count = chance.randrange(1, 12)
        for number in range(count):
            # Parents that are missing, that come later, that are the span itself, and rings of them.
            parent = chance.choice([None, chance.randrange(count + 3)])
            story.add(number, parent, "a", "agent a", chance.randrange(9), chance.randrange(9, 18))
        chance.shuffle(story.spans)
        assert sorted(span.span for _, span in rows(forest(story.spans))) == sorted(span.span for span in story.spans)
    deep = Story()
    for number in range(3_000):
        deep.add(number, number - 1 if number else None, "a", "agent a", number, 4_000)
    assert picture(deep.spans, set(), 80).count("\n") == 3_001


def test_words_and_an_id_that_is_as_long_as_it_must_be() -> None:
    story = Story()
    spans = [story.add(number << 8, None, "transfer", "agent a", 0, 1) for number in (0x1000_0000_0000_00, 0x1000_0001)]
    assert trace.short_id(spans[0], spans) == span_id(0x1000_0000_0000_0000)[:8]
    spans.append(structs.replace(spans[0], span=span_id(0x1000_0000_0000_0001)))
    assert trace.short_id(spans[0], spans) == span_id(0x1000_0000_0000_0000)
    said = {-5: "0 µs", 0: "0 µs", 420_000: "420 µs", 1_250_000: "1.2 ms", 352 * MS: "352 ms", 1_250 * MS: "1.2 s"}
    said |= {119_000 * MS: "119 s", 600_000 * MS: "10.0 min", 36_000_000 * MS: "10.0 h"}
    assert {nanoseconds: took(nanoseconds) for nanoseconds in said} == said
    ends = [Story().add(1, None, "read", "agent a", 0, 1, about={"end": end}) for end in ("lost: it stalled", "done")]
    assert [trouble(each) for each in ends] == ["lost: it stalled", ""]
