"""One seed's world: who is there, what they are to do, and what must hold after every step."""

import random
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import Final

from tensorhub_agent.effects import Key
from tensorhub_agent.op_read import ReadOperation
from tensorhub_agent.shard import Memory, Place, ShardCore
from tensorhub_common.catalog.state import root_key
from tensorhub_common.subjects import cmd
from tensorhub_common.wire.codec import encode
from tensorhub_common.wire.commands import Command, Publish, Retain, Rewind
from tensorhub_registry.outcomes import JobFold
from tensorhub_simulator.agent import AgentNode
from tensorhub_simulator.calls import Calls
from tensorhub_simulator.clock import Clock, Node
from tensorhub_simulator.faults import Faults
from tensorhub_simulator.link import Link
from tensorhub_simulator.log import ModelLog
from tensorhub_simulator.memory import Violation
from tensorhub_simulator.net import Net
from tensorhub_simulator.oracle import Oracle
from tensorhub_simulator.planner import PlannerNode
from tensorhub_simulator.registry import Lease, RegistryNode
from tensorhub_simulator.setting import Setting
from tensorhub_simulator.strangers import Strangers
from tensorhub_simulator.workers import Group, Rank

STORY_LINES: Final = 60
MODEL: Final = "policy"
BEAT_S: Final = 0.5
LOOK_S: Final = 0.5
RETAIN_S: Final = 0.7
LIVE_WITHIN_S: Final = 60.0
"""After the last trouble a fresh version reaches all rollouts within this."""
QUIET_SLOWNESS: Final = 0.3
STEPS_MAX: Final = 400_000


class World:
    """Everything that one seed makes."""

    def __init__(self, seed: int, setting: Setting, *, steps: bool = False) -> None:
        """Build it; `run` lets it live."""
        self.seed, self.plan = seed, setting
        self.job = "sim"
        self.clock = Clock(seed)
        self.story: deque[str] = deque(maxlen=None if steps else STORY_LINES)
        self.nats, self.net = Node("nats"), Net(self)
        self.nats.up = True
        self.log = ModelLog(self.clock, setting.window_s, self.nats)
        self.truth = Oracle(self.job, self.story)
        self.log.watchers.append(self.truth.entry)
        self.lease, self.calls = Lease(), Calls(self)
        self.links: dict[str, Link] = {}
        self.strangers = Strangers(self)
        self.left: Counter[str] = Counter()
        """Why sources were left, and how often."""
        self.touched: set[AgentNode] = set()
        self.folded: set[RegistryNode] = set()
        self.places: dict[Key, Place] = {}
        self.quiet_since: float | None = None
        self.quiet_at = 0
        """Where the log ended then."""
        self._numbers = 0
        self._rulings = random.Random(seed * 15485863 + 1)
        self._verified: dict[Key, tuple[int, int | None, int]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self.agents = {
            f"agent-{n}": AgentNode(f"agent-{n}", self, f"host-{n % 2}", "here") for n in range(setting.agents)
        }
        self.registries = [RegistryNode(f"registry-{n}", self) for n in range(setting.registries)]
        self.planner = PlannerNode(self, setting.planner)
        self.groups: list[Group] = []
        self.ranks: list[Rank] = []
        self._build()
        self.faults = Faults(self)

    def _build(self) -> None:
        rng, setting = self.clock.rng, self.plan
        sizes = tuple(rng.choice((2, 6, 10)) for _ in range(setting.pieces))
        agents = list(self.agents.values())
        names = [f"trainer-{n}" for n in range(setting.trainers)] + [f"rollout-{n}" for n in range(setting.rollouts)]
        for name in names:
            group = Group(name, trains=name.startswith("trainer"))
            self.groups.append(group)
            spot = not group.trains and self._rulings.random() < setting.spot
            for shard in range(setting.shards):
                key, layout = Key(MODEL, name, shard), f"layout-{shard}"
                self._sizes[layout] = sizes
                # Of each seed other replicas; not drawn, so that the seeds stay what they were.
                staged = not group.trains and (self.seed + len(self.groups)) % 2 == 0
                self.places[key] = Place(key, setting.shards, spot=spot, layout=layout, nbytes=sizes, staged=staged)
                self.ranks.append(Rank(self, group, key, rng.choice(agents)))

    # What the others ask of the world.

    def number(self) -> int:
        """Return a number that nobody else has."""
        self._numbers += 1
        return self._numbers

    def note(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.clock.now:8.3f}  {text}")

    @property
    def slowness(self) -> float:
        """How slow copying is now; without trouble no source is slower than what counts as a stall."""
        return self.plan.slowness if self.quiet_since is None else QUIET_SLOWNESS

    def is_cut(self, one: AgentNode, other: AgentNode) -> bool:
        """Tell whether the path between two agents is cut now."""
        return self.net.is_cut(one, other)

    def net_loses(self, *nodes: Node) -> bool:
        """Tell whether a message by NATS that these have to do with is lost."""
        return self.net.loses(*nodes)

    def processes(self) -> list[Node]:
        """Name all processes but the workers' and NATS."""
        return [*self.registries, self.planner, *self.agents.values()]

    def away(self) -> list[Node]:
        """Name the agents that have left, for good as far as anybody knows."""
        return [agent for agent in self.agents.values() if agent.left]

    def _is_whole(self, nodes: Iterable[Node]) -> bool:
        """Tell whether all run and reach what they need."""
        return self.log.up and not self.nats.paused and all(node.runs and not node.cut_off for node in nodes)

    def make_fold(self, job: str) -> JobFold:
        """Return a registry's fold."""
        return JobFold(job)

    def sizes_of(self, layout: str) -> tuple[int, ...]:
        """Return the bytes of a layout's pieces."""
        return self._sizes[layout]

    def clash(self, one: str, other: str) -> bool:
        """Tell whether two layouts of one replica can't belong together."""
        return one.partition("-")[0] != other.partition("-")[0]

    def agent_died(self, agent: AgentNode) -> None:
        """Let all notice that an agent's process is gone."""
        self.calls.agent_died(agent)
        for rank in self.ranks:
            if rank.agent is agent:
                rank.agent_gone()
        self.faults.agent_died(agent)

    # Running.

    def run(self) -> None:
        """Live until a fresh version has reached all rollouts after the last trouble. Raises `Violation`."""
        for registry in self.registries:
            registry.start()
        self.planner.start()
        for number, agent in enumerate(self.agents.values()):
            self.clock.after(self.faults.starts_in(number), None, agent.start)
        for rank in self.ranks:
            rank.start()
        for group in self.groups:
            self.clock.after(self.clock.rng.random() * 0.5, None, partial(self._direct, group))
        self.clock.after(BEAT_S, None, self._beat)
        self.clock.after(LOOK_S, None, self._look)
        self.clock.after(RETAIN_S, None, self._retain)
        while not self._is_done() and self.clock.step():
            self._check()
            if self.clock.steps > STEPS_MAX:
                raise Violation("bounded work", f"{STEPS_MAX} steps and no end")

    def _is_done(self) -> bool:
        return self.quiet_since is not None and self._all_hold() is None

    def _all_hold(self) -> str | None:
        """Say what is missing until a version of the quiet time stands everywhere."""
        record = self.truth.catalog.models.get(MODEL)
        newest = record.versions.get(record.last) if record is not None and record.last is not None else None
        assert self.quiet_since is not None
        if newest is None or not self._is_fresh(newest.number):
            return "no version was published since"
        holders = self.truth.holders(MODEL)
        late = [
            group.replica for group in self.groups if not group.trains and holders.get(group.replica) != newest.number
        ]
        if late:
            return f"{late} do not hold version {newest.number}"
        apart = [rank.name for rank in self.ranks if not rank.group.trains and rank.version != newest.number]
        return f"{apart} were not told of version {newest.number}" if apart else None

    def _beat(self) -> None:
        for agent in self.agents.values():
            if agent.runs and self.log.up:
                for registry in self.registries:
                    if registry.runs and not self.net_loses(agent, registry):
                        registry.beat(agent.name, agent.core.incarnation)
        self.clock.after(BEAT_S, None, self._beat)

    def _look(self) -> None:
        """Now and then look at the bounds, and end the trouble when its time is over."""
        now = self.clock.now
        self.calls.check()
        over = 1.0 + self.plan.trouble_s
        nodes = (*(node for node in self.processes() if node not in self.away()), *self.ranks)
        if self.quiet_since is None and now > over and self._is_whole(nodes):
            for agent in self.agents.values():
                agent.dies_in, agent.drag = None, 1.0
            self.note("no more trouble")
            self.quiet_since = now
            self.quiet_at = len(self.log.entries)
        elif self.quiet_since is not None and now > self.quiet_since + LIVE_WITHIN_S:
            raise Violation("liveness", f"{LIVE_WITHIN_S:g} s after the last trouble {self._all_hold()}")
        self.clock.after(LOOK_S, None, self._look)

    def _direct(self, group: Group) -> None:
        """Tell a group what to do next."""
        rng, quiet = self.clock.rng, self.quiet_since is not None
        group.serial += 1
        if group.trains:
            self._direct_trainer(group)
        else:
            self._direct_rollout(group)
        pause = 4.0 if quiet and group.trains else rng.choice((0.2, 0.7, 1.5))
        self.clock.after(pause, None, lambda: self._direct(group))

    def _direct_trainer(self, group: Group) -> None:
        rng, quiet = self.clock.rng, self.quiet_since is not None
        record = self.truth.catalog.models.get(MODEL)
        last = record.last if record is not None else None
        if last is not None and not quiet and self._rulings.random() < self.plan.rewinds:
            self._rule(Rewind(model=MODEL, to=max(0, last - self._rulings.randint(1, 2))))
        group.version = None if last is None or rng.random() < 0.6 else last + rng.randint(0, 3)  # noqa: PLR2004 (odds)
        group.timeout_s = rng.choice((0.05, 0.3, 1.0, 4.0))
        group.act = "wish" if rng.random() < 0.15 and not quiet else "publish"  # noqa: PLR2004 (odds)
        if quiet:
            # One group publishes once more and stands; the others stay as they are.
            standing = all(rank.published for rank in group.ranks) and self._stands_fresh()
            under_way = any(rank.done != group.serial - 1 for rank in group.ranks)
            if standing or under_way or group is not self.groups[0]:
                group.serial -= 1
            group.version, group.timeout_s = None, 4.0

    def _stands_fresh(self) -> bool:
        record = self.truth.catalog.models[MODEL]
        newest = record.versions.get(record.last) if record.last is not None else None
        return newest is not None and newest.holders > 0 and self._is_fresh(newest.number)

    def _is_fresh(self, version: int) -> bool:
        """Tell whether a version was published since the last trouble."""
        return self.truth.published_at.get((MODEL, version), 0) > self.quiet_at

    def _direct_rollout(self, group: Group) -> None:
        rng, quiet = self.clock.rng, self.quiet_since is not None
        record = self.truth.catalog.models.get(MODEL)
        last = record.last if record is not None else None
        dice = rng.random()
        group.act = "release" if dice < 0.04 else "republish" if dice < 0.08 else "read"  # noqa: PLR2004 (odds)
        group.want = rng.choice(("latest", "latest", "newer", "newer", last if last is not None else "latest"))
        group.timeout_s = rng.choice((0.05, 0.5, 2.0, 6.0))
        group.wait_s = rng.choice((0.0, 0.3, group.timeout_s))
        if quiet:
            group.act, group.want, group.timeout_s = "read", "latest", 5.0

    def _retain(self) -> None:
        """Have versions retained, as soon as there is a model."""
        if not self.plan.retain or (MODEL in self.truth.catalog.models and self.truth.catalog.models[MODEL].retain):
            return
        self._rule(Retain(model=MODEL, last=self.plan.retain))
        self.clock.after(RETAIN_S, None, self._retain)

    def _rule(self, command: Command) -> None:
        """Say what a user rules, as anyone may."""
        verb, number = str(command.__struct_config__.tag), self.number()
        if self.log.up:
            self.log.append(cmd(self.job, verb), encode(command), f"rule-{number}")

    def wish(self, group: Group) -> None:
        """Say the wish that a group's memory be published, as anyone may, once all its ranks have written."""
        ready = all(rank.registered and rank.done == group.serial for rank in group.ranks)
        if self.quiet_since is not None or not ready:
            return
        command = Publish(model=MODEL, replica=group.replica, version=group.version)
        number, serial = self.number(), group.serial
        group.wishes[serial] = None

        def arrive() -> None:
            seq = self.log.append(cmd(self.job, "publish"), encode(command), f"wish-{number}") if self.log.up else 0
            group.wishes[serial] = seq

        self.clock.after(self.clock.lag(), self.nats, arrive)

    # What must hold.

    def _check(self) -> None:
        for registry in self.folded:
            if registry.up:
                registry.fold.check()
                registry.liveness.check()
        self.folded.clear()
        if any(agent.up and agent.core.table.coming for agent in self.touched):
            self._check_waiting()
        for agent in self.touched:
            if agent.up:
                agent.core.check()
                for core in agent.core.shards.values():
                    self._check_shard(agent, core)
        self.touched.clear()

    def _check_waiting(self) -> None:
        """Whoever has a lease on what is being filled waits for that replica; nobody may wait for itself.

        A shard that has not heard yet that its round was decided anew gives its readers up as soon as it does.
        """
        waits_for: dict[str, set[str]] = {}
        for agent in self.agents.values():
            for key, coming in agent.core.table.coming.items() if agent.up else ():
                if coming.turn != self.truth.rules.turns.get((key.model, key.replica)):
                    continue
                for lease in coming.leases.values():
                    waits_for.setdefault(lease.reader.split("/")[1], set()).add(key.replica)
        left = set(waits_for)
        while left:
            ended = {replica for replica in left if not waits_for[replica] & left}
            if not ended:
                raise Violation("no wait cycle", f"{sorted(left)} wait for each other's pieces")
            left -= ended

    def _check_shard(self, agent: AgentNode, core: ShardCore) -> None:
        key, held = core.key, core.held
        if isinstance(core.operation, ReadOperation) and core.operation.transfer is not None:
            core.operation.transfer.check()
        if held.memory not in (Memory.READY, Memory.DRAINING) or held.version is None:
            return
        segment = agent.shelf[key].segment
        state = (agent.life, held.version, segment.generation)
        if self._verified.get(key) == state:
            return
        place = root_key(core.place.shards, key.shard, core.place.layout)
        if not self.truth.is_true(key.model, held.version, place, segment):
            raise Violation(
                "exact version", f"{key} is {held.memory} at {held.version} on {agent.name} with other bytes"
            )
        self._verified[key] = state
