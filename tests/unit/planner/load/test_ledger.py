"""The ledger of current reads follows plans, agents' reports and the log."""

from collections.abc import Iterable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import agents, holder, planned, source

from tensorhub_common.protocol.heartbeat import Heartbeat, ReaderLoad, ServingLoad
from tensorhub_common.protocol.log.events import (
    AgentLost,
    Event,
    ReplicaReady,
    RoundDecided,
    RoundFailed,
    RoundReopened,
    RoundStarted,
    ShardFilled,
    ShardReleased,
)
from tensorhub_common.protocol.plans import Plan, Share, Transport
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import AgentTransport, Load, ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

JOB = "run-7"
ONE, TWO = (ReaderId(JOB, "policy", "rollout", shard) for shard in range(2))
FILLED = ShardFilled(model="policy", replica="rollout", shard=0, version=12, round=3, root="r")


def share(agent: str, nbytes: int, transport: Transport = "ucxx") -> Share:
    return Share(source=source(agent), transport=transport, pieces=((0, 1),), nbytes=nbytes, why="")


def of(*shares: Share) -> Plan:
    return Plan(version=12, shares=shares, why="")


@pytest.fixture
def ledger() -> Iterator[LoadLedger]:
    made = LoadLedger(PlanLimits(assigned_s_max=10, readers_max=4))
    yield made
    made.check()


def test_plans_add_up(ledger: LoadLedger) -> None:
    """By agent and transport: a local reader is no load on the network card."""
    ledger.assign(ONE, of(share("a", 5), share("b", 7)), 0)
    ledger.assign(TWO, of(share("a", 1), share("b", 3, "local")), 1)
    assert ledger.at(1) == {("a", "ucxx"): Load(2, 6), ("b", "ucxx"): Load(1, 7), ("b", "local"): Load(1, 3)}
    assert len(ledger.at(1)) == 3


def test_a_read_whose_end_the_log_never_tells_counts_for_so_long(ledger: LoadLedger) -> None:
    ledger.assign(ONE, of(share("a", 5)), 5)
    assert ledger.at(14.9) == {("a", "ucxx"): Load(1, 5)}
    assert ledger.at(15) == {}


def test_whom_only_a_reader_and_its_siblings_read_from(ledger: LoadLedger) -> None:
    """As far as plans and agents' words say; who reads from others does not matter."""
    lanes: list[AgentTransport] = [("a", "ucxx"), ("b", "ucxx")]
    other = ReaderId(JOB, "policy", "another", 0)
    assert ledger.serves_only(ONE, lanes, 0)
    ledger.hear(says("b", 1), 0)
    assert not ledger.serves_only(ONE, lanes, 0)
    ledger.hear(says("b", 0), 0)
    ledger.assign(TWO, of(share("a", 5)), 0)
    assert ledger.serves_only(ONE, lanes, 0)
    assert not ledger.serves_only(other, lanes, 0)
    ledger.assign(other, of(share("c", 5)), 0)
    assert ledger.serves_only(ONE, lanes, 0)
    ledger.assign(other, of(share("b", 5)), 0)
    assert not ledger.serves_only(ONE, lanes, 0)


def test_planning_a_part_again_keeps_the_rest_and_what_was_reserved_goes_at_the_question(ledger: LoadLedger) -> None:
    """What the failed source had goes, and more of the same is one reader still. Else a read would count twice."""
    ledger.assign(ONE, of(share("a", 5), share("b", 5)), 0)
    ledger.failed(ONE, [source("a")])
    ledger.assign(ONE, of(share("b", 5)), 1)
    assert ledger.at(1) == {("b", "ucxx"): Load(1, 10)}
    ledger.assign(TWO, of(share("a", 5)), 0, reserved=True)
    for expected in (5, 10):
        ledger.assign(TWO, of(share("c", 5)), 1)
        assert ledger.at(1) == {("b", "ucxx"): Load(1, 10), ("c", "ucxx"): Load(1, expected)}


@pytest.mark.parametrize(
    "event",
    [
        FILLED,
        ReplicaReady(model="policy", replica="rollout", version=12, round=3),
        RoundFailed(model="policy", replica="rollout", round=3, error="RoundTimeout", message=""),
        RoundReopened(model="policy", replica="rollout", round=3, version=12),
        AgentLost(agent="a", incarnation=1, term=1),
    ],
)
def test_the_log_ends_a_read(ledger: LoadLedger, event: Event) -> None:
    ledger.assign(ONE, of(share("a", 5)), 0)
    ledger.see("another-job", 60, FILLED)
    assert ledger.at(1) == {("a", "ucxx"): Load(1, 5)}
    ledger.see(JOB, 60, event)
    assert ledger.at(1) == {}


def test_a_chain_is_as_deep_as_its_longest_way(ledger: LoadLedger) -> None:
    """One reads from a ready shard, the next from that, and the last from the second and a ready one."""
    first, second, last = (ReaderId(JOB, "policy", f"on-{agent}", 0) for agent in "abc")
    assert ledger.depth(first) == 1, "of whom nothing is known, a reader of a ready one at best"
    ledger.assign(first, of(share("ready", 5)), 0)
    assert ledger.depth(first) == 1
    ledger.assign(second, of(share("a", 5)), 1)
    assert ledger.depth(second) == 2
    ledger.assign(last, of(share("b", 5), share("ready", 5)), 2)
    assert ledger.depth(last) == 3
    ledger.assign(ONE, of(msgspec.structs.replace(share("a", 5), source=source("z", "on-b", 1))), 3)
    assert ledger.depth(ONE) == 1, "of its source's replica another shard reads, and this one does not"
    ledger.assign(TWO, of(msgspec.structs.replace(share("c", 5), crosses=True)), 3)
    assert ledger.depth(TWO) == 2, "who brings bytes over to the site has them from a ready one"


def test_the_ledger_is_bounded(ledger: LoadLedger) -> None:
    for shard in range(9):
        ledger.assign(ReaderId(JOB, "policy", "rollout", shard), of(share("a", 1)), shard / 10)
    assert ledger.at(1) == {("a", "ucxx"): Load(4, 4)}


def says(agent: str, readers: int, nbytes: int = 0, named: Iterable[tuple[ReaderId, int]] = ()) -> Heartbeat:
    """`named`: of the readers these, each with where it was decided; all of them have equal parts of the bytes."""
    served = tuple(
        ReaderLoad(each.job, each.model, each.replica, each.shard, at, nbytes // readers) for each, at in named
    )
    return Heartbeat(
        agent=agent, incarnation=1, serving=(ServingLoad("ucxx", readers, nbytes, served),) if readers else ()
    )


def test_what_an_agent_says_counts_and_whom_it_names_counts_once(ledger: LoadLedger) -> None:
    """A planner that was just started knows nothing else; a reader may be assigned before the agent spoke or since."""
    ledger.hear(says("a", 8, 40), 0)
    assert ledger.at(0) == {("a", "ucxx"): Load(8, 40)}
    assert (len(ledger.at(0)), ledger.at(0).get(("a", "ucxx"))) == (1, Load(8, 40))
    later = ledger.at(PlanLimits().said_s_max)
    assert (dict(later), len(later), later.get(("a", "ucxx"))) == ({}, 0, None)
    ledger.hear(says("a", 1, 30, named=[(ONE, 50)]), 0)
    ledger.assign(TWO, of(share("a", 5)), 0)
    assert ledger.at(0) == {("a", "ucxx"): Load(2, 35)}
    ledger.hear(says("a", 2, 60, named=[(ONE, 50), (TWO, 51)]), 1)
    assert ledger.at(1) == {("a", "ucxx"): Load(2, 60)}, "what it serves may be more than was planned here"
    ledger.assign(ONE, of(share("a", 7)), 1)
    assert ledger.at(1)["a", "ucxx"].readers == 2


def test_a_source_that_was_tried_beside_another_does_not_leave_that_ones_reader_behind(ledger: LoadLedger) -> None:
    """Who asks for a part from somebody else goes on with the source that it avoids for it: beats say so, till the end.

    Else each reader that tried another source would seem to read from the first for a beat after its read.
    """
    ledger.assign(ONE, of(share("a", 64)), 0)
    ledger.hear(says("a", 1, 64, named=[(ONE, 50)]), 0)
    ledger.failed(ONE, [source("a")])
    ledger.assign(ONE, of(share("b", 6)), 0)
    assert ledger.at(0) == {("a", "ucxx"): Load(1, 64), ("b", "ucxx"): Load(1, 6)}
    ledger.assign(TWO, of(share("a", 1)), 0)
    assert ledger.at(0)["a", "ucxx"] == Load(2, 65), "one more, of whom it has not spoken yet"
    ledger.done(TWO)
    ledger.hear(says("a", 1, 64, named=[(ONE, 50)]), 0.5)
    ledger.see(JOB, 60, FILLED)
    assert ledger.at(0.5) == {}


readers = st.builds(ReaderId, st.just(JOB), st.just("policy"), st.sampled_from("xyz"), st.just(0))
moves = st.one_of(
    st.tuples(st.just("assign"), readers, st.sampled_from("ab"), st.integers(0, 9)),
    st.tuples(st.just("done"), readers, st.just(""), st.just(0)),
    st.tuples(st.just("failed"), readers, st.sampled_from("ab"), st.just(0)),
    st.tuples(st.just("says"), readers, st.sampled_from("ab"), st.integers(0, 9)),
    st.tuples(st.just("lost"), readers, st.sampled_from("ab"), st.just(0)),
)


@given(st.lists(moves, max_size=30))
def test_no_load_is_below_what_is_assigned_or_said_and_it_ends(history: list[tuple[str, ReaderId, str, int]]) -> None:
    ledger = LoadLedger(PlanLimits(assigned_s_max=100, said_s_max=3))
    for now, (what, reader, agent, number) in enumerate(history):
        match what:
            case "assign":
                ledger.assign(reader, of(share(agent, number)), now)
            case "done":
                ledger.done(reader)
            case "failed":
                ledger.failed(reader, [source(agent)])
            case "says":
                ledger.hear(says(agent, number), now)
            case _:
                ledger.see(JOB, 60, AgentLost(agent=agent, incarnation=1, term=1))
        ledger.check()
        if what == "says":
            assert ledger.busy((agent, "ucxx"), now).readers >= number
        if what == "assign":
            assert ledger.busy((agent, "ucxx"), now).readers >= 1
    assert ledger.at(1000) == {}
    ledger.check()


def test_a_host_that_says_what_cant_be_is_busy_and_breaks_no_plan() -> None:
    """Numbers on the wire have any length, and plans of all its readers are computed with them."""
    for readers, nbytes in ((10**400, 1), (1, 10**400), (1, 2**62)):
        ledger = LoadLedger(PlanLimits())
        served = (ReaderLoad("j", "m", "r", 10**400, 10**400, nbytes),)
        serving = (ServingLoad("ucxx", readers, nbytes, served),)
        ledger.hear(Heartbeat(agent="a", incarnation=1, serving=serving), 0.0)
        ledger.check()
        for holders, agent in (((holder("a"), holder("b")), "b"), ((holder("a"),), "a")):
            assert agents(planned(*holders, load=ledger.at(0.1))) == [agent]


def test_the_last_report_of_the_highest_incarnation_counts(ledger: LoadLedger) -> None:
    """An agent that serves no reader has reported too; one that was lost has not."""
    ledger.hear(msgspec.structs.replace(says("a", 2, 6), incarnation=2), 0)
    ledger.hear(says("a", 9, 9), 1)
    assert ledger.at(1) == {("a", "ucxx"): Load(2, 6)}
    ledger.hear(says("idle", 0), 1)
    assert ledger.reports.unheard(("a", "idle", "silent"), 1) == ["silent"]
    assert ledger.reports.unheard(("a",), PlanLimits().said_s_max) == ["a"]
    ledger.see(JOB, 60, AgentLost(agent="a", incarnation=1, term=1))
    assert ledger.at(1) != {}, "it has come back since"
    ledger.see(JOB, 61, AgentLost(agent="a", incarnation=2, term=1))
    assert ledger.at(1) == {}


@pytest.mark.parametrize(
    ("event", "both"),
    [
        (FILLED, False),
        (ShardReleased(model="policy", replica="rollout", shard=0), False),
        (ReplicaReady(model="policy", replica="rollout", version=12, round=3), True),
        (RoundFailed(model="policy", replica="rollout", round=3, error="RoundTimeout", message=""), True),
        (RoundReopened(model="policy", replica="rollout", round=3, version=12), True),
        (RoundDecided(model="policy", replica="rollout", round=3, attempt=2, version=13, roots=("r", "s")), True),
        (RoundStarted(model="policy", replica="rollout", round=3, attempt=1, version=12), None),
    ],
)
@pytest.mark.parametrize("log_first", [False, True])
def test_a_read_that_is_over_is_no_load(
    ledger: LoadLedger, event: Event, *, both: bool | None, log_first: bool
) -> None:
    """What was decided before the entry is over, whenever the report arrives; what is decided by it has begun."""
    said = says("a", 4, 20, named=[(ONE, 50), (TWO, 50), (ReaderId(JOB, "critic", "rollout", 0), 50)])
    if log_first:
        ledger.see(JOB, 60, event)
    ledger.hear(said, 0)
    ledger.see(JOB, 60, event)
    ended = {None: 0, False: 1, True: 2}[both]
    assert ledger.at(0) == {("a", "ucxx"): Load(4 - ended, 20 - 5 * ended)}
    ledger.hear(says("a", 1, 5, named=[(ONE, 60)]), 0)
    assert ledger.at(0) == {("a", "ucxx"): Load(1, 5)}
    ledger.ended.forget(JOB)
    ledger.hear(says("a", 1, 5, named=[(ONE, 0)]), 0)
    assert ledger.at(0) == {("a", "ucxx"): Load(1, 5)}, "the numbers of another log mean other entries"


def test_ends_are_bounded(ledger: LoadLedger) -> None:
    """Those that the log mentioned last are known; of other reads the next report says that they are over."""
    readers = [ReaderId(JOB, "policy", "rollout", shard) for shard in range(5)]
    for seq, shard in enumerate((0, 1, 0, 2, 3, 4), start=60):
        ledger.see(JOB, seq, ShardReleased(model="policy", replica="rollout", shard=shard))
    ledger.hear(says("a", 5, 5, named=[(each, 50) for each in readers]), 0)
    assert ledger.at(0)["a", "ucxx"] == Load(1, 1)
    with pytest.raises(KeyError, match="'b', 'ucxx'"):
        ledger.at(0)["b", "ucxx"]
    ledger.hear(says("a", 1, 5, named=[(readers[4], 50)]), 0)
    assert ledger.at(0).get(("a", "ucxx")) is None
