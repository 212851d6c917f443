"""A plan from as many sources as there may be goes through NATS in one message."""

import msgspec
import pytest
import zstandard

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.plans import (
    PACK_BYTES_MIN,
    PLAN_BYTES_MAX,
    SHARES_MAX,
    Plan,
    Share,
    SourceId,
    packed,
    unpacked,
)
from tensorhub_common.protocol.subjects import NAME_CHARS_MAX

NATS_BYTES_MAX = 1024 * 1024
RUNS_OF_EACH = 20


def plan(sources: int) -> Plan:
    """Return a plan with the longest names, digests unlike each other, and runs of units all over the shard."""
    shares = tuple(
        Share(
            source=SourceId(f"{number:0{NAME_CHARS_MAX}}", 10**6, "t" * NAME_CHARS_MAX, number),
            transport="ucxx",
            pieces=tuple((run * sources + number, 1) for run in range(RUNS_OF_EACH)),
            nbytes=10**9 + number,
            why="the only holder of these parts in this site",
            layout=f"{number * 7919 % 2**128:032x}",
            root=f"{number**9 % 2**128:032x}",
            link="site:" + "s" * NAME_CHARS_MAX,
        )
        for number in range(sources)
    )
    return Plan(version=1, shares=shares, why="", program=f"{7**40:064x}")


def test_the_largest_plan_fits_into_a_message() -> None:
    answer = msgspec.json.encode(plan(SHARES_MAX))
    message = packed(answer)
    assert len(answer) > NATS_BYTES_MAX > len(message)
    assert unpacked(message) == answer


def test_short_answers_go_as_they_are() -> None:
    assert packed(b"{" * (PACK_BYTES_MIN - 1)) == b"{" * (PACK_BYTES_MIN - 1)
    assert unpacked(b'{"type":"plan"}') == b'{"type":"plan"}'


@pytest.mark.parametrize("damage", [slice(0, 5), slice(0, 100), slice(0, -1)])
def test_what_is_damaged_is_no_plan(damage: slice) -> None:
    with pytest.raises(BadCommand):
        unpacked(packed(msgspec.json.encode(plan(500)))[damage])


def test_nothing_inflates_beyond_its_bound() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(PLAN_BYTES_MAX + 1))
    with pytest.raises(BadCommand, match="more than"):
        unpacked(bomb)
