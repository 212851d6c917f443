"""Which of an agent's reads are worth a line in its log: those that failed, stood still or were slow. Pure.

Always true: one read has at most one line of each kind, whatever it meets; a line names the shard, the version, the
sources with what became of each, and the trace. Reads that are refused before they begin may come a thousand times a
second from one worker, so of each kind at most one line is written in `REFUSED_TOLD_S`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

from tensorhub_agent.core.effects import CompleteCall, FailCall
from tensorhub_agent.core.operations.read import ReadOperation, ReadStage
from tensorhub_agent.core.operations.read_report import transfer_s
from tensorhub_agent.observability.read_status import still_s
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_common.protocol.worker import ReadReport, SourceReport

SLOW_BYTES_PER_S: Final = 100_000_000
"""A read may take a second for this many bytes, on top of `slow_read_s`, before it is slow."""

SOURCES_NAMED_MAX: Final = 4
"""A line names at most this many sources; of the others it says how many there are."""

REFUSED_TOLD_S: Final = 60.0
"""Of reads that are refused for the same reason one is told in this time, with how many there were since the last."""

STALLED: Final = "stalled"
SLOW: Final = "slow"
MIB: Final = 1024 * 1024


class NotBegun(StrEnum):
    """Why a read is refused before it begins."""

    HANDLE = "handle"
    """Its worker names a shard that it never had."""
    NOT_ITS_OWN = "not-its-own"
    """The shard was released, and belongs to another worker or to none."""
    SWAPPED = "swapped"
    """Its worker would overwrite what an earlier read has just brought."""
    ASIDE = "aside"
    """The job was set aside."""


class ReadLog:
    """The reads of one agent in one job."""

    def __init__(self, stall_s: float, slow_read_s: float, late: Counter[str]) -> None:
        """Count reads that stood still or were slow in `late`."""
        self._stall_s, self._slow_read_s, self._late = stall_s, slow_read_s, late
        self._stalled: set[int] = set()
        self._refused: dict[NotBegun, tuple[float, int]] = {}
        """When one of a kind was told, and how many were not told since."""

    def look(self, reads: Iterable[ReadOperation], now: float, trace_of: Callable[[int], str | None]) -> list[str]:
        """Return a line for each read that has begun to stand still."""
        lines, under_way = [], set()
        for read in reads:
            call = read.call.call
            under_way.add(call)
            if call not in self._stalled and (stands := self._stands_still(read, now)) is not None:
                self._stalled.add(call)
                self._late[STALLED] += 1
                lines.append(f"the read of {_what(read.core.key)} stands still: {stands}{_trace(trace_of(call))}")
        self._stalled &= under_way
        return lines

    def _stands_still(self, read: ReadOperation, now: float) -> str | None:
        """Say what a read stands still at, if it does."""
        if read.stage is ReadStage.LEASING:
            return self._has_no_lease(read, now)
        transfer = read.transfer
        if transfer is None or read.stage not in (ReadStage.FILLING, ReadStage.KEEPING):
            return None
        if read.stage is ReadStage.KEEPING:
            for_s = now - transfer.ended
            told = f"all of version {transfer.version} has come, and its manifest is not written for {for_s:.1f} s: see"
            return f"{told} whether the disk under the agent's state answers" if for_s >= self._stall_s else None
        for_s = still_s(transfer, now)
        if for_s < self._stall_s:
            return None
        done, total = transfer.done_bytes(), sum(read.core.spec.nbytes)
        return (
            f"nothing of version {transfer.version} has come for {for_s:.1f} s, after {_mib(done)} of {_mib(total)}; "
            f"{_under_way(transfer)}"
        )

    def _has_no_lease(self, read: ReadOperation, now: float) -> str | None:
        # Between two attempts there is no transfer, and the clock of a new one begins anew.
        for_s = now - read.leasing_since
        if for_s < self._stall_s:
            return None
        why = None if read.transfer is None else read.transfer.plan_requests.unanswered
        told = f"version {read.version} is decided, and for {for_s:.1f} s it has no lease on a source"
        return told if why is None else f"{told}: {why}"

    def ended(self, key: ShardKey, effect: CompleteCall | FailCall, trace: str | None) -> str | None:
        """Return the line of a read that is over, if it is worth one."""
        report = effect.report
        if isinstance(effect, FailCall):
            told = f"the read of {_what(key)} failed: {effect.error}: {effect.message}"
        elif report is not None and report.failure:
            told = f"the update of {_what(key)} is put off: {report.failure}"
        elif report is not None and self._is_slow(report):
            self._late[SLOW] += 1
            told = (
                f"the read of {_what(key)} was slow: version {effect.version}, {_mib(report.nbytes)} in "
                f"{transfer_s(report):.1f} s{_stages(report)}"
            )
        else:
            return None
        return told + ("" if report is None else _sources(report.sources)) + _trace(trace)

    def refused(self, kind: NotBegun, key: ShardKey | None, effect: FailCall, now: float) -> str | None:
        """Return the line of a read that never began, unless there was one of its kind just now."""
        told_at, unsaid = self._refused.get(kind, (None, 0))
        if told_at is not None and now - told_at < REFUSED_TOLD_S:
            self._refused[kind] = told_at, unsaid + 1
            return None
        self._refused[kind] = now, 0
        what = "a read" if key is None else f"a read of {_what(key)}"
        more = f" (and {unsaid} more such since the last line)" if unsaid else ""
        return f"{what} is refused: {effect.error}: {effect.message}{more}"

    def _is_slow(self, report: ReadReport) -> bool:
        return transfer_s(report) > self._slow_read_s + report.nbytes / SLOW_BYTES_PER_S


def _what(key: ShardKey) -> str:
    return f"shard {key.shard} of {key.model}/{key.replica}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def _trace(trace: str | None) -> str:
    return "" if trace is None else f" (trace {trace})"


def _stages(report: ReadReport) -> str:
    stages = report.stages
    if stages is None:
        return ""
    parts = {
        "plan": stages.plan_s,
        "leases": stages.lease_s,
        "other shards": stages.start_s,
        "bytes": stages.first_s + stages.wire_s,
        "proof": stages.verify_s,
        "log": stages.ready_s,
    }
    return f" ({', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())})"


def _under_way(transfer: Transfer) -> str:
    waits = [source for source in transfer.sources.values() if source.in_flight]
    if not waits:
        return "no source has anything for it"
    named = ", ".join(f"{each.share.source.agent} ({each.share.transport})" for each in waits[:SOURCES_NAMED_MAX])
    return f"it waits for {named}" + _more(len(waits))


def _sources(sources: tuple[SourceReport, ...]) -> str:
    # Sources that were left say why the read went as it did.
    first = sorted(sources, key=lambda each: not each.lost)[:SOURCES_NAMED_MAX]
    if not first:
        return ""
    named = ", ".join(
        f"{each.agent} ({each.transport}, {_mib(each.nbytes)}{f', left: {each.lost}' if each.lost else ''})"
        for each in first
    )
    return f"; sources: {named}" + _more(len(sources))


def _more(count: int) -> str:
    return f" and {count - SOURCES_NAMED_MAX} more" if count > SOURCES_NAMED_MAX else ""
