"""The processes of one job. A process of a job beside the first one lives and dies with the same of the first."""

from dataclasses import dataclass, field

from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.pending_calls import PendingCalls
from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
from tensorhub_simulator.faultsim.nodes.registry import RegistryNode
from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan, WorkerNode

FoldingNode = RegistryNode | PlannerNode


@dataclass(slots=True)
class JobProcesses:
    """All of them."""

    job: Job
    calls: PendingCalls
    planner: PlannerNode
    registries: list[RegistryNode]
    agents: dict[str, AgentNode]
    replicas: list[ReplicaPlan] = field(default_factory=list)
    workers: list[WorkerNode] = field(default_factory=list)

    def all(self) -> list[Node]:
        """Name all processes but the workers and NATS."""
        return [*self.registries, self.planner, *self.agents.values()]

    def folding(self) -> list[FoldingNode]:
        """Name the processes that fold the log."""
        return [*self.registries, self.planner]
