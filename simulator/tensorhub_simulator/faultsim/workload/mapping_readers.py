"""Borrowers: workers that map what stands published (install="mapped"), and keep it after all leases are over.

The kernel's lock on a mapped segment is `Segment.maps` here: it outlives agents, and a write under it is a violation at
once. Some let go of what its agent waits for, as runners do; others are not to be moved. Borrowers take no part in the
log; what a mapped shard says there is tried elsewhere.
"""

from typing import Final

from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.segments import Segment
from tensorhub_simulator.faultsim.observations import MemoryMapped

WORLDS: Final = 0.4
"""This many worlds have borrowers."""

EACH_S: Final = 0.3
KEPT_S: Final = (0.01, 0.2, 1.0, 3.0)
"""How long a mapping is kept, about."""

LOOKS: Final = 0.5
"""This many look whether what they have mapped is waited for."""
LOOK_S: Final = 0.1
"""So often."""

TICKET_S: Final = 0.2


class MappingReaders:
    """Maps what is published, now and then."""

    def __init__(self, job: Job) -> None:
        """Be there in some worlds."""
        self._job = job
        self._rng = job.stream("mapping-readers")
        self.are_there = self._rng.random() < WORLDS

    def start(self) -> None:
        """Begin to borrow."""
        if self.are_there:
            self._job.clock.after(EACH_S, None, self._turn)

    def _turn(self) -> None:
        job, rng = self._job, self._rng
        if job.is_quiet:
            return
        agents = [agent for agent in job.hosts.values() if agent.runs]
        if agents:
            agent = rng.choice(agents)
            cores = [core for core in agent.core.shards.values() if core.contents.memory is MemoryState.READY]
            if cores:
                self._ask(agent, rng.choice(cores))
        job.clock.after(rng.random() * 2 * EACH_S, None, self._turn)

    def _ask(self, agent: AgentHost, core: ShardCore) -> None:
        key, contents, number = core.key, core.contents, self._job.number()
        assert contents.version is not None
        ask = LeaseRequest(
            job=self._job.name,
            model=key.model,
            source=SourceId(agent.name, agent.core.incarnation, key.replica, key.shard),
            version=contents.version,
            root=contents.root,
            reader=SourceId("borrower", 1, "borrower", 0),
            mapped=True,
        )
        answer = agent.core.lease_asked(ask, f"lent-{number}", f"lent-ticket-{number}", "here", agent.now)
        agent.set_timer()
        if isinstance(answer, LeaseGrant):
            self._job.clock.after(self._rng.random() * TICKET_S, agent, lambda: self._connect(agent, answer))

    def _connect(self, agent: AgentHost, grant: LeaseGrant) -> None:
        """The ticket is taken and the lock with it, in one step of the source's; then the lease has no more use."""
        clock = self._job.clock
        lease = agent.core.redeemed(grant.ticket, agent.now)
        agent.set_timer()
        if lease is None:
            return
        segment = agent.stored[lease.key].segment
        segment.is_asked_back = False
        segment.maps.add(grant.lease)
        self._job.observe(MemoryMapped())
        self._job.log_line(f"{lease.key} is mapped on {agent.name}")
        clock.after(self._rng.random() * TICKET_S, agent, lambda: agent.lease_ended(grant.lease, LeaseTransition.DONE))
        kept_s = self._rng.choice(KEPT_S) * (0.5 + self._rng.random())
        clock.after(kept_s, None, lambda: self._let_go(segment, grant.lease))
        if self._rng.random() < LOOKS:
            self._look(segment, grant.lease)

    def _look(self, segment: Segment, lease: str) -> None:
        if lease not in segment.maps:
            return
        if segment.is_asked_back:
            self._job.log_line(f"{lease} is let go of, since it is waited for")
            self._let_go(segment, lease)
        else:
            self._job.clock.after(LOOK_S, None, lambda: self._look(segment, lease))

    def _let_go(self, segment: Segment, lease: str) -> None:
        segment.maps.discard(lease)
