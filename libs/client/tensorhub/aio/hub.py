"""The SDK for asyncio programs: `connect_async`, and the hub object that it returns.

`sync/hub.py` is its twin for everybody else, method for method.

Always true: names and numbers are checked before anything travels; no call waits without a bound, but for `watch`,
which waits for whatever comes; nothing here imports torch before the first `register`.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import zstandard

from tensorhub import arguments
from tensorhub._agent.session import AgentSession
from tensorhub._agent.shards import AttachedShard, ShardSpec
from tensorhub._control.discovery import find_agent
from tensorhub._control.registry_client import ASK_S, NatsAddress, RegistryClient, left_s
from tensorhub.aio.lifetime import NotCopyable, leave, leave_when_dropped, shielded_in_thread
from tensorhub.aio.shard import AsyncShard, UnresolvedResume
from tensorhub.arguments import Install, Resume
from tensorhub.mapping import Mapping
from tensorhub.specs import TensorSpec, whole_tensors
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.address import addresses
from tensorhub_common.config import settings as settings_module
from tensorhub_common.config.settings import Settings
from tensorhub_common.devices.device import Device
from tensorhub_common.devices.registry import device_named
from tensorhub_common.errors import (
    JobGone,
    LayoutMismatch,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub_common.layout.layout import encoded
from tensorhub_common.observability import logs
from tensorhub_common.protocol.log.commands import Command, Delete, Pin, Retain, Rewind, Unpin
from tensorhub_common.protocol.log.events import KINDS, AnyEvent, VersionRetired
from tensorhub_common.protocol.queries import ReplicaInfo, VersionInfo, VersionState
from tensorhub_common.protocol.subjects import check_job
from tensorhub_common.protocol.worker import Attached

if TYPE_CHECKING:
    from tensorhub._control.watch import Watched
    from tensorhub._rollouts.prompts import Sampling
    from tensorhub._tensors.description import Description, Tensors
    from tensorhub._tensors.fsdp import Gathered
    from tensorhub._tensors.host_copy import HostCopy
    from tensorhub._tensors.installs import Mapped, Staged
    from tensorhub._tensors.residency import Residency
    from tensorhub.aio.rollouts import AsyncRollouts
    from tensorhub_common.protocol.rollout.entries import PolicyName
    from tensorhub_common.protocol.rollout.messages import OnUpdate

CONNECT_S: Final = 10.0
CLOSE_AWAY_S: Final = 3.0
"""How long `close` waits for an agent that is away; the shards stay with it then."""
FREE_S: Final = 5.0
ZSTD_LEVEL: Final = 3

log = logs.logger(__name__)


class AsyncHub(NotCopyable):
    """A connection to one agent, for one job. `connect_async` makes it; use it in the event loop that made it."""

    def __init__(self, job: str, session: AgentSession, registry: RegistryClient) -> None:
        self.job = job
        self.registry = registry
        """Where `versions`, `replicas` and `watch` are asked, and some more that the commands ask."""
        self._session = session
        self._shards: dict[AsyncShard, None] = {}
        self._closed = asyncio.Event()
        self._job_is_open = False
        self._was_closed = leave_when_dropped(self, session, registry)

    def __repr__(self) -> str:
        return f"<hub of job {self.job} at agent {self.agent}>"

    @property
    def agent(self) -> str:
        """The id of the agent that holds the shards."""
        return self._session.agent.agent

    @property
    def socket(self) -> Path:
        """Where another process of this host reaches the same agent: `connect(agent=hub.socket)`."""
        return self._session.socket_path

    # -------------------------------------------------------------------------------------------------- shards

    async def register(
        self,
        model: str,
        module_or_tensors: "Tensors",
        *,
        replica: str,
        shard: int = 0,
        shards: int = 1,
        spot: bool = False,
        install: Install = "in-place",
        memory: str = "host",
        mapping: Mapping | None = None,
        resume: Resume | None = None,
        timeout_s: float = 30,
    ) -> AsyncShard:
        """Bring a shard into hub memory, or come back to it. Waits for no other shard.

        The tensors move into memory of this host's agent and stay the same objects, so an optimizer or an engine goes
        on with them. Those on a GPU stay where they are, unless `memory` says otherwise. Where the hub already holds
        the shard with a version, that memory wins: `.version` says so.

        Examples:
            >>> shard = await hub.register("policy", module, replica="trainer")

        Args:
            model: The model's name: letters, digits, "_" and "-", at most 64.
            module_or_tensors: A torch module (its parameters and buffers), or a dict of tensors or
                `TensorSpec`s by name. A spec gives shape and dtype of a tensor whose values come from the hub.
            replica: The name of this copy of the model.
            shard: The number of this shard, from 0.
            shards: How many shards the replica has, each registered by a process of its own.
            spot: The replica may vanish at any moment, and never counts for retention.
            install: "in-place" reads into the tensors' own memory. "staged" takes twice the memory: a read goes
                beside what the tensors show, which changes only at its end; tensors on a GPU whose hub memory is the
                host's are overwritten from other memory of the GPU then, and keep their addresses. "mapped" takes none:
                the tensors show the memory of a holder on this host, read-only; with memory="device", on their GPU.
            memory: Where hub memory is. "host": tensors on a GPU stay where they are, given ones of a dict too, and hub
                memory has a pinned copy. "device": they move into the agent's memory of their GPU (specs: of torch's
                current one). The UUID of a GPU names one.
            mapping: What the tensors consist of in the model's own names, from `tensorhub.mapping`, where the shards
                of trainer and engine are cut or named differently.
            resume: Which values count where the hub holds a version with others than the given ones: "memory", or
                "values", which replaces it and waits for its readers as `unpublish` does. None leaves it open:
                `replicate` and `update` work, and `publish`, `unpublish` and `overwriting` raise `ReplicaConflict`.
            timeout_s: The bound in seconds.

        Raises:
            ReplicaConflict: Another live process has the shard.
            LayoutMismatch: The tensors don't fit those of the sibling shards, of an earlier registration or the
                mapping.
            MemoryExhausted: The agent has no room. A staged read of tensors on a GPU may raise it later.
            AgentUnavailable: The agent does not answer within the bound.
        """
        self._session.check()
        arguments.name("model", model)
        arguments.name("replica", replica)
        number, count = arguments.shard_of(shard, shards)
        is_spot = arguments.flag("spot", spot)
        how, choice, where = arguments.install(install), arguments.resume(resume), arguments.memory(memory)
        deadline = self._session.deadline(arguments.seconds("timeout_s", timeout_s))
        names = arguments.mapping(mapping)
        described, layout = await shielded_in_thread(lambda: _described(module_or_tensors, names))
        place = await shielded_in_thread(lambda: _place(described, where, how))
        spec = ShardSpec(
            model=model,
            replica=replica,
            shard=number,
            shards=count,
            spot=is_spot,
            layout=layout,
            install=place.install,
            device=place.device,
        )
        attachment = await self._session.register(spec, deadline)
        return await self._made(described, attachment, choice, deadline, stages=place.stages)

    async def _made(
        self,
        described: "Description",
        attachment: AttachedShard,
        resume: Resume | None,
        deadline: float,
        *,
        stages: bool,
    ) -> AsyncShard:
        """Move the tensors into the registered memory."""
        try:
            choice = await self._resumed(described, attachment, resume, deadline)
            bound = await shielded_in_thread(lambda: _bound(described, attachment, stages=stages))
        except asyncio.CancelledError:
            attachment.claimed = False
            raise
        except BaseException:
            await self._undo(attachment)
            raise
        attachment.close_fd()
        if not attachment.spec.is_mapped and attachment.found is None and (attachment.fresh or _gives_all(described)):
            self._session.loaded(attachment)
        made = AsyncShard(
            self._session,
            self.registry,
            attachment,
            described.layout,
            bound.tensors,
            self._forget,
            bound.swaps,
            standing=bound.standing,
            copy=bound.copy,
            devices=bound.devices,
            choice=choice,
        )
        self._shards[made] = None
        return made

    async def _resumed(
        self, described: "Description", attachment: AttachedShard, resume: Resume | None, deadline: float
    ) -> UnresolvedResume | None:
        """Where ready memory and the given values differ, do what was chosen, or return that a choice is open."""
        version = attachment.found
        if version is None or resume == "memory" or not described.values:
            return None
        differing = await shielded_in_thread(lambda: _differing(described, attachment))
        if differing and resume == "values":
            await self._session.empty(attachment, deadline)
            return None
        return UnresolvedResume(version, differing) if differing else None

    async def _undo(self, attachment: AttachedShard) -> None:
        """The tensors could not be made. A shard that this call brought is freed; one that was there before stays."""
        if attachment.fresh:
            with suppress(TensorHubError):
                await self._session.release(attachment, FREE_S)
        attachment.claimed = False

    def _forget(self, shard: AsyncShard) -> None:
        self._shards.pop(shard, None)

    # ------------------------------------------------------------------------------------------------ questions

    async def versions(self, model: str, *, timeout_s: float = ASK_S) -> list[VersionInfo]:
        """Return the versions of a model, oldest first.

        Raises:
            RegistryUnavailable: No registry answers within `timeout_s`.
        """
        bound_s = arguments.seconds("timeout_s", timeout_s)
        arguments.name("model", model)
        return await self.registry.versions(model, await self._open_job(bound_s))

    async def replicas(self, model: str, *, timeout_s: float = ASK_S) -> list[ReplicaInfo]:
        """Return the replicas of a model with their shards, in the order of their registration.

        Raises:
            RegistryUnavailable: No registry answers within `timeout_s`.
        """
        bound_s = arguments.seconds("timeout_s", timeout_s)
        arguments.name("model", model)
        return await self.registry.replicas(model, await self._open_job(bound_s))

    async def specs(self, model: str, *, timeout_s: float = ASK_S) -> dict[str, TensorSpec]:
        """Return what the newest version that can be had consists of: the model's own tensors, each whole, by name.

        An engine that loads checkpoints registers these, and gives its loader `shard.tensors`.

        Raises:
            VersionUnavailable: No version is published, or no replica holds one now.
            RegistryUnavailable: No registry answers within `timeout_s`.
        """
        deadline = self._session.deadline(arguments.seconds("timeout_s", timeout_s))
        versions = await self.versions(model, timeout_s=left_s(deadline))
        replicas = {each.replica: each for each in await self.replicas(model, timeout_s=left_s(deadline))}
        for version in reversed(versions):
            # The publisher has what was published, and others perhaps another dtype of it.
            holders = sorted(version.holders, key=lambda name: name != version.publisher)
            if version.state == VersionState.AVAILABLE and (holder := next(filter(replicas.get, holders), None)):
                digests = dict.fromkeys(member.layout for member in replicas[holder].members)
                return whole_tensors([await self.registry.layout(digest) for digest in digests])
        raise VersionUnavailable(f"{model} has no version that a replica holds now: publish one first")

    async def _open_job(self, timeout_s: float) -> float:
        """The agent opens the job in its own time, so a first question could come before it. Return the time left."""
        self._session.check()
        deadline = self._session.deadline(timeout_s)
        if not self._job_is_open:
            await self.registry.open_job(timeout_s)
            self._job_is_open = True
        return left_s(deadline)

    def watch(
        self, model: str, after: int | None = None, *, kinds: Collection[str] | None = None
    ) -> "AsyncGenerator[Watched, None]":
        """Yield the version events of a model in order: those of the past, then new ones, until the hub is closed.

        Args:
            model: The model's name.
            after: Go on after the event with this `seq`.
            kinds: Kinds of events in place of those of versions; an empty collection means all.

        Raises:
            LogGap: The log no longer reaches back to `after`.
        """
        self._session.check()
        arguments.name("model", model)
        wanted = arguments.kinds(kinds, KINDS)
        return self._until_closed(self.registry.watch(model, arguments.seen(after), wanted))

    async def _until_closed(self, events: "AsyncGenerator[Watched, None]") -> "AsyncGenerator[Watched, None]":
        """Yield what comes; end with an error when the hub is closed meanwhile."""
        closing = asyncio.ensure_future(self._closed.wait())
        coming: asyncio.Future[Watched] | None = None
        try:
            await self._open_job(ASK_S)
            while True:
                coming = asyncio.ensure_future(_next(events))
                await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                self._session.check()
                yield await coming
        finally:
            for task in (coming, closing):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})
            await events.aclose()

    # ------------------------------------------------------------------------------------------------- rulings

    async def rollouts(
        self,
        model: str,
        *,
        name: str = "main",
        epoch: int = 0,
        group_size: int = 1,
        staleness: int = 0,
        max_age: int | None = None,
        on_update: "OnUpdate" = "continue",
        policy: "PolicyName" = "arrival",
        sampling: "Sampling | None" = None,
        timeout_s: float = 30,
    ) -> "AsyncRollouts":
        """Attach to a consumer's name of this job's rollouts: prompts in, finished responses out.

        An earlier trainer of the name is replaced: it gets nothing more. What is open goes on, and what it had no
        `done` for comes again, to this one.

        Examples:
            >>> rollouts = await hub.rollouts("policy", group_size=8, sampling=tensorhub.Sampling(max_tokens=64))

        Args:
            model: The model whose versions generate.
            name: The consumer's name. One trainer at a time has it.
            epoch: A number that rises when the trainer goes back to a checkpoint: what is open of a lower one is
                cancelled, what was not done is dropped, and its ids are free.
            group_size: How many responses a prompt gets.
            staleness: A response may begin on a version while at most so many newer ones are published.
            max_age: How many newer versions may be published behind the oldest token of a response: of more, it begins
                anew, once. Then it is delivered as old as it is; see `Response.age`.
            on_update: What becomes of a response when its engine's weights change: "finish" ends it on the old
                version, "continue" goes on with the new one from this token, its cache computed again, "keep" goes on
                with the old cache, and "restart" begins it anew.
            policy: How requests are placed. "arrival": where all is done soonest; "rlboost" is that paper's;
                "streamrl" gives the longest responses instances of their own, by what their prompts let expect.
            sampling: How tokens are drawn.
            timeout_s: The bound in seconds.

        Raises:
            RolloutUnavailable: No manager answered within the bound, or a trainer with a higher epoch was here.
            BadCommand: An argument is not possible.
            BadPrompt: The sampling is not possible.
        """
        from tensorhub._rollouts.prompts import Sampling  # noqa: PLC0415 (only trainers need it)
        from tensorhub.aio.rollouts import AsyncRollouts, attached  # noqa: PLC0415

        self._session.check()
        bound_s = arguments.seconds("timeout_s", timeout_s)
        left = await self._open_job(bound_s)
        rollouts = AsyncRollouts(
            self.registry,
            self._session.tracing,
            arguments.name("model", model),
            name=arguments.name("consumer", name),
            epoch=epoch,
            group_size=group_size,
            staleness=staleness,
            age_max=max_age,
            on_update=on_update,
            policy=policy,
            sampling=Sampling() if sampling is None else sampling,
            shards=lambda: tuple(self._shards),
        )
        return await attached(rollouts, left)

    async def retain(self, model: str, *, last: int, timeout_s: float = ASK_S) -> None:
        """Keep the last `last` versions of a model from now on; 0, the default, keeps none.

        A kept version doesn't lose its last copy by an orderly act: agents with room make a copy in the background,
        and `unpublish` or a read into that memory waits for it, or raises `RetentionFull`. Spot replicas don't count.
        """
        await self._rule(Retain(model=arguments.name("model", model), last=arguments.retained(last)), timeout_s)

    async def pin(self, model: str, version: int, *, timeout_s: float = ASK_S) -> None:
        """Keep one version until `unpin`, however many follow.

        Raises:
            VersionUnavailable: No replica holds the version.
        """
        number = arguments.known_version("version", version)
        await self._rule(Pin(model=arguments.name("model", model), version=number), timeout_s)

    async def unpin(self, model: str, version: int, *, timeout_s: float = ASK_S) -> None:
        """Keep a version no longer than `retain` says."""
        number = arguments.known_version("version", version)
        await self._rule(Unpin(model=arguments.name("model", model), version=number), timeout_s)

    async def rewind(self, model: str, *, to: int, timeout_s: float = ASK_S) -> list[int]:
        """Go back to a checkpoint: versions above `to` retire, and the next one has a higher number than they had.

        Returns the numbers of the retired versions. Reads of these are decided anew or fail, publications under way
        fail, and an engine that holds one gets an older version by `update`.

        Raises:
            VersionConflict: One of the versions above `to` is pinned.
        """
        command = Rewind(model=arguments.name("model", model), to=arguments.known_version("to", to))
        events = await self._rule(command, timeout_s)
        return [event.version for event in events if isinstance(event, VersionRetired)]

    async def delete(self, model: str, *, timeout_s: float = ASK_S) -> None:
        """Forget a model with its versions and their copies.

        Raises:
            ReplicaConflict: The model has replicas that are not released.
        """
        await self._rule(Delete(model=arguments.name("model", model)), timeout_s)

    async def delete_job(self, *, timeout_s: float = ASK_S) -> None:
        """Delete the whole job: agents free its memory and copies, and every later call on it is `JobGone`.

        Tensors stay valid in the processes that have them, and are no longer a source. The job's name is refused for
        a week, or until `tensorhub delete --job NAME --forget`.
        """
        self._session.check()
        await self.registry.delete_job(arguments.seconds("timeout_s", timeout_s))

    async def _rule(self, command: Command, timeout_s: float) -> tuple[AnyEvent, ...]:
        self._session.check()
        return await self.registry.rule(command, arguments.seconds("timeout_s", timeout_s))

    # ------------------------------------------------------------------------------------------------------ end

    async def close(self, *, release: bool = True, timeout_s: float = 60) -> None:
        """Release all shards and end the connection. A second call does nothing.

        The connection ends in any case; then the first error of a release is raised. An agent that is away keeps the
        shards.

        Args:
            release: False leaves the shards with the agent, published as they are, for the next process that
                registers them.
            timeout_s: The bound in seconds.
        """
        releases_all = arguments.flag("release", release)
        if self._closed.is_set():
            return
        self._session.check()
        bound_s = arguments.seconds("timeout_s", timeout_s)
        if not self._session.is_connected:
            bound_s = min(bound_s, CLOSE_AWAY_S)
        try:
            releases = [shard.release(timeout_s=bound_s) for shard in list(self._shards) if releases_all]
            outcomes = await asyncio.gather(*releases, return_exceptions=True)
        finally:
            self._closed.set()
            self._was_closed()
            await self._session.close()
            await self.registry.close()
        for outcome in outcomes:
            # With the job its shards have gone too.
            if isinstance(outcome, BaseException) and not isinstance(outcome, JobGone):
                raise outcome

    async def _leave(self) -> None:
        """End the connection as a process that ends does: the shards stay with the agent, published as they are."""
        self._closed.set()
        self._was_closed()
        await leave(self._session, self.registry)

    async def __aenter__(self) -> Self:
        self._session.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session.is_forked:
            # A child that leaves its parent's block has nothing of its own to release.
            return
        try:
            await self.close()
        except TensorHubError as failure:
            if error is None:
                raise
            # What went wrong in the block is what the caller must see.
            log.warning("the hub could not release all its shards", why=str(failure))


async def connect_async(
    job: str | None = None,
    *,
    agent: str | PathLike[str] | None = None,
    nats: str | None = None,
    timeout_s: float = CONNECT_S,
) -> AsyncHub:
    """Connect to an agent of this host.

    Examples:
        >>> hub = await tensorhub.connect_async()

    Args:
        job: An isolated namespace; by default `TENSORHUB_JOB`, else "default".
        agent: An agent's id or socket; by default `TENSORHUB_AGENT`, else the first on this host.
        nats: The address of NATS, or of several nodes of a cluster with commas between; by default the agent's.
        timeout_s: The bound in seconds.

    Raises:
        AgentUnavailable: No agent answers within the bound.
        RegistryUnavailable: `nats` is given and not reached.
    """
    settings = settings_module.load(os.environ)
    for sentence in settings_module.unknown_variables(os.environ):
        log.warning(sentence)
    name = check_job(arguments.name("job", settings.job if job is None else job))
    arguments.text("nats", nats)
    if not isinstance(agent, PathLike):
        arguments.text("agent", agent)
    bound_s = arguments.seconds("timeout_s", timeout_s)
    deadline = asyncio.get_running_loop().time() + bound_s
    session = AgentSession(find_agent(agent, settings, os.environ), name)
    registry: RegistryClient | None = None
    try:
        attached = await session.open(bound_s)
        registry = RegistryClient(name, _nats_address(nats, settings, attached))
        if nats:
            # An address that was given and is wrong would be noticed by the first question, hours later.
            await registry.bus(max(0.0, deadline - asyncio.get_running_loop().time()))
    except BaseException:
        await session.close()
        if registry is not None:
            await registry.close()
        raise
    return AsyncHub(name, session, registry)


def _nats_address(nats: str | None, settings: Settings, said: Attached) -> NatsAddress:
    """Return where questions go. What the agent says is for its own NATS: another one is shown none of its keys."""
    url = nats or settings.nats or said.nats
    if not set(addresses(url)) <= set(addresses(said.nats)):
        return NatsAddress(url, settings.credentials, settings.tls)
    credentials = settings.credentials or (Path(said.credentials) if said.credentials else None)
    return NatsAddress(url, credentials, settings.tls or (TlsFiles(Path(said.ca)) if said.ca else None))


# ------------------------------------------------------------------------------------------------ tensors and memory


def _described(module_or_tensors: "Tensors", mapping: Mapping | None) -> "tuple[Description, bytes]":
    try:
        from tensorhub._tensors.description import describe  # noqa: PLC0415 (a control host asks questions and has no torch)
    except ModuleNotFoundError as error:
        raise TensorHubError(
            f"register needs {error.name}, which is not installed here: pip install 'tensorhub[torch]'"
        ) from None
    described = describe(module_or_tensors, mapping)
    return described, zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(encoded(described.layout))


class _Place(NamedTuple):
    """Where a shard's hub memory is, and how versions come into the tensors."""

    device: str
    """The UUID of the GPU in whose memory it is; empty: the host's."""
    install: Install
    """What the agent is told."""
    stages: bool = False
    """Versions come into memory of the tensors' own GPU, beside them, before they overwrite them."""


def _place(described: "Description", memory: str, install: Install) -> _Place:
    """Return what the caller has asked for, for these tensors."""
    if memory == "host":
        from tensorhub._tensors.streams import any_on_gpu, finish  # noqa: PLC0415 (they import torch)

        if not any_on_gpu(described.values):
            return _Place("", install)
        _check_host_copy(described, install)
        finish(described.values)
        # To the agent the pinned copy is all there is.
        return _Place("", "in-place", stages=install == "staged")
    from tensorhub._tensors.device_memory import uuid_of_gpu  # noqa: PLC0415 (they import torch)
    from tensorhub._tensors.streams import finish  # noqa: PLC0415

    finish(described.values)
    uuid = uuid_of_gpu(described.values, described.members) if memory == "device" else memory
    return _Place(uuid, install)


def _check_host_copy(described: "Description", install: Install) -> None:
    """Refuse what tensors on a GPU can't have with hub memory of the host."""
    from tensorhub._tensors.streams import is_on_gpu  # noqa: PLC0415 (it imports torch)

    if install == "mapped":
        raise LayoutMismatch(
            "install='mapped' is not possible for tensors on a GPU with hub memory of the host: they show their own "
            "memory; take memory='device' to map a holder's memory of their GPU, or install 'in-place' or 'staged'"
        )
    elsewhere = [name for name, value in described.values.items() if not is_on_gpu(value) and 0 not in value.shape]
    if install == "staged" and elsewhere:
        raise LayoutMismatch(
            "install='staged' is not possible for tensors of which some are on a GPU and some, as "
            f"{arguments.listed(elsewhere)}, are not: those would change before the others; register them apart, or "
            "take 'in-place'"
        )


class _Bound(NamedTuple):
    """The tensors of a shard in hub memory, how they swap to other memory, and what they are to lie in."""

    tensors: dict[str, Any]
    swaps: "Staged | Mapped | Gathered | None" = None
    standing: "Residency | None" = None
    copy: "HostCopy | None" = None
    """Of tensors on GPUs whose hub memory is the host's."""
    devices: "Collection[Device]" = ()
    """The GPU whose memory hub memory is."""


def _bound(described: "Description", attachment: AttachedShard, *, stages: bool) -> _Bound:
    """Move what was described into the registered memory."""
    if not attachment.spec.device:
        return _bound_in_place(described, attachment, stages=stages)
    device = device_named(attachment.spec.device)
    bound = _bound_in_place(described, attachment)
    # The given values were copied on a stream of this thread, which no other code knows.
    device.finish()
    # What a mapped shard shows its agent never writes, so no read waits for what is queued.
    return bound if attachment.spec.is_mapped else bound._replace(devices=(device,))


def _bound_in_place(described: "Description", attachment: AttachedShard, *, stages: bool = False) -> _Bound:
    """Map the segment, or a staged shard's two, and move what was described into it; a mapped shard has none yet."""
    from tensorhub._tensors.description import bind  # noqa: PLC0415
    from tensorhub._tensors.residency import Residency  # noqa: PLC0415
    from tensorhub._tensors.segment_mapping import map_segment  # noqa: PLC0415 (they import torch)
    from tensorhub._tensors.streams import any_on_gpu  # noqa: PLC0415

    has_values = attachment.found is not None
    if not attachment.spec.device and any_on_gpu(described.values):
        from tensorhub._tensors.host_copy import HostCopy  # noqa: PLC0415

        memory = map_segment(-1 if attachment.fd is None else attachment.fd, described.layout)
        copy = HostCopy(described, memory, attachment, stages=stages)
        place = {name: tensor.detach() for name, tensor in copy.tensors.items()}
        standing = Residency(described, copy.tensors, lambda: place, given=copy.given, has_values=has_values)
        return _Bound(copy.tensors, _gathered(described, attachment), standing, copy)
    if attachment.spec.install == "staged":
        from tensorhub._tensors.installs import Staged  # noqa: PLC0415

        staged = Staged(described, attachment)
        return _Bound(staged.tensors, staged, Residency(described, staged.tensors, staged.home, has_values=has_values))
    if attachment.spec.is_mapped:
        from tensorhub._tensors.installs import Mapped  # noqa: PLC0415

        mapped = Mapped(described, attachment)
        return _Bound(mapped.tensors, mapped)
    memory = map_segment(-1 if attachment.fd is None else attachment.fd, described.layout, attachment.spec.device)
    tensors = bind(described, memory, memory_wins=has_values)
    home = {name: tensor.detach() for name, tensor in tensors.items()}
    standing = Residency(described, tensors, lambda: home, has_values=has_values)
    return _Bound(tensors, _gathered(described, attachment), standing)


def _gathered(described: "Description", attachment: AttachedShard) -> "Gathered | None":
    """Return what drops the copies that FSDP has gathered of a module's parameters, where it manages them."""
    if not described.managed.parts:
        return None
    from tensorhub._tensors.fsdp import Gathered  # noqa: PLC0415 (it imports torch)

    return Gathered(described.managed.parts, lambda: attachment.version)


def _differing(described: "Description", attachment: AttachedShard) -> list[str]:
    """Return the tensors whose given values are not what the shard's memory holds."""
    from tensorhub._tensors.segment_mapping import map_segment, tensors_at  # noqa: PLC0415 (they import torch)

    memory = map_segment(-1 if attachment.fd is None else attachment.fd, described.layout, attachment.spec.device)
    return described.differing(tensors_at(described.layout, memory))


def _gives_all(described: "Description") -> bool:
    """Tell whether values were given for every byte of the shard."""
    return all(entry.name in described.values for entry in described.layout.tensors if entry.nbytes)


async def _next(events: "AsyncGenerator[Watched, None]") -> "Watched":
    return await anext(events)
