"""One request after another: the load after each, for whom a place is reserved, and how long chains get."""

import msgspec
import pytest
from tests.unit.planner.given import (
    MIB,
    SEAT,
    SIZES,
    TOPOLOGY,
    agents,
    demand,
    holder,
    refused,
    source,
)

from tensorhub_common.protocol.plans import LinkRate, Plan, PlanRequest, ReadPriority, Share
from tensorhub_common.protocol.ranges import Range
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import Load, ReaderId
from tensorhub_planner.planning.decision import PlanDecision
from tensorhub_planner.primitives.limits import PlanLimits

JOB = "run-7"
GIB = 1024 * MIB
LIMITS = PlanLimits()


def on(agent: str) -> ReaderId:
    """Return the shard on an agent, as one that reads."""
    return ReaderId(JOB, "policy", f"on-{agent}", 0)


def read_from(agent: str) -> Plan:
    share = Share(source=source(agent), transport="ucxx", pieces=SIZES.all(), nbytes=GIB, why="")
    return Plan(version=12, shares=(share,), why="")


@pytest.fixture
def ledger() -> LoadLedger:
    return LoadLedger(LIMITS)


def ask(
    ledger: LoadLedger,
    *holders: Holder,
    wants: PlanRequest | None = None,
    seat: ReaderShard = SEAT,
    limits: PlanLimits = LIMITS,
    draining: bool = False,
) -> Plan:
    """Let `rollout/0` on `me` ask; its turn is 50."""
    found = Candidates(seat, HolderSet(holders, draining=draining), TOPOLOGY)
    answer = PlanDecision(JOB, wants or demand(), found, SIZES).decide(ledger, limits, 0.0)
    ledger.check()
    assert isinstance(answer, Plan), answer
    return answer


@pytest.mark.parametrize(
    ("again", "nbytes"),
    [(None, GIB), (((0, 256),), GIB), (((128, 128), (0, 128)), GIB), (((0, 64),), GIB + 256 * MIB)],
)
def test_who_asks_for_a_part_goes_on(ledger: LoadLedger, again: tuple[Range, ...] | None, nbytes: int) -> None:
    """However everything is named: what was given before is void then, and no load on anybody."""
    ask(ledger, holder("a"))
    ask(ledger, holder("a"), wants=demand(again))
    assert ledger.at(0.0) == {("a", "ucxx"): Load(1, nbytes)}


def test_whoever_failed_a_read_is_no_longer_taken_to_serve_it_and_a_refusal_is_no_load(ledger: LoadLedger) -> None:
    """Else it would seem busy to everybody for as long as the read goes on."""
    ask(ledger, holder("a"))
    ask(ledger, holder("a"), holder("b"), wants=demand(((0, 64),), avoid=["a"]))
    assert ledger.at(0.0) == {("b", "ucxx"): Load(1, 256 * MIB)}
    idle, found = LoadLedger(LIMITS), Candidates(SEAT, HolderSet((holder("a"),)), TOPOLOGY)
    refused(PlanDecision(JOB, demand(avoid=["a"]), found, SIZES).decide(idle, LIMITS, 0.0))
    assert idle.at(0.0) == {}


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (holder("b", turn=40), True),
        (holder("b", turn=50), False),
        (holder("b", turn=60), False),
        # How many bytes one of another layout has read isn't known here; and one that would be refused reads none.
        (holder("b", layout="x" * 64, turn=40), False),
        (holder("b", layout="x" * 64), False),
        (holder("b", root="other", turn=40), False),
        # Whose round has begun has its plan from a planner before this one: its source says that it serves it.
        (msgspec.structs.replace(holder("b", turn=7), asked=True), False),
        (holder("b", turn=7), True),
    ],
)
def test_a_place_is_kept_for_earlier_turns_alone(ledger: LoadLedger, other: Holder, kept: bool) -> None:  # noqa: FBT001
    ask(ledger, holder("a"), other)
    assert ledger.knows(on("b")) is kept


@pytest.mark.parametrize(("a_bps", "c_bps"), [(10**6, 10**10), (10**10, 10**6)])
def test_a_place_is_kept_for_everything_and_as_if_nothing_were_measured(a_bps: int, c_bps: int) -> None:
    """What the reader lacks and has measured says nothing of another one; here it reads a part from that one alone."""
    holders = (holder("a"), holder("c"), holder("b", turn=40))
    rates = tuple(LinkRate(f"site/host-of-{name}", "ucxx", bps, 9, 1.0) for name, bps in (("a", a_bps), ("c", c_bps)))
    loads = []
    for measured in ((), rates):
        ledger = LoadLedger(LIMITS)
        ask(ledger, *holders, wants=msgspec.structs.replace(demand(((0, 64),), ["a", "c"]), rates=measured))
        loads.append(dict(ledger.at(0.0)))
    assert loads[0] == loads[1]
    assert sorted(load.nbytes for load in loads[0].values()) == [256 * MIB, GIB]


def test_one_that_maps_keeps_places_for_those_that_copy(ledger: LoadLedger) -> None:
    """They have no holder on their own host that they could map."""
    wants = msgspec.structs.replace(demand(), mapped=True)
    ask(ledger, holder("beside"), holder("b", turn=40), wants=wants)
    assert ledger.at(0.0) == {("beside", "ucxx"): Load(1, GIB), ("beside", "local"): Load(1, GIB)}


def test_a_kept_place_goes_when_its_reader_asks(ledger: LoadLedger) -> None:
    """Also when that asks for a part, since it has the rest from before."""
    holders = (holder("a"), holder("b", turn=40))
    assert agents(ask(ledger, *holders)) == ["b"]
    assert ledger.at(0.0) == {("a", "ucxx"): Load(1, GIB), ("b", "ucxx"): Load(1, GIB)}
    wants = msgspec.structs.replace(demand(((0, 64),)), replica="on-b", agent="b", turn=ReadPriority(40, 40))
    ask(ledger, holder("a"), wants=wants, seat=msgspec.structs.replace(SEAT, me=source("b")))
    assert ledger.at(0.0) == {("a", "ucxx"): Load(1, 256 * MIB), ("b", "ucxx"): Load(1, GIB)}


@pytest.mark.parametrize("draining", [False, True])
def test_chains_are_as_long_as_the_ledger_knows(ledger: LoadLedger, *, draining: bool) -> None:
    """`c` reads from `b`, and `b` from `a`, which is ready or still serves those two: more than one hop is too far."""
    ledger.assign(on("b"), read_from("a"), 0.0)
    ledger.assign(on("c"), read_from("b"), 0.0)
    ready = () if draining else (holder("a"),)
    half = holder("b", turn=30), holder("c", turn=40)
    found = ask(ledger, *ready, *half, limits=PlanLimits(chain_max=1, stripes_max=1), draining=draining)
    assert "left out: on-c/0 on c is being filled through 2 others" in found.why
    assert "c" not in agents(found)
