"""One seed's world: it makes the processes and their users, lets them run, and asks the invariants after every step."""

from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import root_key
from tensorhub_registry.queries.version_history import line
from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.config import Cutting, Cuttings, WorldConfig
from tensorhub_simulator.faultsim.faults.all_faults import ALL
from tensorhub_simulator.faultsim.faults.injector import Fault, Injector
from tensorhub_simulator.faultsim.faults.rolling_upgrade import plan_upgrade
from tensorhub_simulator.faultsim.faults.source_faults import plan_holder_stop
from tensorhub_simulator.faultsim.faults.stolen_tickets import StolenTickets
from tensorhub_simulator.faultsim.invariants.calls import CallRules
from tensorhub_simulator.faultsim.invariants.crowd import CrowdRules
from tensorhub_simulator.faultsim.invariants.log_agreement import check_going, check_standing
from tensorhub_simulator.faultsim.invariants.log_rules import watch_log
from tensorhub_simulator.faultsim.invariants.reference import Reference
from tensorhub_simulator.faultsim.invariants.retention import RetentionRule
from tensorhub_simulator.faultsim.invariants.served_pieces import check_served
from tensorhub_simulator.faultsim.invariants.tickets import TicketRule
from tensorhub_simulator.faultsim.invariants.wait_graph import check_promises, check_waiting
from tensorhub_simulator.faultsim.invariants.worker_views import WorkerViews
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.layouts import equal_cutting
from tensorhub_simulator.faultsim.models.leadership_lease import Lease
from tensorhub_simulator.faultsim.models.network import Network
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.job_processes import JobProcesses
from tensorhub_simulator.faultsim.nodes.pending_calls import PendingCalls
from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
from tensorhub_simulator.faultsim.nodes.registry import RegistryNode
from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan, WorkerNode
from tensorhub_simulator.faultsim.observations import AgentDied, CommandFolded, EventStored, PieceSent, Stepped
from tensorhub_simulator.faultsim.workload.crowd import Once
from tensorhub_simulator.faultsim.workload.director import Director
from tensorhub_simulator.faultsim.workload.mapping_readers import MappingReaders

TRANSCRIPT_LINES: Final = 60
JOBS: Final = ("sim", "other")
BEAT_S: Final = 0.5
LOOK_S: Final = 0.5
LIVE_WITHIN_S: Final = 60.0
"""After the last fault a fresh version reaches all rollouts within this."""
DONE_STEPS: Final = 8
"""Whether a fresh version has come everywhere is looked up every this many steps."""
RACK: Final = "rack-0"
STAGED_ODDS: Final = 0.5
STEPS_MAX: Final = 400_000


def make_processes(job: Job) -> JobProcesses:
    """Make the processes of a job, without its workers."""
    config, calls, planner = job.config, PendingCalls(job), PlannerNode(job, job.config.planner)
    registries = [RegistryNode(f"registry-{n}", job) for n in range(config.registries)]
    agents: dict[str, AgentNode] = {}
    for n in range(config.agents):
        site, rack = "there" if config.sites and n else "here", RACK if config.one_rack else ""
        name = f"agent-{n}"
        agents[name] = AgentNode(name, job, calls, planner, host=f"host-{n % 2}", site=site, rack=rack)
    job.hosts.update(agents)
    return JobProcesses(job, calls, planner, registries, agents)


class JobRun:
    """One job: its processes, its users, and what must hold of it."""

    def __init__(self, job: Job, first: "JobRun | None") -> None:
        """Make it. The processes of a job beside the first one are those of the first."""
        self.job, self.clock = job, job.clock
        self.processes = make_processes(job)
        self.reference = Reference(job)
        self.rules = watch_log(job)
        self._touched: dict[str, None] = {}
        self._verified: dict[ShardKey, tuple[int, int | None, int]] = {}
        self._heartbeats = job.stream("heartbeats")
        self.mapping_readers = MappingReaders(job)
        self.director: Director = (Director if job.config.crowd is None else Once)(self.processes)
        self._tickets, self._retention = TicketRule(job), RetentionRule()
        self._crowd = CrowdRules(job, job.config.rollouts) if job.config.crowd is not None else None
        CallRules(job, self.reference, self.rules)
        StolenTickets(job)
        job.subscribe(CommandFolded, self._retention.on_command)
        job.subscribe(EventStored, lambda stored: job.transcript.append(line(stored.event)))
        job.subscribe(PieceSent, check_served)
        job.subscribe(Stepped, lambda stepped: self._touched.setdefault(stepped.process))
        job.subscribe(AgentDied, self._on_agent_died)
        self._make_workers()
        self._views = WorkerViews(job, self.reference, self.processes.workers)
        if first is not None:
            for mine, its in zip(self.processes.all(), first.processes.all(), strict=True):
                mine.join_family(its)

    def _make_workers(self) -> None:
        job, config = self.job, self.job.config
        rng = job.stream("sizes")
        equal = equal_cutting(config.shards, [rng.choice((2, 6, 10)) for _ in range(config.pieces)])
        cuttings = config.cuttings or Cuttings((equal,) * config.trainers, (equal,) * config.rollouts)
        for model in config.models:
            for number, cutting in enumerate(cuttings.trainers):
                self._add_replica(self._replica(model, f"trainer-{number}", trains=True), cutting)
            for number, cutting in enumerate(cuttings.rollouts):
                self._add_replica(self._replica(model, f"rollout-{number}", trains=False), cutting)

    def _replica(self, model: str, replica: str, *, trains: bool) -> ReplicaPlan:
        job = self.job
        return ReplicaPlan(
            model, replica, trains, job.stream("user", model, replica), job.stream("rewinds", model, replica)
        )

    def _add_replica(self, group: ReplicaPlan, cutting: Cutting) -> None:
        job, config, processes = self.job, self.job.config, self.processes
        processes.replicas.append(group)

        def stream(name: str) -> Random:
            return job.stream(name, group.model, group.replica)

        spot = not group.trains and stream("spot").random() < config.spot
        staged = (not group.trains or self.mapping_readers.are_there) and stream("staged").random() < STAGED_ODDS
        hosts = stream("hosts")
        for shard, layout in enumerate(cutting):
            key, digest = ShardKey(group.model, group.replica, shard), job.layouts.add(layout)
            sizes = job.layouts.table(digest).nbytes
            job.specs[key] = ShardSpec(key, len(cutting), spot=spot, layout=digest, nbytes=sizes, staged=staged)
            agent = hosts.choice(list(processes.agents.values()))
            if config.sites:
                near, *far = processes.agents.values()
                agent = near if group.trains else far[(len(processes.replicas) + shard) % len(far)]
            processes.workers.append(WorkerNode(job, processes.calls, group, key, agent))

    def _on_agent_died(self, died: AgentDied) -> None:
        for worker in self.processes.workers:
            if worker.agent.name == died.agent:
                worker.agent_gone()

    def begin(self) -> None:
        """Let everything of this job but the agents begin."""
        for node in self.processes.folding():
            node.start()
        for worker in self.processes.workers:
            worker.start()
        self.director.start()
        self.mapping_readers.start()
        self.clock.after(BEAT_S, None, self._beat)

    def _beat(self) -> None:
        job, processes = self.job, self.processes
        for agent in processes.agents.values():
            if agent.runs and job.log.up:
                for registry in processes.registries:
                    if registry.runs and not job.network.loses(agent, registry):
                        registry.beat(agent.name, agent.core.incarnation)
                if processes.planner.runs and self._heartbeats.random() >= job.config.loss_odds:
                    processes.planner.heartbeat(agent)
        self.clock.after(BEAT_S, None, self._beat)

    def quiet_begins(self) -> None:
        """The last fault is over."""
        self.job.faults_ended_at, self.director.quiet_at = self.clock.now, len(self.job.log.entries)

    # What must hold.

    def check(self) -> None:
        """Raise `Violation` where the last steps have broken something."""
        if self._crowd is not None:
            self._crowd.check()
        if self.clock.steps % self.job.config.check_steps:
            return
        touched, processes = self._touched, self.processes
        for registry in processes.registries:
            if registry.name in touched and registry.up:
                registry.fold.check()
                registry.liveness.check()
        agents = [agent for agent in processes.agents.values() if agent.name in touched and agent.up]
        if any(agent.core.leases.coming for agent in agents):
            check_waiting(self.job.sessions.values())
            check_promises(agent.core for agent in agents)
        for agent in agents:
            self._check_agent(agent)
        for worker in processes.workers:
            if worker.agent.name in touched:
                self._views.check(worker)
        touched.clear()

    def _check_agent(self, agent: AgentNode) -> None:
        agent.core.check()
        agent.check_memory()
        if agent.follower.position == len(self.job.log.entries) and not self.reference.pending:
            check_standing(agent, self.job.view.catalog)
            check_going(agent, self.processes.workers)
        for core in agent.core.shards.values():
            self._check_shard(agent, core)

    def _check_shard(self, agent: AgentNode, core: ShardCore) -> None:
        key, contents = core.key, core.contents
        if isinstance(core.operation, ReadOperation) and core.operation.transfer is not None:
            core.operation.transfer.check()
        if contents.memory not in (MemoryState.READY, MemoryState.DRAINING) or contents.version is None:
            return
        segment = agent.stored[key].segment
        state = (agent.life, contents.version, segment.generation)
        if self._verified.get(key) == state:
            return
        place = root_key(core.spec.shards, key.shard, core.spec.layout)
        if not self.reference.is_true(key.model, contents.version, place, segment.data):
            raise Violation(
                "exact version", f"{key} is {contents.memory} at {contents.version} on {agent.name} with other bytes"
            )
        self._verified[key] = state


class World:
    """Everything that one seed makes: one job or two, served by the same processes."""

    def __init__(self, seed: int, config: WorldConfig, *, steps: bool = False, faults: Sequence[Fault] = ALL) -> None:
        """Build it; `run` lets it live. `steps`: keep the whole transcript."""
        self.config, self.clock, streams = config, Clock(), Streams(seed)
        self.transcript = deque[str](maxlen=None if steps else TRANSCRIPT_LINES)
        nats = Node("nats", streams.of("messages", "nats"))
        nats.up = True
        self.network, lease = Network(self.clock, nats, config.loss_odds), Lease()
        self.jobs: list[JobRun] = []
        for name, each in zip(JOBS, [config] if config.beside is None else [config, config.beside], strict=False):
            job = Job(name, self.clock, streams, each, self.transcript, self.network, lease)
            self.jobs.append(JobRun(job, self.jobs[0] if self.jobs else None))
        self.first = self.jobs[0]
        self.injector = Injector(self.first.processes, [each.job for each in self.jobs], faults)
        plan_upgrade(self.injector)
        plan_holder_stop(self.injector)

    def run(self) -> None:
        """Live until a fresh version has reached all rollouts after the last fault. Raises `Violation`."""
        for number, agent in enumerate(self.first.processes.agents.values()):
            self.clock.after(self.injector.starts_in(agent, number), None, agent.start)
        for job in self.jobs:
            job.begin()
        self.clock.after(LOOK_S, None, self._look)
        while not self._is_done() and self.clock.step():
            for job in self.jobs:
                job.check()
            if self.clock.steps > STEPS_MAX:
                raise Violation("bounded work", f"{STEPS_MAX} steps and no end")

    def _is_done(self) -> bool:
        return self.network.is_quiet and self.clock.steps % DONE_STEPS == 0 and self._missing() is None

    def _missing(self) -> str | None:
        missing = {run.job.name: run.director.missing() for run in self.jobs}
        return next((f"in job {name}: {why}" for name, why in missing.items() if why is not None), None)

    def _is_whole(self) -> bool:
        """Tell whether all that have not left run and reach what they need."""
        processes = [node for node in self.first.processes.all() if not node.state.left]
        nodes: Iterable[Node] = [*processes, *(worker for run in self.jobs for worker in run.processes.workers)]
        return self.network.is_up and all(node.runs and not node.state.cut_off for node in nodes)

    def _look(self) -> None:
        """Now and then look at the bounds, and end the faults when their time is over."""
        now = self.clock.now
        for run in self.jobs:
            run.processes.calls.check()
        ended_at = self.first.job.faults_ended_at
        if ended_at is None and now > 1.0 + self.config.trouble_s and self._is_whole():
            for agent in self.first.processes.agents.values():
                agent.dies_in, agent.drag = None, 1.0
            self.first.job.log_line("no more trouble")
            self.network.is_quiet = True
            for run in self.jobs:
                run.quiet_begins()
        elif ended_at is not None and now > ended_at + LIVE_WITHIN_S:
            raise Violation("liveness", f"{LIVE_WITHIN_S:g} s after the last trouble {self._missing()}")
        self.clock.after(LOOK_S, None, self._look)
