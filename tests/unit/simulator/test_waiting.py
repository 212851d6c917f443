"""The graph of who waits for whose bytes: a replica's fills under two turns are two nodes."""

import pytest

from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.invariants.wait_graph import Fill, check_no_cycle

OLD, NEW = ("m/b", ReadPriority(9, 9)), ("m/b", ReadPriority(12, 9))
READER, FIRST = ("m/a", ReadPriority(10, 10)), ("m/c", ReadPriority(8, 8))


def test_whoever_waits_for_the_old_fill_may_be_waited_for_by_the_new_one() -> None:
    check_no_cycle({READER: {OLD}, NEW: {READER}, OLD: {FIRST}})


@pytest.mark.long
@pytest.mark.parametrize(
    "waits_for",
    [
        {READER: {NEW}, NEW: {READER}},
        {READER: {NEW, FIRST}, NEW: {OLD}, OLD: {READER}},
        {READER: {READER}},
    ],
)
def test_a_circle_is_found_over_any_number(waits_for: dict[Fill, set[Fill]]) -> None:
    with pytest.raises(Violation, match="wait for each other"):
        check_no_cycle(waits_for)
