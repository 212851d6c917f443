"""Workers: trainers that really overwrite their memory the moment they may, and rollouts that read.

The ranks of a replica follow one group, which says what to do next; each rank does it in its own time, fails by itself
and is killed by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tensorhub_agent.core.effects import (
    AnyCall,
    CallPublish,
    CallRead,
    CallRegister,
    CallRelease,
    CallUnpublish,
    CompleteCall,
    FailCall,
)
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Publish, VersionRequest
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_simulator.engine.clock import QUICK_S, Node
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.segments import Segment
from tensorhub_simulator.faultsim.nodes.pending_calls import PendingCalls

AGAIN_S: Final = 0.15
REGISTER_S: Final = 4.0
OUTCOME_S: Final = 0.5
"""So long a call that takes memory back waits for the log's word at its end: registries are away for some seconds."""

PAUSE_S: Final = 3.0
"""A worker that was told that the registry is silent leaves it at that for so long, every other time."""

End = CompleteCall | FailCall | None


@dataclass(slots=True)
class ReplicaPlan:
    """What the ranks of one replica are to do: step `serial`."""

    model: str
    replica: str
    trains: bool
    user: Random
    rewinds: Random
    """When its user goes back to an older version."""
    serial: int = 0
    want: VersionRequest = "latest"
    version: int | None = None
    timeout_s: float = 3.0
    wait_s: float = 3.0
    act: str = "read"
    wishes: dict[int, int | None] = field(default_factory=dict)
    """By step, where a wish to publish stands in the log: 0 when it got lost, None while it is on its way."""
    ranks: list["WorkerNode"] = field(default_factory=list)


class WorkerNode(Node):
    """One worker: one shard of a replica."""

    def __init__(self, job: Job, calls: PendingCalls, group: ReplicaPlan, key: ShardKey, agent: AgentHost) -> None:
        """Stand ready to start."""
        name = f"{key.model}/{key.replica}/{key.shard}"
        super().__init__(name, job.stream("messages", name))
        self.job, self.calls, self.group, self.key, self.agent = job, calls, group, key, agent
        self.clock = job.clock
        self.session = 0
        self.registered = self.published = False
        self.done = 0
        self.version: int | None = None
        self.busy = False
        self.trusts: int | None = None
        """The version that its tensors are, as far as it was told, while no call is under way."""
        self.shows: Segment | None = None
        """Of a staged shard: where its tensors stand, until a call of this worker's says that it has swapped."""
        self._user = job.stream("user", name)
        self._overwritten = 0
        """How often it has overwritten its memory."""
        self._is_whole = True
        """No read in place has begun since its memory was last known to be whole."""
        self._keeps = False
        """It has kept its memory since an agent that is gone."""
        self._holds: int | None = None
        """The version that it keeps."""
        self.goes = False
        """Its shard goes as soon as the registry answers, as this worker was told; it has called nothing since."""
        self.awaits: int | None = None
        """The step whose wish to publish this memory is still to be heard."""
        group.ranks.append(self)

    # Life.

    def start(self) -> None:
        """Begin a life."""
        self.life += 1
        self.up, self.state.paused = True, False
        self.backlog.clear()
        self._forget_memory()
        self._connect()

    def kill(self) -> None:
        """SIGKILL: the agent notices when the socket ends."""
        if not self.up:
            return
        self.job.log_line(f"{self.name} is killed")
        self.up = False
        self.life += 1
        self._forget_memory()
        self._disconnect()

    def _forget_memory(self) -> None:
        """Let go of what it has kept: with its process, or since it goes to another agent."""
        self.agent.kept.pop(self.key, None)
        self._is_whole, self._keeps, self._holds = True, False, None

    def _disconnect(self) -> None:
        session, agent = self.session, self.agent
        self.clock.after(self.lag(), agent, lambda: agent.worker_gone(session))

    def _connect(self) -> None:
        self.session = self.job.number()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.registered = self.published = self.busy = self.goes = False
        self.version = self.trusts = None
        self.clock.after(self.lag(), self, self._register)

    def agent_gone(self) -> None:
        """The agent's process ended."""
        if self.up:
            self.life += 1
            self._holds = self.version if self._is_whole else None
            self._connect()

    def _register(self) -> None:
        if self.agent.state.left:
            # Its host is gone for good, as far as anybody knows: the worker is begun anew on another one.
            self._forget_memory()
            self.agent = self._user.choice([agent for agent in self.job.hosts.values() if not agent.state.left])
        if not self.agent.up:
            self.clock.after(AGAIN_S, self, self._register)
            return
        session, holds, partial = self.session, self._holds, not self._is_whole
        self._keeps = self.key in self.agent.kept
        self._call(
            lambda n, t: CallRegister(call=n, session=session, deadline=t + REGISTER_S, holds=holds, partial=partial),
            self._on_registered,
        )

    def _on_registered(self, end: End) -> None:
        if not isinstance(end, CompleteCall):
            if end is not None:
                self._go_where_it_stands(end)
                self.clock.after(AGAIN_S, self, self._register)
            return
        core = self.agent.core.shards.get(self.key)
        if core is None:
            if self.agent.core.deleted is None:
                raise Violation("liveness", f"{self.key} was registered, and its agent does not know it")
            # The job was deleted while the answer was on its way.
            self.clock.after(AGAIN_S, self, self._register)
            return
        self.registered = True
        contents, self._holds = core.contents, None
        if self._keeps and contents.memory is not MemoryState.READY:
            # Its tensors are what they were. What is being published again, or mapped, it takes back before it writes.
            self._keeps = False
            self.published = contents.memory is not MemoryState.EMPTY or core.operation is not None
        elif core.operation is not None:
            # A wish to publish came before this worker could write: it must know, since no agent can see it write.
            pass
        elif contents.memory is MemoryState.READY:
            self.published, self.version, self.trusts = True, contents.version, contents.version
            if self._has_values():
                self._resume_with_values()
                return
        else:
            # What an earlier worker left draining has drained before the answer: values may be copied in.
            self._overwrite()
            self.agent.loaded(self.key)
        if self.awaits is not None:
            # Said by the process before this one, and still on its way perhaps.
            self.busy = True
            self._await_wish(self.awaits)
            return
        self._loop()

    def _has_values(self) -> bool:
        """Whether a trainer comes back with a checkpoint, which is to replace what stands here: every other life."""
        return self.group.trains and self.life % 2 == 0 and self.awaits is None

    def _resume_with_values(self) -> None:
        """Do what `register(…, resume="values")` does: unpublish, and only then copy the values in."""
        self._unpublish(self._loop)

    def _go_where_it_stands(self, end: FailCall) -> None:
        """The agent that the worker moved away from is back, and has the shard still: go back, as the error says."""
        owners = [agent for agent in self.job.hosts.values() if f"stands on agent {agent.name!r}" in end.message]
        if owners and owners[0].up:
            self._forget_memory()
            self._disconnect()
            self.agent, self.session = owners[0], self.job.number()

    # Calls.

    def _call(self, make: Callable[[int, float], AnyCall], then: Callable[[End], None]) -> None:
        life, clock, agent = self.life, self.clock, self.agent
        self.busy, self.trusts, self.goes = True, None, False

        def reply(end: End) -> None:
            if life != self.life or not self.up:
                return
            if agent.happens(0.7) and not self.state.paused:
                told(end)
            else:
                clock.after(agent.lag(), self, lambda: told(end))

        def told(end: End) -> None:
            self.busy = False
            self._swap()
            then(end)

        if self.agent.up:
            self.calls.send(self.agent, self.key, make, reply)

    def _overwrite(self) -> None:
        """Change most bytes, in as many writes as there are pieces."""
        if self.agent.up and self.agent.core.deleted is not None:
            # What it has mapped is its own alone.
            return
        stored = self.agent.stored[self.key]
        segment = stored.segment
        if self.agent.up:
            core = self.agent.core.shards.get(self.key)
            if core is not None and (core.contents.memory is not MemoryState.EMPTY or core.operation is not None):
                raise Violation(
                    "mutability", f"{self.name} may write, and its memory is {core.contents.memory} ({core.operation})"
                )
        if segment.writers:
            raise Violation("one writer", f"{self.name} may write, and so may {segment.writers}")
        rng = self.job.stream("values", self.name, self._overwritten)
        self._overwritten += 1
        for piece, size in enumerate(segment.nbytes):
            fresh, old = rng.randbytes(size), segment.piece(piece)
            # A part of them stays as it was, so that a delta is less than the whole.
            values = bytes(new if new % 3 else was for new, was in zip(fresh, old, strict=True))
            segment.write(segment.at[piece], values)
        self._is_whole = True

    def _swap(self) -> None:
        """Let the tensors stand where the agent said last that the shard stands: it says so with each answer."""
        stored = self.agent.stored.get(self.key)
        self.shows = stored.segment if stored is not None else None

    def _loop(self) -> None:
        if not self.registered or self.busy:
            return
        if self.done == self.group.serial:
            self.clock.after(AGAIN_S * (0.5 + self._user.random()), self, self._loop)
        elif self.group.trains:
            self._train()
        else:
            self._roll_out()

    def _again(self) -> None:
        self.clock.after(AGAIN_S, self, self._loop)

    def _failed(self, end: FailCall | None) -> None:
        """After an error: register again if the shard is gone from the agent."""
        if end is None:
            return
        if self.agent.up and self.key not in self.agent.core.shards:
            self._begin_anew()
        elif "call unpublish again" in end.message:
            self._unpublish(self._loop)
        elif end.error == "RegistryUnavailable" and self._user.random() < 0.5:  # noqa: PLR2004 (odds)
            self.clock.after(PAUSE_S, self, self._loop)
        else:
            self._again()

    # Training.

    def _train(self) -> None:
        if self.published:
            self._unpublish(self._loop)
            return
        self._overwrite()
        if self.group.act == "wish":
            self.done = self.awaits = self.group.serial
            request_publish(self.job, self.group)
            self.busy = True
            self._await_wish(self.done)
            return
        group, serial = self.group, self.group.serial
        session, version, timeout_s = self.session, group.version, group.timeout_s

        def then(end: End) -> None:
            if isinstance(end, CompleteCall):
                self.published, self.done, self.version, self.trusts = True, serial, end.version, end.version
                self._loop()
                return
            if end is not None and "still has version" in end.message:
                self.published = True
            elif end is not None and end.error in ("RoundTimeout", "RegistryUnavailable", "VersionConflict"):
                # The memory is this worker's own again, and it is used at once.
                self._overwrite()
                self.done = serial
            self._failed(end)

        self._call(lambda n, t: CallPublish(call=n, session=session, deadline=t + timeout_s, version=version), then)

    def _await_wish(self, serial: int) -> None:
        """Write nothing until the wish has been heard everywhere and this shard's agent is done with it."""
        group, agent = self.group, self.agent
        wish = group.wishes.get(serial)
        core = agent.core.shards.get(self.key) if agent.up else None
        told = self.job.view.told.get(wish or 0)
        heard = told is not None and agent.up and agent.core.joined and agent.log_position >= told
        if serial in group.wishes:
            waits = wish is None or (wish > 0 and not (heard and (core is None or core.operation is None)))
        else:
            waits = group.serial == serial and not self.job.is_quiet
        if waits:
            self.clock.after(AGAIN_S, self, lambda: self._await_wish(serial))
            return
        self.busy, self.awaits = False, None
        self.published = core is not None and core.contents.memory in (MemoryState.READY, MemoryState.DRAINING)
        self._failed(FailCall(0, "", ""))

    def _unpublish(self, then: Callable[[], None]) -> None:
        session, timeout_s = self.session, self._user.choice((0.0, 0.05, 0.5, 5.0))

        def ended(end: End) -> None:
            if isinstance(end, CompleteCall) or (end is not None and end.error == "NotPublished"):
                self.published, self.version = False, None
                self._overwrite()
                then()
            else:
                self._failed(end)

        self._call(
            lambda n, t: CallUnpublish(call=n, session=session, deadline=t + timeout_s, outcome_s=OUTCOME_S), ended
        )

    # Rolling out.

    def _roll_out(self) -> None:
        group = self.group
        if group.act == "release":
            self._release()
        elif group.act == "republish" and self.version is not None:
            self._republish()
        else:
            self._read()

    def _read(self) -> None:
        group, serial, session = self.group, self.group.serial, self.session
        want, timeout_s, wait_s = group.want, group.timeout_s, group.wait_s
        trusted, was_whole = self.trusts, self._is_whole
        self._is_whole = was_whole and self.job.specs[self.key].swaps

        def then(end: End) -> None:
            if isinstance(end, CompleteCall):
                self._is_whole = was_whole or end.version is not None
            if isinstance(end, CompleteCall) or (isinstance(end, FailCall) and end.error != "ReplicaConflict"):
                self.done = serial
            if isinstance(end, CompleteCall):
                self.version = end.version if end.version is not None else self.version
                self.trusts = end.version if end.version is not None else trusted
                self._loop()
            else:
                self._failed(end)

        self._call(
            lambda n, t: CallRead(call=n, session=session, deadline=t + timeout_s, want=want, patience=t + wait_s), then
        )

    def _release(self) -> None:
        session, serial = self.session, self.group.serial

        def then(end: End) -> None:
            self.done = serial
            if isinstance(end, CompleteCall):
                if self._user.random() < 0.4:  # noqa: PLR2004 (odds)
                    self._forget_memory()
                    self._disconnect()
                    self.agent = self._user.choice(list(self.job.hosts.values()))
                    self._connect()
                else:
                    self._begin_anew()
            else:
                self.goes = end is not None and "it goes as soon as the registry answers" in end.message
                self._failed(end)

        self._call(lambda n, t: CallRelease(call=n, session=session, deadline=t + 1.0, outcome_s=OUTCOME_S), then)

    def _republish(self) -> None:
        """Give back what was read, and publish the same bytes again: another holder of an equal root."""
        session, serial, version = self.session, self.group.serial, self.version

        def unpublished(end: End) -> None:
            if isinstance(end, CompleteCall):
                self.version = None
                self._call(
                    lambda n, t: CallPublish(call=n, session=session, deadline=t + 1.0, version=version), published
                )
            else:
                self.done = serial
                self._failed(end)

        def published(end: End) -> None:
            self.done = serial
            if isinstance(end, CompleteCall):
                self.version = self.trusts = end.version
                self._loop()
            else:
                self._failed(end)

        self._call(
            lambda n, t: CallUnpublish(call=n, session=session, deadline=t + 1.0, outcome_s=OUTCOME_S), unpublished
        )


def request_publish(job: Job, group: ReplicaPlan) -> None:
    """Ask the log that a group's memory be published, once all its workers have written."""
    ready = all(rank.registered and rank.done == group.serial for rank in group.ranks)
    if job.is_quiet or not ready:
        return
    command = Publish(model=group.model, replica=group.replica, version=group.version)
    number, serial = job.number(), group.serial
    group.wishes[serial] = None

    def arrive() -> None:
        log, subject = job.log, command_subject(job.name, "publish")
        group.wishes[serial] = log.append(subject, encode(command), f"wish-{number}") if log.up else 0

    job.clock.after(group.user.random() * QUICK_S, job.nats, arrive)
