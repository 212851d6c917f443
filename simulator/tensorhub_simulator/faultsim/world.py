"""One seed's world: who is there, what they are to do, and what must hold after every step."""

from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import root_key
from tensorhub_registry.core.job_fold import JobFold
from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.config import WorldConfig
from tensorhub_simulator.faultsim.faults.all_faults import ALL
from tensorhub_simulator.faultsim.faults.injector import Fault, Injector
from tensorhub_simulator.faultsim.faults.rolling_upgrade import Upgrade, first_level
from tensorhub_simulator.faultsim.faults.stolen_tickets import StolenTickets
from tensorhub_simulator.faultsim.invariants.log_agreement import check_going, check_standing
from tensorhub_simulator.faultsim.invariants.reference import Reference
from tensorhub_simulator.faultsim.invariants.wait_graph import check_promises, check_waiting
from tensorhub_simulator.faultsim.invariants.worker_views import WorkerViews
from tensorhub_simulator.faultsim.models.job_log import JobLogModel
from tensorhub_simulator.faultsim.models.layouts import Cutting, Cuttings, Layouts, equal_cutting
from tensorhub_simulator.faultsim.models.network import Net
from tensorhub_simulator.faultsim.models.segments import Violation
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.pending_calls import Calls
from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
from tensorhub_simulator.faultsim.nodes.registry import Lease, RegistryNode
from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan, WorkerNode
from tensorhub_simulator.faultsim.observations import Tally
from tensorhub_simulator.faultsim.transfers.source_session import ReadSession
from tensorhub_simulator.faultsim.workload.director import Director
from tensorhub_simulator.faultsim.workload.mapping_readers import MappingReaders

STORY_LINES: Final = 60
JOBS: Final = ("sim", "other")
BEAT_S: Final = 0.5
LOOK_S: Final = 0.5
LIVE_WITHIN_S: Final = 60.0
"""After the last trouble a fresh version reaches all rollouts within this."""
QUIET_SLOWNESS: Final = 0.3
DONE_STEPS: Final = 8
"""Whether a fresh version has come everywhere is looked up every so many steps."""
RACK: Final = "rack-0"
STAGED_ODDS: Final = 0.5
STEPS_MAX: Final = 400_000


class World:
    """Everything that one seed makes."""

    def __init__(
        self,
        seed: int,
        setting: WorldConfig,
        *,
        steps: bool = False,
        first: "World | None" = None,
        faults: Sequence[Fault] = ALL,
    ) -> None:
        """Build it; `run` lets it live. A job beside the first one has a log of its own, and the same processes."""
        self.seed, self.plan = seed, setting
        self.streams = Streams(seed)
        self.first = first or self
        self.jobs: list[World] = first.jobs if first is not None else []
        self.job = JOBS[len(self.jobs)]
        self.jobs.append(self)
        self.clock: Clock = first.clock if first is not None else Clock()
        self.story: deque[str] = first.story if first is not None else deque(maxlen=None if steps else STORY_LINES)
        self.nats: Node = first.nats if first is not None else Node("nats", self.streams.of("messages", "nats"))
        self.net: Net = first.net if first is not None else Net(self)
        self.nats.up = True
        self.log = JobLogModel(self.clock, setting.window_s, self.nats)
        self.layouts = Layouts()
        self.first_level = first_level(is_upgraded=setting.upgrade)
        self.truth = Reference(self.job, self.first_level, self.story, self.layouts)
        self.log.watchers.append(self.truth.entry)
        self.lease: Lease = first.lease if first is not None else Lease()
        self.calls = Calls(self)
        self.links: dict[str, ReadSession] = {}
        self.strangers = StolenTickets(self)
        self.tally = Tally()
        self.touched: set[AgentNode] = set()
        self.folded: set[RegistryNode] = set()
        self.places: dict[ShardKey, ShardSpec] = {}
        self.quiet_since: float | None = None
        self.quiet_at = 0
        """Where the log ended then."""
        self._numbers = 0
        self._heartbeats = self.streams.of(self.job, "heartbeats")
        self.borrowers = MappingReaders(self)
        self.director, self.views = Director(self), WorkerViews(self)
        self._verified: dict[ShardKey, tuple[int, int | None, int]] = {}
        self._populate(first)
        self.faults: Injector = first.faults if first is not None else Injector(self, faults)
        self.upgrade = Upgrade(self)
        if first is None and setting.beside is not None:
            World(seed, setting.beside, first=self)

    def _populate(self, first: "World | None") -> None:
        """Make the processes and the workers. A process of a job beside lives and dies with the same of the first."""
        self.agents = self._agents()
        self.registries = [RegistryNode(f"registry-{n}", self) for n in range(self.plan.registries)]
        self.planner = PlannerNode(self, self.plan.planner)
        self.groups: list[ReplicaPlan] = []
        self.ranks: list[WorkerNode] = []
        self._build()
        if first is not None:
            for mine, its in zip(self.processes(), first.processes(), strict=True):
                mine.join_family(its)

    def _agents(self) -> dict[str, AgentNode]:
        rack = RACK if self.plan.one_rack else ""
        sites = ["there" if self.plan.sites and n else "here" for n in range(self.plan.agents)]
        names = [f"agent-{n}" for n in range(self.plan.agents)]
        return {
            name: AgentNode(name, self, f"host-{n % 2}", site, rack)
            for n, (name, site) in enumerate(zip(names, sites, strict=True))
        }

    def _build(self) -> None:
        rng, setting = self.streams.of(self.job, "sizes"), self.plan
        sizes = tuple(rng.choice((2, 6, 10)) for _ in range(setting.pieces))
        equal = equal_cutting(setting.shards, sizes)
        cuttings = setting.cuttings or Cuttings((equal,) * setting.trainers, (equal,) * setting.rollouts)
        for model in setting.models:
            for number, cutting in enumerate(cuttings.trainers):
                self._add(self._replica(model, f"trainer-{number}", trains=True), cutting)
            for number, cutting in enumerate(cuttings.rollouts):
                self._add(self._replica(model, f"rollout-{number}", trains=False), cutting)

    def _replica(self, model: str, replica: str, *, trains: bool) -> ReplicaPlan:
        user = self.streams.of(self.job, "user", model, replica)
        return ReplicaPlan(model, replica, trains, user, self.streams.of(self.job, "rewinds", model, replica))

    def _add(self, group: ReplicaPlan, cutting: Cutting) -> None:
        setting = self.plan
        self.groups.append(group)

        def stream(name: str) -> Random:
            return self.streams.of(self.job, name, group.model, group.replica)

        spot = not group.trains and stream("spot").random() < setting.spot
        staged = (not group.trains or self.borrowers.are_there) and stream("staged").random() < STAGED_ODDS
        hosts = stream("hosts")
        for shard, layout in enumerate(cutting):
            key, digest = ShardKey(group.model, group.replica, shard), self.layouts.add(layout)
            sizes = self.layouts.table(digest).nbytes
            self.places[key] = ShardSpec(key, len(cutting), spot=spot, layout=digest, nbytes=sizes, staged=staged)
            agent = hosts.choice(list(self.agents.values()))
            if setting.sites:
                near, *far = self.agents.values()
                agent = near if group.trains else far[(len(self.groups) + shard) % len(far)]
            self.ranks.append(WorkerNode(self, group, key, agent))

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

    def folders(self) -> list[RegistryNode | PlannerNode]:
        """Name those who fold the log."""
        return [*self.registries, self.planner]

    def away(self) -> list[Node]:
        """Name the agents that have left, for good as far as anybody knows."""
        return [agent for agent in self.agents.values() if agent.state.left]

    def _is_whole(self, nodes: Iterable[Node]) -> bool:
        """Tell whether all run and reach what they need."""
        reached = self.log.up and not self.nats.state.paused
        return reached and all(node.runs and not node.state.cut_off for node in nodes)

    def make_fold(self, job: str) -> JobFold:
        """Return a registry's fold."""
        fold = JobFold(job)
        fold.catalog.level = self.first_level
        return fold

    def agent_died(self, agent: AgentNode) -> None:
        """Let all notice that an agent's process is gone."""
        self.calls.agent_died(agent)
        for rank in self.ranks:
            if rank.agent is agent:
                rank.agent_gone()
        if self is self.first:
            self.faults.agent_died(agent)

    # Running.

    def run(self) -> None:
        """Live until a fresh version has reached all rollouts after the last trouble. Raises `Violation`."""
        for number, agent in enumerate(self.agents.values()):
            self.clock.after(self.faults.starts_in(agent, number), None, agent.start)
        for job in self.jobs:
            job.begin()
        self.clock.after(LOOK_S, None, self._look)
        while not self._is_done() and self.clock.step():
            for job in self.jobs:
                job.check()
            if self.clock.steps > STEPS_MAX:
                raise Violation("bounded work", f"{STEPS_MAX} steps and no end")

    def begin(self) -> None:
        """Let everybody of this job but the agents begin."""
        for node in self.folders():
            node.start()
        for rank in self.ranks:
            rank.start()
        self.director.start()
        self.borrowers.start()
        self.clock.after(BEAT_S, None, self._beat)

    def _is_done(self) -> bool:
        quiet = self.quiet_since is not None and self.clock.steps % DONE_STEPS == 0
        return quiet and self._missing() is None

    def _missing(self) -> str | None:
        missing = {job.job: job.director.missing() for job in self.jobs}
        return next((f"in job {job}: {why}" for job, why in missing.items() if why is not None), None)

    def _beat(self) -> None:
        for agent in self.agents.values():
            if agent.runs and self.log.up:
                for registry in self.registries:
                    if registry.runs and not self.net_loses(agent, registry):
                        registry.beat(agent.name, agent.core.incarnation)
                if self.planner.runs and self._heartbeats.random() >= self.plan.loss_odds:
                    self.planner.hear(agent)
        self.clock.after(BEAT_S, None, self._beat)

    def _look(self) -> None:
        """Now and then look at the bounds, and end the trouble when its time is over."""
        now = self.clock.now
        for job in self.jobs:
            job.calls.check()
        over = 1.0 + self.plan.trouble_s
        processes = [node for node in self.processes() if node not in self.away()]
        nodes = [*processes, *(rank for job in self.jobs for rank in job.ranks)]
        if self.quiet_since is None and now > over and self._is_whole(nodes):
            for agent in self.agents.values():
                agent.dies_in, agent.drag = None, 1.0
            self.note("no more trouble")
            for job in self.jobs:
                job.quiet_since, job.quiet_at = now, len(job.log.entries)
        elif self.quiet_since is not None and now > self.quiet_since + LIVE_WITHIN_S:
            raise Violation("liveness", f"{LIVE_WITHIN_S:g} s after the last trouble {self._missing()}")
        self.clock.after(LOOK_S, None, self._look)

    # What must hold.

    def check(self) -> None:
        """Raise `Violation` where the last step has broken something."""
        for registry in self.folded:
            if registry.up:
                registry.fold.check()
                registry.liveness.check()
        self.folded.clear()
        if any(agent.up and agent.core.table.coming for agent in self.touched):
            check_waiting(self.links.values())
            check_promises(agent.core for agent in self.touched if agent.up)
        for agent in self.touched:
            if agent.up:
                agent.core.check()
                agent.check_memory()
                if agent.follower.position == len(self.log.entries) and not self.truth.pending:
                    check_standing(agent, self.truth.catalog)
                    check_going(agent, self.ranks)
                for core in agent.core.shards.values():
                    self._check_shard(agent, core)
        for rank in self.ranks:
            if rank.agent in self.touched:
                self.views.check(rank)
        self.touched.clear()

    def _check_shard(self, agent: AgentNode, core: ShardCore) -> None:
        key, held = core.key, core.held
        if isinstance(core.operation, ReadOperation) and core.operation.transfer is not None:
            core.operation.transfer.check()
        if held.memory not in (MemoryState.READY, MemoryState.DRAINING) or held.version is None:
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
