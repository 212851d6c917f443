"""What two planners take for load, whatever beats and logs come when: never a reader that the log says has ended."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import source

from tensorhub_common.protocol.heartbeat import Heartbeat, ReaderLoad, ServingLoad
from tensorhub_common.protocol.log.events import Event, RoundDecided, RoundFailed, ShardFilled
from tensorhub_common.protocol.plans import Plan, Share
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import AgentTransport, ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

JOB = "run-7"
READERS = tuple(ReaderId(JOB, "policy", replica, 0) for replica in "xy")
AGENTS = ("a", "b")
NOW = 1.0


def lane(agent: str) -> AgentTransport:
    return (agent, "ucxx")


@dataclass
class Planner:
    """A ledger, how much of the log it has seen, what beats are on their way to it, and what it has assigned."""

    ledger: LoadLedger = field(default_factory=lambda: LoadLedger(PlanLimits()))
    folded: int = 0
    coming: list[Heartbeat] = field(default_factory=list)
    assigned: dict[ReaderId, set[str]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class World:
    """The truth."""

    log: list[tuple[ReaderId, Event]] = field(default_factory=list)
    decided: dict[ReaderId, int] = field(default_factory=dict)
    """Of the reads under way, by the log."""
    leases: set[tuple[str, ReaderId, int]] = field(default_factory=set)
    wanted: list[tuple[str, ReaderId, int]] = field(default_factory=list)
    """Leases that were planned and not granted yet."""
    were: dict[tuple[ReaderId, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """From whom each read has ever read, or was to."""
    planners: tuple[Planner, Planner] = field(default_factory=lambda: (Planner(), Planner()))

    # What happens.

    def decide(self, reader: ReaderId) -> None:
        """Also anew, while it reads: its leases end when its agent hears of it."""
        event = RoundDecided(model=reader.model, replica=reader.replica, round=1, attempt=1, version=1, roots=("r",))
        self.log.append((reader, event))
        self.decided[reader] = len(self.log)

    def read(self, reader: ReaderId, number: int, agent: str) -> None:
        self.decide(reader)
        self.plan(reader, number, agent)
        while self.wanted:
            self.grant()
        self.say(agent)

    def say(self, agent: str) -> None:
        self.beat(agent)
        for number, planner in enumerate(self.planners):
            while planner.coming:
                self.hear(number, "once")

    def plan(self, reader: ReaderId, number: int, agent: str) -> None:
        if reader in self.decided:
            planner = self.planners[number]
            self.fold_all(number)
            planner.ledger.done(reader)
            planner.assigned[reader] = set()
            self._assign(planner, reader, agent)

    def try_beside(self, reader: ReaderId, number: int, agent: str) -> None:
        """A reader asks for a part from somebody else than the one that it reads from, and goes on there."""
        if reader in self.decided:
            planner = self.planners[number]
            self.fold_all(number)
            others = [each for each in AGENTS if each != agent]
            planner.ledger.failed(reader, map(source, others))
            planner.assigned[reader].difference_update(others)
            self._assign(planner, reader, agent)

    def _assign(self, planner: Planner, reader: ReaderId, agent: str) -> None:
        share = Share(source=source(agent), transport="ucxx", pieces=((0, 1),), nbytes=1, why="")
        planner.ledger.assign(reader, Plan(version=1, shares=(share,), why=""), NOW)
        planner.assigned[reader].add(agent)
        self.were[reader, self.decided[reader]].add(agent)
        self.wanted.append((agent, reader, self.decided[reader]))

    def grant(self) -> None:
        if self.wanted:
            self.leases.add(self.wanted.pop(0))

    def fills(self, reader: ReaderId) -> None:
        self._end(
            reader, ShardFilled(model=reader.model, replica=reader.replica, shard=0, version=1, round=1, root="r")
        )

    def fails(self, reader: ReaderId) -> None:
        self._end(reader, RoundFailed(model=reader.model, replica=reader.replica, round=1, error="", message=""))

    def _end(self, reader: ReaderId, event: Event) -> None:
        if self.decided.pop(reader, None) is not None:
            self.log.append((reader, event))

    def leave(self, reader: ReaderId) -> None:
        """Let go of what is not read any more, which may be long after the log has said so."""
        now = self.decided.get(reader)
        self.leases = {each for each in self.leases if each[1] != reader or each[2] == now}
        self.wanted = [each for each in self.wanted if each[1] != reader or each[2] == now]

    def beat(self, agent: str) -> None:
        served = tuple(
            ReaderLoad(each.job, each.model, each.replica, each.shard, decided, 1)
            for its, each, decided in sorted(self.leases, key=str)
            if its == agent
        )
        # As agents do, a reader with two leases is one.
        named = tuple({each.replica: each for each in sorted(served, key=lambda one: one.decided)}.values())
        serving = (ServingLoad("ucxx", len(named), len(named), named),) if named else ()
        for planner in self.planners:
            planner.coming.append(Heartbeat(agent=agent, incarnation=1, serving=serving))

    def hear(self, number: int, how: str) -> None:
        planner = self.planners[number]
        if planner.coming:
            beat = planner.coming[0]
            if how != "twice":
                del planner.coming[0]
            if how != "lost":
                planner.ledger.hear(beat, NOW)

    def fold_one(self, number: int) -> None:
        self.fold(number, self.planners[number].folded + 1)

    def fold_all(self, number: int) -> None:
        self.fold(number, len(self.log))

    def fold(self, number: int, upto: int) -> None:
        planner = self.planners[number]
        while planner.folded < min(upto, len(self.log)):
            reader, event = self.log[planner.folded]
            planner.folded += 1
            planner.ledger.see(JOB, planner.folded, event)
            if not isinstance(event, RoundDecided):
                planner.assigned.pop(reader, None)

    # What must hold.

    def check(self) -> None:
        for planner in self.planners:
            planner.ledger.check()
            ends = {reader: seq for seq, (reader, _) in enumerate(self.log[: planner.folded], start=1)}
            for agent in AGENTS:
                load = planner.ledger.busy(lane(agent), NOW).readers
                assigned = {reader for reader, agents in planner.assigned.items() if agent in agents}
                may_read = {
                    reader
                    for (reader, decided), agents in self.were.items()
                    if agent in agents and decided >= ends.get(reader, 0)
                }
                assert len(assigned) <= load <= len(assigned | may_read)

    def check_calm(self) -> None:
        """Once all is said and heard, each planner counts exactly who reads."""
        for reader in READERS:
            self.leave(reader)
        while self.wanted:
            self.grant()
        for agent in AGENTS:
            self.beat(agent)
        for number, planner in enumerate(self.planners):
            self.fold_all(number)
            while planner.coming:
                self.hear(number, "once")
            for agent in AGENTS:
                read = {reader for its, reader, _ in self.leases if its == agent}
                assigned = {reader for reader, agents in planner.assigned.items() if agent in agents}
                assert planner.ledger.busy(lane(agent), NOW).readers == len(read | assigned)


readers, planners, agents = st.sampled_from(READERS), st.integers(0, 1), st.sampled_from(AGENTS)
steps = st.one_of(
    st.tuples(st.just(World.decide), readers),
    st.tuples(st.sampled_from([World.read, World.plan, World.try_beside]), readers, planners, agents),
    st.tuples(st.just(World.grant)),
    st.tuples(st.sampled_from([World.fills, World.fails]), readers),
    st.tuples(st.just(World.leave), readers),
    st.tuples(st.sampled_from([World.beat, World.say]), agents),
    st.tuples(st.just(World.hear), planners, st.sampled_from(["once", "twice", "lost"])),
    st.tuples(st.sampled_from([World.fold_one, World.fold_all]), planners),
)


@given(st.lists(steps, max_size=60))
def test_nobody_is_load_whose_read_the_log_says_is_over(story: list[Any]) -> None:
    world = World()
    for happens, *what in story:
        happens(world, *what)
        world.check()
    world.check_calm()
