"""The planner folds what the registry folds, also from a snapshot."""

from collections.abc import Iterator

import pytest
from tests.unit.planner.given import MIB
from tests.unit.registry.modelled_log import Entry

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import Join, Publish, Retain, Sender, Unreadable
from tensorhub_common.protocol.log.events import AgentJoined, CommandRejected
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.catalog_view.holders import Candidates
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision, found_in
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_simulator.drivers.catalog import JOB, MODEL, CatalogDriver, decided, root

JOIN = Join(by=Sender("a", 1, 1), host="node-1", site="berlin")


@pytest.fixture
def fold() -> CatalogReplica:
    return CatalogReplica(Catalog("run-7"))


def test_commands_are_folded_and_events_are_counted(fold: CatalogReplica) -> None:
    (joined,) = fold.take(Entry(1, 5.0, subjects.command_subject("run-7", "join", "a"), codec.encode(JOIN)))
    assert isinstance(joined, AgentJoined)
    assert (
        fold.take(Entry(2, 6.0, subjects.event("run-7", subjects.HUB, "agent", "joined"), codec.encode(joined))) == ()
    )
    assert fold.position == 2
    assert fold.catalog.seq == 1
    assert fold.catalog.agents["a"].host == "node-1"
    assert fold.catalog.time == 5.0


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("tensorhub.v1.run-7.cmd.publish", b"no json"),
        ("tensorhub.v1.run-7.cmd.join.b", codec.encode(JOIN)),
        ("tensorhub.v1.run-7.cmd.join.a.b.c", codec.encode(JOIN)),
        ("tensorhub.v1.run-7.cmd.register", codec.encode(Publish(model="m", replica="r"))),
    ],
)
def test_what_is_no_command_is_folded_as_such(fold: CatalogReplica, subject: str, data: bytes) -> None:
    """It changes nothing, but the catalog has seen it."""
    (rejected,) = fold.take(Entry(1, 5.0, subject, data))
    assert isinstance(rejected, CommandRejected)
    assert (fold.position, fold.catalog.seq) == (1, 1)
    assert not fold.catalog.agents


@pytest.mark.parametrize("seq", [0, 2])
def test_only_the_next_entry_is_taken(fold: CatalogReplica, seq: int) -> None:
    with pytest.raises(ValueError, match="can't follow on 0"):
        fold.take(Entry(seq, 5.0, subjects.command_subject("run-7", "join", "a"), codec.encode(JOIN)))
    assert fold.position == 0


def taken(world: CatalogDriver, fold: CatalogReplica) -> Iterator[str]:
    """Let the planner take what it lacks of the log, with events between the commands; yield the verb of each."""
    for seq, time, command in world.log:
        if seq <= fold.position:
            continue
        while fold.position < seq - 1:
            fold.take(Entry(fold.position + 1, 5.0, "tensorhub.v1.run-7.event._hub.agent.joined", b"{}"))
        assert not isinstance(command, Unreadable)
        verb = str(command.__struct_config__.tag)
        process = None if command.by is None else command.by.process
        fold.take(Entry(seq, time, subjects.command_subject("run-7", verb, process), codec.encode(command)))
        yield verb


def test_a_whole_story_gives_the_registrys_catalog() -> None:
    """Commands as they stand in the log, with events between them; some name no sender, as those from outside."""
    world = CatalogDriver()
    world.replica_of("trainer", "a")
    world.replica_of("rollout", "b")
    world.publish("trainer", 1)
    world.fetch("rollout")
    world.say(Retain(model=MODEL, last=2))
    fold = CatalogReplica(Catalog(world.catalog.job, level=world.catalog.level))
    assert len(list(taken(world, fold))) == len(world.log)
    assert fold.catalog == world.catalog


@pytest.mark.parametrize("pipelining", [True, False])
def test_a_lookup_stays_while_its_own_replica_is_read_and_is_right_after_any_command(*, pipelining: bool) -> None:
    """Each shard says that it has its leases and that it is filled, and the others need not look up everybody again."""
    world, stayed = CatalogDriver(), []
    for name, *agents in (("trainer", "a"), ("engine", "b", "c"), ("other", "d")):
        world.replica_of(name, *agents)
    world.publish("trainer", 12)
    fold = CatalogReplica(Catalog(world.catalog.job, level=world.catalog.level))
    limits = PlanLimits(pipelining=pipelining)
    assert list(taken(world, fold))[-1] == "ready"
    world.fetch("engine")
    world.fetch("other")
    world.empty("trainer")
    for verb in taken(world, fold):
        for name, agent in (("engine", "b"), ("other", "d")):
            asked = PlanRequest(model=MODEL, version=12, replica=name, shard=0, agent=agent, root=None, at_seq=1)
            before = list(fold.rolls.values())
            found = found_in(fold, asked, limits, any_layout=True)
            assert isinstance(found, Candidates)
            assert found == found_in(CatalogReplica(fold.catalog), asked, limits, any_layout=True)
            stayed += [(name, verb) for each in before if each is found.of_replica]
    assert stayed == [("engine", "granted"), ("engine", "granted"), ("engine", "filled"), ("other", "granted")]


def test_a_planner_that_begins_with_a_snapshot_in_mid_round_plans_as_one_that_has_folded_all() -> None:
    """The second reader is sent to the first one, which is half-filled, and not to the one ready holder as well."""
    world = CatalogDriver()
    for name, agent in (("trainer", "a"), ("first", "b"), ("second", "c")):
        world.replica_of(name, agent)
        world.catalog.agents[agent].host = agent
    world.publish("trainer", 12)
    world.want("first", "latest")
    taken = encode(Snapshot(world.catalog.seq, world.catalog.time, world.catalog))
    turn = decided(world.want("second", "latest"))
    demand = PlanRequest(
        model=MODEL,
        version=12,
        replica="second",
        shard=0,
        agent="c",
        root=root(12),
        at_seq=world.catalog.seq,
        turn=ReadPriority(turn.cmd, turn.round),
    )
    snapshot = decode(JOB, taken)
    begun = CatalogReplica(snapshot.catalog, snapshot.seq)
    for seq, time, command in world.log:
        if seq > snapshot.seq:
            apply(begun.catalog, seq, time, command)
    limits, sizes = PlanLimits(), PieceSizes([4 * MIB] * 256)
    answers = []
    for fold in (CatalogReplica(world.catalog), begun):
        found = found_in(fold, demand, limits, any_layout=False)
        assert isinstance(found, Candidates)
        answers.append(PlanDecision(JOB, demand, found, sizes).decide(LoadLedger(limits), limits, 0.0))
    assert answers[0] == answers[1]
    assert isinstance(answers[1], Plan)
    assert [share.source.replica for share in answers[1].shares] == ["first"]
