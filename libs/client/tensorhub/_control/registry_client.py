"""What the SDK and the commands ask the registry, over NATS: who holds which version, and what happened.

A control host asks without an agent, so nothing here knows of one. NATS is connected when the first question needs it,
and its client is imported then: it takes longer than all else that `connect` imports.

Always true: every question ends within its bound, with an answer or an error; a registry that is being replaced is
waited for within that bound.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from tensorhub.errors import closed_error
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.address import CONNECT_TIMEOUT_S
from tensorhub_common.bus.errors import Busy, NoAnswer, NoBus, NoResponder
from tensorhub_common.errors import JobGone, RegistryUnavailable, TensorHubError, from_code
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol import queries, subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Command, DeleteJob
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected
from tensorhub_common.protocol.subjects import check_name

if TYPE_CHECKING:
    from tensorhub._control.watch import Watched
    from tensorhub_common.bus.connection import Bus
    from tensorhub_common.jetstream.blob_store import BlobStore

ASK_S: Final = 5.0
ATTEMPT_S: Final = 2.0
"""A question is asked again after this: a registry that has ended, or leads no more, does not answer."""
RETRY_WAIT_S: Final = 0.1

Answer = TypeVar(
    "Answer",
    queries.Versions,
    queries.Replicas,
    queries.Status,
    queries.Story,
    queries.JobOpened,
    queries.JobForgotten,
    queries.Outcome,
)


def left_s(deadline: float) -> float:
    """Return what is left of a bound that several questions share."""
    return max(0.0, deadline - asyncio.get_running_loop().time())


class NatsAddress(msgspec.Struct, frozen=True):
    """Where NATS is (an address, or several with commas between), the file with the credentials, those for TLS."""

    url: str
    credentials: Path | None = None
    tls: TlsFiles | None = None


class RegistryClient:
    """The questions about one job. It belongs to the event loop in which it is used first."""

    def __init__(self, job: str, address: NatsAddress) -> None:
        self.job = subjects.check_job(job)
        self.address = address
        self._bus: Bus | None = None
        self._blobs: BlobStore | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def open_job(self, timeout_s: float = ASK_S) -> None:
        """Make the job if it is not there yet."""
        await self._ask(self._subject("open"), None, queries.JobOpened, timeout_s)

    async def raise_level(self, level: int, timeout_s: float = ASK_S) -> int:
        """Raise the job to this level, and return its level. Raises what the registry refuses it with."""
        answer = await self._ask(self._subject("open"), queries.OpenAsk(level=level), queries.JobOpened, timeout_s)
        if answer.level < level:
            raise RegistryUnavailable(
                f"the leading registry is of a release that can't raise job {self.job!r} to level {level}: upgrade it"
            )
        return answer.level

    async def versions(self, model: str, timeout_s: float = ASK_S) -> list[queries.VersionInfo]:
        """Return the versions of a model, oldest first."""
        ask = queries.ModelAsk(model=check_name("model", model))
        return list((await self._ask(self._subject("versions"), ask, queries.Versions, timeout_s)).versions)

    async def replicas(self, model: str, timeout_s: float = ASK_S) -> list[queries.ReplicaInfo]:
        """Return the replicas of a model with their shards, in the order of their registration."""
        ask = queries.ModelAsk(model=check_name("model", model))
        return list((await self._ask(self._subject("replicas"), ask, queries.Replicas, timeout_s)).replicas)

    async def status(self, timeout_s: float = ASK_S) -> queries.Status:
        """Return the job in short: its models and agents."""
        return await self._ask(self._subject("status"), None, queries.Status, timeout_s)

    async def story(self, model: str, version: int | None = None, timeout_s: float = ASK_S) -> list[str]:
        """Return what happened to a model, or to one version of it: a line per event."""
        ask = queries.StoryAsk(model=check_name("model", model), version=version)
        return list((await self._ask(self._subject("story"), ask, queries.Story, timeout_s)).lines)

    async def rule(self, command: Command, timeout_s: float = ASK_S) -> tuple[AnyEvent, ...]:
        """Have the log take a command that anyone may give, and return its outcome.

        Raises what the hub refuses it with, and `RegistryUnavailable` when no outcome is known within the bound: the
        command may count all the same.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.open_job(timeout_s)
        return await self._say(command, left_s(deadline))

    async def delete_job(self, timeout_s: float = ASK_S) -> None:
        """Delete the job, which must be there. Raises `VersionUnavailable` and `JobGone` where it is not."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.status(timeout_s)
        # Where another one says the same in this moment, it is done as well.
        with contextlib.suppress(JobGone):
            await self._say(DeleteJob(), left_s(deadline))

    async def forget_job(self, timeout_s: float = ASK_S) -> None:
        """Remove what is left of a deleted job, so that its name may be used anew."""
        await self._ask(self._subject("forget"), None, queries.JobForgotten, timeout_s)

    async def _say(self, command: Command, timeout_s: float) -> tuple[AnyEvent, ...]:
        from tensorhub_common.jetstream.job_log import JobLog  # noqa: PLC0415 (it imports NATS's client)

        bus = await self.bus(timeout_s)
        verb = str(command.__struct_config__.tag)
        subject, body = subjects.command_subject(self.job, verb), encode(command)
        try:
            async with asyncio.timeout(timeout_s):
                seq = await JobLog(bus, self.job).append(subject, body, uuid.uuid4().hex, timeout_s=timeout_s)
                events = await self._outcome(seq, timeout_s)
        except TimeoutError:
            raise RegistryUnavailable(
                f"no registry said within {round(timeout_s, 2):g} s what became of {verb!r}: see 'tensorhub status', "
                "and say it again if nothing has changed"
            ) from None
        first = events[0]
        if isinstance(first, CommandRejected):
            raise from_code(first.error, first.message)
        return events

    async def _outcome(self, seq: int, timeout_s: float) -> tuple[AnyEvent, ...]:
        """Ask what became of a command until it is decided; the caller bounds the time."""
        while True:
            ask = queries.OutcomeAsk(seq=seq)
            events = (await self._ask(self._subject("outcome"), ask, queries.Outcome, timeout_s)).events
            if events:
                return events
            await asyncio.sleep(RETRY_WAIT_S)

    async def layout(self, digest: str) -> Layout:
        """Return the layout with this digest."""
        from tensorhub_common.jetstream.blob_store import BlobStore  # noqa: PLC0415 (it imports NATS's client)

        bus = await self.bus()
        self._blobs = self._blobs or BlobStore(bus)
        return msgspec.msgpack.decode(await self._blobs.get(self.job, digest), type=Layout)

    def watch(
        self, model: str, after: int | None = None, kinds: Collection[str] | None = None
    ) -> "AsyncGenerator[Watched, None]":
        """Yield a model's events in order, for ever; see `AsyncHub.watch`."""
        from tensorhub._control.watch import watch  # noqa: PLC0415 (it imports NATS's client)

        return watch(self.bus, self.job, check_name("model", model), after, kinds)

    async def bus(self, timeout_s: float = CONNECT_TIMEOUT_S) -> "Bus":
        """Return the connection to NATS, made now if there is none yet. Raises `RegistryUnavailable`."""
        async with self._connecting:
            self.check_open()
            if self._bus is None:
                from tensorhub_common.bus.connection import connect  # noqa: PLC0415 (it imports NATS's client)

                where = self.address
                self._bus = await connect(
                    where.url, name="sdk", credentials=where.credentials, tls=where.tls, timeout_s=timeout_s
                )
            return self._bus

    async def close(self) -> None:
        """End the connection to NATS. Questions under way raise, and so do later ones."""
        self._is_closed = True
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()

    def check_open(self) -> None:
        """Raise where the connection was closed."""
        if self._is_closed:
            raise closed_error()

    async def __aenter__(self) -> Self:
        """Begin to ask, also anew after a block that has ended."""
        self._is_closed = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _subject(self, what: str) -> str:
        return subjects.query_subject(self.job, what)

    async def _ask(self, subject: str, ask: msgspec.Struct | None, kind: type[Answer], timeout_s: float) -> Answer:
        body = b"" if ask is None else msgspec.json.encode(ask)
        deadline = asyncio.get_running_loop().time() + timeout_s
        # A fault of NATS is raised as that: no registry can answer without it.
        bus = await self.bus(timeout_s)
        try:
            async with asyncio.timeout_at(deadline):
                data = await self._insist(bus, subject, body, timeout_s)
        except TimeoutError:
            raise RegistryUnavailable(
                f"no registry answered about job {self.job!r} within {round(timeout_s, 2):g} s: see 'tensorhub doctor'"
            ) from None
        try:
            answer: Answer | queries.QueryError = msgspec.json.decode(data, type=kind | queries.QueryError)
        except MALFORMED as error:
            raise TensorHubError(
                f"the registry's answer can't be read ({error}): it may be of another version than this one"
            ) from None
        if isinstance(answer, queries.QueryError):
            raise from_code(answer.error, answer.message)
        return answer

    async def _insist(self, bus: "Bus", subject: str, body: bytes, timeout_s: float) -> bytes:
        """Ask until there is an answer; the caller bounds the time. Asking changes nothing, so it may be repeated."""
        while True:
            try:
                return await bus.request(subject, body, min(timeout_s, ATTEMPT_S))
            except (NoResponder, NoAnswer, NoBus, Busy):
                self.check_open()
                await asyncio.sleep(RETRY_WAIT_S)
