"""Finds the job of a lease, for the transports and for the requests of other agents that come over NATS.

Names of leases and tickets begin with the name of their job. An error in one job sets that job aside, and the answer is
then the one for a lease that is unknown.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from tensorhub_agent.control.lease_client import LEASE_ASK_S
from tensorhub_agent.jobs.driver import JobDriver
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.transports.base import LeaseOpened, TicketRejected
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.heartbeat import ServingLoad
from tensorhub_common.protocol.leases import DigestsPage, DigestsRequest, LeaseAnswer, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.subjects import agent_asks

LEASE_ASKS_MAX: Final = 2048
"""This many requests for leases are answered at a time. Most of them wait until a shard begins to be filled."""


class LeaseRouter:
    """The `LeaseAuthority` of an agent's transports, and the answers to lease and digest requests."""

    def __init__(self, agent: str, jobs: Mapping[str, JobDriver]) -> None:
        """Answer for the jobs that are in `jobs` at the time of a request."""
        self._agent, self._jobs = agent, jobs

    async def serve(self, bus: Bus) -> None:
        """Answer requests from now on."""
        await bus.serve(
            agent_asks(self._agent, "lease"),
            self._on_lease_request,
            concurrent_max=LEASE_ASKS_MAX,
            pending_max=LEASE_ASKS_MAX,
            age_s_max=LEASE_ASK_S,
        )
        await bus.serve(agent_asks(self._agent, "digests"), self._on_digests_request)

    async def _on_lease_request(self, message: Message) -> bytes:
        try:
            ask = msgspec.msgpack.decode(message.data, type=LeaseRequest)
        except MALFORMED as why:
            raise BadCommand(f"the question for a lease could not be read: {why}") from None
        # NATS lets each agent ask under its own id alone, so the subject says which agent gets the ticket.
        if ask.reader.agent != (asker := message.subject.rpartition(".")[2]):
            raise BadCommand(f"agent {asker!r} asked for a lease in the name of {ask.reader.agent!r}: ask in your own")
        job = self._jobs.get(ask.job)
        answer: LeaseAnswer = LeaseRefusal(reason=f"agent {self._agent!r} serves nothing of job {ask.job!r}")
        if job is not None:
            name = f"{ask.job}:{secrets.token_hex(8)}"
            answer = LeaseRefusal(reason=f"agent {self._agent!r} has set job {ask.job!r} aside: its log says why")
            with job.isolated("answering a reader's question for a lease"):
                answer = await job.lending.asked(ask, name, f"{ask.job}:{secrets.token_urlsafe(24)}", message.headers)
        return msgspec.msgpack.encode(answer)

    async def _on_digests_request(self, message: Message) -> bytes:
        try:
            ask = msgspec.msgpack.decode(message.data, type=DigestsRequest)
        except MALFORMED as why:
            raise BadCommand(f"the question for digests could not be read: {why}") from None
        page = DigestsPage(digests=b"")
        if (job := self._job_of(ask.lease)) is not None:
            with job.isolated("answering a reader's question for digests"):
                table, is_coming = job.core.leases, job.lending.look_for_patches(ask.lease)
                page = DigestsPage(
                    digests=table.page(ask.lease, ask.first),
                    patch_sizes=table.patch_sizes(ask.lease, ask.first),
                    patches_coming=is_coming,
                )
        return msgspec.msgpack.encode(page)

    def redeem(self, ticket: str, reader: str) -> LeaseOpened | TicketRejected:
        """See `LeaseAuthority.redeem`."""
        opened = None
        if (job := self._job_of(ticket)) is not None:
            with job.isolated("taking a reader's ticket"):
                opened = job.lending.redeem(ticket, reader)
        if opened is not None:
            return opened
        REJECTIONS.note(
            RejectionKind.TICKET, f"a ticket that {reader!r:.80} showed is unknown, used, too old or another reader's"
        )
        return TicketRejected("the ticket is unknown, used, too old or another reader's: ask for a lease anew")

    def renew(self, lease: str) -> bool:
        """See `LeaseAuthority.renew`."""
        waits = False
        if (job := self._job_of(lease)) is not None:
            with job.isolated("renewing a lease"):
                waits = job.core.renew_lease(lease, asyncio.get_running_loop().time())
        return waits

    def holds(self, lease: str) -> bool:
        """See `LeaseAuthority.holds`."""
        holds = False
        if (job := self._job_of(lease)) is not None:
            with job.isolated("confirming a lease"):
                holds = job.core.holds_lease(lease)
        return holds

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseAuthority has it)
        """See `LeaseAuthority.ended`."""
        if (job := self._job_of(lease)) is not None:
            with job.isolated("taking the end of a lease"):
                job.lending.ended(lease, LeaseTransition.DONE if done else LeaseTransition.READER_GONE)

    def readers(self) -> tuple[ServingLoad, ...]:
        """Return the agent's readers, as its heartbeat names them."""
        readers = []
        for job in list(self._jobs.values()):
            with job.isolated("counting its readers"):
                readers += job.core.readers()
        return reader_loads(readers)

    def _job_of(self, name: str) -> JobDriver | None:
        """Return the job of a lease or a ticket: names begin with it, and it has no colon in it."""
        return self._jobs.get(name.partition(":")[0])
