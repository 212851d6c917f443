"""What a planner takes for load, whatever beats and logs come when: never a reader that the log says has ended."""

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
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

JOB = "run-7"
READERS = tuple(ReaderId(JOB, "policy", replica, 0) for replica in "xy")
AGENTS = ("a", "b")
NOW = 1.0


@dataclass
class World:
    """The truth, and a planner beside others: what it has seen of the log, what it has assigned, which beats come."""

    ledger: LoadLedger = field(default_factory=lambda: LoadLedger(PlanLimits()))
    folded: int = 0
    coming: list[Heartbeat] = field(default_factory=list)
    assigned: dict[ReaderId, set[str]] = field(default_factory=lambda: defaultdict(set))
    log: list[tuple[ReaderId, Event]] = field(default_factory=list)
    decided: dict[ReaderId, int] = field(default_factory=dict)
    """Of the reads under way, by the log."""
    leases: set[tuple[str, ReaderId, int]] = field(default_factory=set)
    wanted: list[tuple[str, ReaderId, int]] = field(default_factory=list)
    """Leases that were planned and not granted yet."""
    were: dict[tuple[ReaderId, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """From whom each read has ever read, or was to."""

    # What happens.

    def decide(self, reader: ReaderId) -> None:
        """Also anew, while it reads: its leases end when its agent hears of it."""
        event = RoundDecided(model=reader.model, replica=reader.replica, round=1, attempt=1, version=1, roots=("r",))
        self.log.append((reader, event))
        self.decided[reader] = len(self.log)

    def read(self, reader: ReaderId, agent: str, is_mine: bool) -> None:  # noqa: FBT001 (drawn)
        self.decide(reader)
        self.plan(reader, agent, is_mine)
        while self.wanted:
            self.grant()
        self.say(agent)

    def say(self, agent: str) -> None:
        self.beat(agent)
        while self.coming:
            self.hear("once")

    def plan(self, reader: ReaderId, agent: str, is_mine: bool) -> None:  # noqa: FBT001 (drawn)
        if reader in self.decided:
            if is_mine:
                self.fold_all()
                self.ledger.done(reader)
                self.assigned[reader] = set()
            self._assign(reader, agent, is_mine=is_mine)

    def try_beside(self, reader: ReaderId, agent: str, is_mine: bool) -> None:  # noqa: FBT001 (drawn)
        """A reader asks for a part from somebody else than the one that it reads from, and goes on there."""
        if reader in self.decided:
            others = [each for each in AGENTS if each != agent]
            if is_mine:
                self.fold_all()
                self.ledger.failed(reader, map(source, others))
                self.assigned[reader].difference_update(others)
            self._assign(reader, agent, is_mine=is_mine)

    def _assign(self, reader: ReaderId, agent: str, *, is_mine: bool) -> None:
        """By the planner, or by another one, which it does not hear of."""
        if is_mine:
            share = Share(source=source(agent), transport="ucxx", pieces=((0, 1),), nbytes=1, why="")
            self.ledger.assign(reader, Plan(version=1, shares=(share,), why=""), NOW)
            self.assigned[reader].add(agent)
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
        self.coming.append(Heartbeat(agent=agent, incarnation=1, serving=serving))

    def hear(self, how: str) -> None:
        if self.coming:
            beat = self.coming[0]
            if how != "twice":
                del self.coming[0]
            if how != "lost":
                self.ledger.hear(beat, NOW)

    def fold_one(self) -> None:
        if self.folded < len(self.log):
            reader, event = self.log[self.folded]
            self.folded += 1
            self.ledger.see(JOB, self.folded, event)
            if not isinstance(event, RoundDecided):
                self.assigned.pop(reader, None)

    def fold_all(self) -> None:
        while self.folded < len(self.log):
            self.fold_one()

    # What must hold.

    def check(self, *, calm: bool = False) -> None:
        """In the calm, when all is said and heard, it counts exactly who reads."""
        self.ledger.check()
        ends = {reader: seq for seq, (reader, _) in enumerate(self.log[: self.folded], start=1)}
        for agent in AGENTS:
            load = self.ledger.busy((agent, "ucxx"), NOW).readers
            assigned = {reader for reader, agents in self.assigned.items() if agent in agents}
            read = {reader for its, reader, _ in self.leases if its == agent}
            may_read = {
                reader
                for (reader, decided), agents in self.were.items()
                if agent in agents and decided >= ends.get(reader, 0)
            }
            assert len(assigned) <= load <= len(assigned | may_read)
            assert not calm or load == len(assigned | read)

    def calm_down(self) -> None:
        for reader in READERS:
            self.leave(reader)
        while self.wanted:
            self.grant()
        self.fold_all()
        for agent in AGENTS:
            self.say(agent)


readers, agents = st.sampled_from(READERS), st.sampled_from(AGENTS)
steps = st.one_of(
    st.tuples(st.just(World.decide), readers),
    st.tuples(st.sampled_from([World.read, World.plan, World.try_beside]), readers, agents, st.booleans()),
    st.tuples(st.sampled_from([World.grant, World.fold_one, World.fold_all])),
    st.tuples(st.sampled_from([World.fills, World.fails]), readers),
    st.tuples(st.just(World.leave), readers),
    st.tuples(st.sampled_from([World.beat, World.say]), agents),
    st.tuples(st.just(World.hear), st.sampled_from(["once", "twice", "lost"])),
)


@given(st.lists(steps, max_size=60))
def test_nobody_is_load_whose_read_the_log_says_is_over(story: list[Any]) -> None:
    world = World()
    for happens, *what in story:
        happens(world, *what)
        world.check()
    world.calm_down()
    world.check(calm=True)
