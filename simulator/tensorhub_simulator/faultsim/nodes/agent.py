"""An agent of the simulation: drives an `AgentCore` as the agent service's `jobs/driver.py` does.

Its memory, lanes and links are modelled. The stored survives the agent's death: segments with their bytes as they were,
and the last manifest that was saved.

`AgentTasks` is the work that takes an agent time: hashing, looking, copying, comparing layouts, asking the planner.
`Incarnations` is the agent's number, as `storage/incarnation.py` of the agent service keeps it: higher each time,
unless its disk was lost.

Invariants:
- The outcome of a task is told to the core later, so anything may happen in between.
- The outcome is never told to another life of the agent than the one that began the task.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

import msgspec

from tensorhub_agent.compute.amax_table import NumpyAmaxTable
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import (
    AllocateCopy,
    AnyCall,
    AnyEffect,
    AppendCommand,
    BreakLease,
    CallRegister,
    CloseSource,
    CompareLayouts,
    CompleteCall,
    ConfirmLease,
    CopyMade,
    CopyToSpare,
    Digested,
    DigestMemory,
    DropMapping,
    Duplicated,
    EffectOutcome,
    EndFenced,
    FailCall,
    FoldAmax,
    FreeShard,
    Keep,
    Kept,
    OpenTransport,
    PlanReceived,
    Probed,
    ProbeMapping,
    ReadBatch,
    Rejoin,
    ReportReplicaVersion,
    ReportWrongBytes,
    RequestLease,
    RequestPlan,
    SaveManifest,
    SendAvailability,
    SiblingsChecked,
)
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.layout.layout import shared_mismatch
from tensorhub_common.programs.amax_reductions import amax_reductions_of
from tensorhub_common.protocol.log.commands import AnyCommand, Filled, Ready, Want
from tensorhub_common.protocol.plans import Plan, PlanAnswer, Refusal
from tensorhub_common.protocol.subjects import cached_version
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.deltas import Deltas
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.job_log import Entry, Follower
from tensorhub_simulator.faultsim.models.segments import ModelledShard, Segment
from tensorhub_simulator.faultsim.models.unit_compute import write_scales
from tensorhub_simulator.faultsim.nodes.command_queue import CommandQueue
from tensorhub_simulator.faultsim.nodes.pending_calls import PendingCalls
from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
from tensorhub_simulator.faultsim.observations import (
    AgentDied,
    BytesWritten,
    ScalesFolded,
    ShardCommitted,
    ShardOffered,
    SourceClosed,
    Stepped,
)
from tensorhub_simulator.faultsim.transfers.source_session import AGAIN_ODDS, ReadSession

PLAN_ASK_S: Final = 0.9

SLOW_DISK_ODDS: Final = 0.1
SLOW_DISK_S: Final = 3.0
FULL_DISK_ODDS: Final = 0.02
ASIDE_ODDS: Final = 0.1
GPU_ODDS: Final = 0.5
"""How many of all agents have their shards in memory of a GPU: their next process finds none of it."""


class AgentTasks:
    """One agent's."""

    def __init__(self, agent: "AgentNode") -> None:
        """Begin with none."""
        self._agent, self._job, self._clock = agent, agent.job, agent.clock
        self._disk = agent.job.stream("disk", agent.name)

    def digest(self, effect: DigestMemory) -> None:
        """Hash one half now and the other half later, so that a write in between shows."""
        stored = self._agent.stored[effect.key]
        segment = stored.target if effect.filled else stored.segment
        half = len(segment.nbytes) // 2
        first = segment.digests(range(half)) if self._job.config.digests else b""

        def rest() -> None:
            second = segment.digests(range(half, len(segment.nbytes))) if self._job.config.digests else b""
            self._agent.outcome(Digested(effect.key, effect.number, first + second))

        self._clock.after(self._agent.lag(), self._agent, rest)

    def takes_back(self, key: ShardKey) -> bool:
        """Tell whether a new process can take back what stands here: for a copy it may lack memory or descriptors."""
        return cached_version(key.replica) is None or self._disk.random() >= ASIDE_ODDS

    def keep(self, effect: Keep) -> None:
        """Write the manifest, which a disk may take its time for."""
        self._agent.stored[effect.key].unwritten = effect
        late_s = self._disk.random() * SLOW_DISK_S if self._disk.random() < SLOW_DISK_ODDS else 0.0
        self._clock.after(late_s, self._agent, lambda: self._keep(effect))

    def _keep(self, effect: Keep) -> None:
        stored = self._agent.stored.get(effect.key)
        if stored is not None and stored.unwritten is effect and self._disk.random() < FULL_DISK_ODDS:
            stored.refused = effect.version
            self._agent.outcome(Kept(effect.key, effect.number, "no room for the manifest"))
            return
        if stored is not None and stored.unwritten is effect:
            version, root, digests = effect.version, effect.root, effect.digests
            stored.save(
                SaveManifest(key=effect.key, state="ready", partial=False, version=version, root=root, digests=digests)
            )
        self._agent.outcome(Kept(effect.key, effect.number))

    def probe(self, effect: ProbeMapping) -> None:
        """Look who maps the memory, almost at once."""
        self._clock.after(self._agent.lag() * 0.1, self._agent, lambda: self._probe(effect))

    def _probe(self, effect: ProbeMapping) -> None:
        stored = self._agent.stored.get(effect.key)
        if stored is not None:
            segment = stored.spare if effect.spare and stored.spare is not None else stored.segment
            if effect.asks_back or not segment.maps:
                segment.is_asked_back = bool(segment.maps)
            self._agent.outcome(Probed(effect.key, effect.spare, bool(segment.maps)))

    def duplicate(self, key: ShardKey) -> None:
        """Copy one piece after the other into the spare memory, so that a write meanwhile is seen."""
        self._clock.after(self._agent.lag(), self._agent, lambda: self._duplicate(key, 0))

    def _duplicate(self, key: ShardKey, piece: int) -> None:
        stored = self._agent.stored.get(key)
        if stored is None or stored.spare is None:
            return
        if piece == len(stored.segment.nbytes):
            self._agent.outcome(Duplicated(key))
            return
        stored.spare.write(stored.spare.at[piece], stored.segment.piece(piece))
        self._clock.after(self._agent.lag(), self._agent, lambda: self._duplicate(key, piece + 1))

    def make_copy(self, effect: AllocateCopy) -> None:
        """Make memory for a copy."""
        self._clock.after(self._agent.lag(), self._agent, lambda: self._make_copy(effect))

    def _make_copy(self, effect: AllocateCopy) -> None:
        key, table = effect.key, self._job.layouts.table(effect.layout)
        if key not in self._agent.stored:
            spec = ShardSpec(key, effect.shards, spot=False, layout=effect.layout, nbytes=table.nbytes)
            self._agent.stored[key] = ModelledShard(spec, Segment(table))
        made = CopyMade(key, effect.shards, effect.layout, nbytes=tuple(table.nbytes))
        self._agent.carry_out(self._agent.core.copy_made(made, self._agent.now))

    def check_siblings(self, effect: CompareLayouts) -> None:
        """Compare a layout with those of the siblings."""
        self._clock.after(self._agent.lag(), self._agent, lambda: self._check_siblings(effect))

    def _check_siblings(self, effect: CompareLayouts) -> None:
        mine = self._agent.stored.get(effect.key)
        if mine is not None:
            layout = self._job.layouts.layout
            clashes = (shared_mismatch(layout(mine.spec.layout), layout(each.layout)) for each in effect.siblings)
            mismatch = next((why for why in clashes if why is not None), None)
            self._agent.outcome(SiblingsChecked(effect.key, effect.number, mismatch))

    def plan(self, effect: RequestPlan) -> None:
        """Ask the planner. The answer may come twice, late or never; then the bound is the answer."""
        answered: list[bool] = []

        def come(answer: PlanAnswer) -> None:
            if not answered:
                answered.append(True)
                came = self._came(effect, answer)
                if self._agent.happens(AGAIN_ODDS):
                    self._clock.after(self._agent.lag(), self._agent, lambda: self._agent.outcome(came))
                self._agent.outcome(came)

        silence = Refusal(error=NO_ANSWER, reason="no planner answered")
        self._clock.after(PLAN_ASK_S, self._agent, lambda: come(silence))
        network, planner, life = self._job.network, self._agent.planner, self._agent.life
        if not network.loses(self._agent):

            def reply(answer: PlanAnswer) -> None:
                if not network.loses(planner, self._agent):
                    self._clock.after(planner.lag(), self._agent, lambda: come(answer), life)

            self._clock.after(self._agent.lag(), planner, lambda: planner.asked(effect.demand, reply))

    def _came(self, effect: RequestPlan, answer: PlanAnswer) -> PlanReceived:
        """Get the program that a plan names, which now and then can't be had."""
        if not isinstance(answer, Plan) or answer.program is None:
            return PlanReceived(effect.key, effect.number, answer)
        if self._job.network.loses(self._agent):
            lost = Refusal(error=NO_ANSWER, reason="the transfer program can't be had")
            return PlanReceived(effect.key, effect.number, lost)
        layouts, stored = self._job.layouts, self._agent.stored.get(effect.key)
        program = layouts.executions[answer.program]
        completion = PieceCompletion(program, stored.target.table) if stored is not None else None
        folds, table = (amax_reductions_of(program), NumpyAmaxTable(program)) if program.partials else (None, None)
        return PlanReceived(effect.key, effect.number, answer, program, completion, folds, table)


class Incarnations:
    """The present number of a process."""

    def __init__(self, rng: Random) -> None:
        """Begin with none."""
        self._rng = rng
        self.number = 0
        self.lost = False
        """The number may be lower than one that was used before."""
        self._step = 1
        self._used: set[int] = set()

    def next(self) -> None:
        """Take a higher one."""
        self.number += self._step * self._rng.choice((1, 1, 2, 1000))
        self._step *= 2
        # It is the wall clock in milliseconds: after a loss it may be lower, and is still none that was used.
        while self.number in self._used:
            self.number += 1
        self._used.add(self.number)

    def accepted(self) -> None:
        """The log took it."""
        self._step = 1

    def lose(self) -> None:
        """The disk is lost, and with it what was used last."""
        self.number = max(0, self.number - self._rng.choice((0, 1, 500, 5000)))
        self.lost = True


BREAK_S: Final = 2.0
JOIN_LOOK_S: Final = 0.05


class AgentNode(AgentHost):
    """One agent."""

    follower: Follower

    def __init__(
        self, name: str, job: Job, calls: PendingCalls, planner: PlannerNode, *, host: str, site: str, rack: str
    ) -> None:
        """Begin down, on this host."""
        super().__init__(name, job.stream("messages", name))
        self.job, self.calls, self.planner = job, calls, planner
        self.host, self.site, self.rack = host, site, rack
        self.clock = job.clock
        self.stored, self.kept = {}, {}
        self._is_on_gpu = job.stream("devices", name).random() < GPU_ODDS
        self.links: dict[tuple[ShardKey, int], ReadSession] = {}
        self.lanes = CommandQueue(job, self)
        self.deltas = Deltas()
        self.gone: set[int] = set()
        """Sessions that have ended: what they sent last is not read any more."""
        self.dies_in = None
        self.drag = 1.0
        self._timer: float | None = None
        self._rejoining = False
        self._numbers = Incarnations(job.streams.of("incarnations", name))
        self._errands = AgentTasks(self)

    # Life and death.

    @property
    def _first(self) -> "AgentNode":
        """The process, by its first job."""
        first: AgentNode = self.family[0]
        return first

    def start(self) -> None:
        """Begin a life in all jobs, under one number."""
        self._numbers.next()
        for each in self.family:
            each.begin_life()

    def begin_life(self) -> None:
        """Adopt what stands here, follow the log from its end, and join."""
        self.life += 1
        self.up, self.state.paused, self.dies_in = True, False, None
        self.backlog.clear()
        self.gone.clear()
        self.deltas = Deltas()
        self._timer, self._rejoining = None, False
        self.core = AgentCore(self.name, self.job.config.limits)
        if self._is_on_gpu:
            for key in [key for key, each in self.stored.items() if not _outlives(each)]:
                self.kept[key] = self.stored.pop(key)
        for key, stored in self.stored.items():
            if self._errands.takes_back(key):
                self.core.adopt(stored.spec, self._held(stored))
            else:
                self.core.set_aside(key)
        self.follower = Follower(self.job.log, self, len(self.job.log.entries), self._on_entry, events=True)
        self.join()

    def _held(self, stored: ModelledShard) -> ShardContents:
        """Believe a manifest only for bytes that still hash to its root."""
        manifest = stored.manifest
        if manifest is None:
            return self._lent(stored, ShardContents())
        whole = manifest.state == "ready" and bool(manifest.digests)
        if whole and root_digest(stored.segment.digests()) == manifest.root:
            contents = ShardContents(
                MemoryState.READY, version=manifest.version, root=manifest.root, digests=manifest.digests
            )
        else:
            contents = ShardContents(partial=manifest.partial or manifest.state in ("ready", "filling"))
        return self._lent(stored, contents)

    def _lent(self, stored: ModelledShard, contents: ShardContents) -> ShardContents:
        """Find out who maps what stands here: they don't depend on the process before this one."""
        lent = bool(stored.segment.maps)
        spare_lent = stored.spare is not None and bool(stored.spare.maps)
        # What is begun as draining was never empty for this process, so that is no transition.
        memory = MemoryState.DRAINING if lent and contents.memory is MemoryState.EMPTY else contents.memory
        return replace(contents, memory=memory, lent=lent, spare_lent=spare_lent)

    def kill(self) -> None:
        """SIGKILL, for all jobs."""
        if self.up:
            self.job.log_line(f"{self.name} is killed")
        for each in reversed(self.family):
            each.end_life()

    def end_life(self) -> None:
        """Leave memory, and nothing else."""
        if not self.up:
            return
        self.up = self.state.paused = False
        self.life += 1
        for link in list(self.links.values()):
            link.reader_died()
        self.links.clear()
        self.lanes.clear()
        for stored in self.stored.values():
            stored.target.writers.clear()
            for segment in (stored.segment, stored.target):
                segment.is_asked_back = False
        for session in list(self.job.sessions.values()):
            if session.source is self and session.reader.up and not session.closed:
                session.source_died()
        self.job.observe(AgentDied(self.name))

    def lose_disk(self) -> None:
        """Nothing is left of what this agent had, nor of the number under which it spoke last."""
        self.job.log_line(f"{self.name} has lost its disk")
        for each in self.family:
            each.stored.clear()
            each.kept.clear()
        self._numbers.lose()

    def jump(self, by_s: float) -> None:
        """Its clock jumps, and what it waits for may be due."""
        super().jump(by_s)
        for each in self.family:
            each.look_at_clock()

    def rejoin_soon(self) -> None:
        """Several refusals may come at once: they all speak of the same number."""
        if not self._rejoining:
            self._rejoining = True
            self.clock.after(0.0, self, self.rejoin)

    def look_at_clock(self) -> None:
        """What is waited for may be due."""
        self._timer = None
        self.set_timer()

    def join(self) -> None:
        """Speak under the process's number from now on."""
        number = self._first._numbers.number  # noqa: SLF001 (of the same process)
        self.lanes.clear()
        self.job.log_line(f"{self.name} joins {self.job.name} as {number}")
        self.carry_out(self.core.join(number, self.host, self.site, self.now, rack=self.rack))

    def rejoin(self) -> None:
        """One job's log does not know the number any more: there is one for all jobs, so all join again."""
        self._rejoining = False
        self._numbers.next()
        for each in self.family:
            if each.up:
                each.join()

    # Effects.

    def carry_out(self, effects: list[AnyEffect]) -> None:
        """Do what the core wants, in order; a planned death may come between two effects."""
        self.job.observe(Stepped(self.name))
        for effect in effects:
            if self.dies_in is not None:
                self.dies_in -= 1
                if self.dies_in < 0:
                    self._first.kill()
                    return
            self._do(effect)
            if not self.up:
                return
        self.set_timer()

    def _do(self, effect: AnyEffect) -> None:  # noqa: C901, PLR0912, PLR0915 (one line for each effect)
        match effect:
            case AppendCommand():
                self._say(effect.command)
            case CompleteCall() | FailCall():
                self.calls.ended(self, effect)
            case ReportReplicaVersion():
                pass
            case DigestMemory():
                self._errands.digest(effect)
            case SaveManifest():
                self.stored[effect.key].save(effect)
                self.deltas.stands(effect, self.stored[effect.key].segment)
            case Keep():
                self._errands.keep(effect)
            case ProbeMapping():
                self._errands.probe(effect)
            case CopyToSpare():
                self._errands.duplicate(effect.key)
            case DropMapping():
                pass
            case CompareLayouts():
                self._errands.check_siblings(effect)
            case AllocateCopy():
                self._errands.make_copy(effect)
            case RequestPlan():
                self._errands.plan(effect)
            case RequestLease():
                link = self.links[effect.key, effect.source] = ReadSession(self, self.job, effect)
                link.open()
            case OpenTransport():
                self.links[effect.key, effect.source].enter()
            case ReadBatch():
                self.links[effect.key, effect.source].post(effect)
            case FoldAmax():
                self._fold(effect)
            case ConfirmLease():
                self.links[effect.key, effect.source].confirm(effect)
            case ReportWrongBytes():
                # Its agent would look at its memory, and tell the worker; here no worker writes to what is published.
                pass
            case CloseSource():
                self._close(effect)
            case BreakLease():
                self._break(effect)
            case SendAvailability():
                shown = self.job.sessions.get(effect.lease)
                if shown is not None and shown.reader.up:
                    shown.announce(effect.update)
            case FreeShard():
                self._free(effect.key)
            case EndFenced() if self._first._numbers.lost:  # noqa: SLF001 (of the same process)
                # What it said before it lost its disk came late; its process ends, and a new one takes a higher number.
                self._first.kill()
            case EndFenced():
                raise Violation("one process", f"{self.name} met a higher incarnation of itself")
            case Rejoin():
                self._first.rejoin_soon()

    def _fold(self, effect: FoldAmax) -> None:
        effect.table.fold(effect.source, effect.partials)
        operation = self.core.shards[effect.key].operation
        assert isinstance(operation, ReadOperation)
        program, stored = operation.program, self.stored[effect.key]
        assert program is not None
        if not self._may_fill(stored, self.core.shards[effect.key]):
            raise Violation("one writer", f"scales of {effect.key} are folded while it is not being filled")
        write_scales(effect.table, program, effect.scales, stored.target)
        self.job.observe(ScalesFolded(sum(count for _, count in effect.scales)))

    def _close(self, effect: CloseSource) -> None:
        core = self.core.shards.get(effect.key)  # It may be gone already: nothing was written for it yet.
        operation = core.operation if core is not None else None
        if isinstance(operation, ReadOperation) and operation.transfer is not None:
            source = operation.transfer.sources.get(effect.source)
            self.job.observe(SourceClosed(source.lost if source is not None else ""))
        self.links[effect.key, effect.source].close()

    def _break(self, effect: BreakLease) -> None:
        link = self.job.sessions.get(effect.lease)
        if link is not None and link.reader.up and not link.is_cut:
            # A broken lease is safe only because nothing relies on this message: it may come late.
            late = self.messages.random() * BREAK_S if self.happens(0.3) else self.lag()
            self.clock.after(late, link.reader, lambda: link.lost(effect.reason), link.reader_life)

    def _free(self, key: ShardKey) -> None:
        stored = self.stored.pop(key)
        if stored.target.writers:
            raise Violation("one writer", f"{key} is freed while something can be written into it")

    def check_memory(self) -> None:
        """Raise `Violation` where memory of a shard is kept that its core does not know of."""
        kept = self.stored.keys() - self.core.shards.keys() - self.core.aside
        if kept:
            raise Violation("no memory without a shard", f"{self.name} keeps memory of {sorted(kept)}")

    def set_timer(self) -> None:
        """Plan the core's next tick."""
        when = self.core.deadline()
        if when is not None and (self._timer is None or when < self._timer):
            self._timer = when
            self.clock.after(max(when - self.now, 0.0) / self.state.rate, self, lambda: self._tick(when))

    def _tick(self, when: float) -> None:
        if self._timer == when:
            self._timer = None
            self.carry_out(self.core.tick(self.now))

    def outcome(self, outcome: EffectOutcome) -> None:
        """Tell the core what came of an effect."""
        self.carry_out(self.core.on_outcome(outcome, self.now))

    def _on_entry(self, entry: Entry) -> None:
        assert entry.event is not None
        if self.core.joined:
            self._first._numbers.accepted()  # noqa: SLF001 (of the same process)
        self.carry_out(self.core.on_event(entry.event, self.now))

    def lease_ended(self, lease: str, how: LeaseTransition) -> None:
        """A reader is done, or gone."""
        self.carry_out(self.core.lease_ended(lease, how, self.now))

    def session_ended(self, key: ShardKey, source: int) -> None:
        """Forget a session of one of its reads."""
        self.links.pop((key, source), None)

    @property
    def log_position(self) -> int:
        """Up to which entry it has read the log."""
        return self.follower.position

    def written_by(self, key: ShardKey, where: Sequence[int], data: bytes) -> None:
        """Write what a source sent."""
        stored = self.stored[key]
        core = self.core.shards.get(key)
        if core is None or not isinstance(core.operation, ReadOperation) or not self._may_fill(stored, core):
            state = "no shard" if core is None else f"{core.contents.memory}, {core.operation}"
            raise Violation("one writer", f"{key} is written by a read while it is {state}")
        self.job.observe(BytesWritten(key, stored.target, stored.spare is not None))
        stored.target.put(where, data)

    def _may_fill(self, stored: ModelledShard, core: ShardCore) -> bool:
        """Tell whether a read may write: in place only what is filling, and beside whatever stands."""
        return stored.spare is not None or core.contents.memory is MemoryState.FILLING

    # The log.

    def _say(self, command: AnyCommand) -> None:
        if isinstance(command, Ready) and command.by is not None:
            stored = self.stored[ShardKey(command.model, command.replica, command.shard)]
            self.job.observe(ShardOffered(command.by, stored.spec, bytes(stored.segment.data)))
        elif isinstance(command, Filled):
            stored = self.stored[ShardKey(command.model, command.replica, command.shard)]
            data, root = bytes(stored.target.data), root_digest(stored.target.digests())
            is_kept = stored.spec.swaps or _is_kept(stored, command.version)
            self.job.observe(ShardCommitted(command, stored.spec, data, root, is_kept))
        elif isinstance(command, Want) and command.by is not None:
            self.calls.wanted(self, ShardKey(command.model, command.replica, command.shard), command.by)
        self.lanes.say(command)

    # Workers.

    def begin(self, key: ShardKey, call: AnyCall) -> None:
        """Begin a worker's call; a registration waits for the join, and may be of a new shard."""
        if call.session in self.gone:
            self.calls.forget(call.call)
            return
        if isinstance(call, CallRegister) and not self.core.joined and self.now < call.deadline:
            self.clock.after(JOIN_LOOK_S, self, lambda: self.begin(key, call))
            return
        kept = self.kept.pop(key, None) if isinstance(call, CallRegister) else None
        if isinstance(call, CallRegister) and key not in self.core.shards:
            spec = self.job.specs[key]
            table = self.job.layouts.table(spec.layout)
            if kept is None:
                kept = ModelledShard(spec, Segment(table), spare=Segment(table) if spec.staged else None)
                call = msgspec.structs.replace(call, holds=None, partial=False)
            lent, spare_lent = bool(kept.segment.maps), kept.spare is not None and bool(kept.spare.maps)
            kept.manifest = kept.unwritten = kept.refused = None
            self.stored[key] = kept
            call = msgspec.structs.replace(call, lent=lent, spare_lent=spare_lent)
            self.carry_out(self.core.register(spec, call, self.now))
        else:
            self.carry_out(self.core.called(key, call, self.now))

    def loaded(self, key: ShardKey) -> None:
        """The worker has written values of its own."""
        self.carry_out(self.core.loaded(key))

    def worker_gone(self, session: int) -> None:
        """A worker's connection has ended."""
        self.gone.add(session)
        self.carry_out(self.core.worker_gone(session, self.now))


def _outlives(stored: ModelledShard) -> bool:
    """Tell whether the agent's next process finds a shard: a copy is in the host's memory, a mapped one in none."""
    return stored.spec.mapped or cached_version(stored.spec.key.replica) is not None


def _is_kept(stored: ModelledShard, version: int) -> bool:
    """Tell whether the next process finds what is filled; what a worker reads may go without."""
    if stored.refused == version and cached_version(stored.spec.key.replica) is None:
        return True
    kept = stored.manifest
    return kept is not None and (kept.state, kept.version) == ("ready", version)
