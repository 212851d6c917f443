"""When a source of a read is left: each bound of silence, by what is expected of the source. Pure.

docs/design/protocol/transfer-faults.md, says why each bound is safe.
"""

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_agent.transfer.source import Source, SourcePhase


def deadline_of(source: Source) -> float:
    """Return when a source is left, unless it makes progress or has something new before."""
    if source.phase is SourcePhase.OPEN:
        if source.awaiting_source and not source.queue and not source.in_flight:
            return _waiting_deadline(source)
        return source.last_progress_at + _silence_limit_s(source)
    is_opening = source.phase is SourcePhase.OPENING and source.is_asked
    return source.last_progress_at + _opening_limit_s(source) if is_opening else NEVER


def _opening_limit_s(source: Source) -> float:
    """Return how long a source may take that is being opened, or asked for a lease."""
    is_worth_it = (source.share.crosses or source.share.far) and not source.is_lost
    return source.limits.crosser_open_s_max if is_worth_it else source.limits.open_s_max


def _waiting_deadline(source: Source) -> float:
    """Return when an open source is left of which only pieces are awaited that it does not have yet."""
    limits = source.limits
    if not source.share.crosses:
        starved_s = limits.starved_times * limits.stall_s
        return min(source.last_progress_at + limits.waiting_silent_s, source.last_new_at + starved_s)
    silent_s = limits.waiting_silent_s if source.is_lost else limits.crosser_silent_s
    return min(source.last_progress_at + silent_s, source.last_new_at + limits.crosser_starved_s)


def _silence_limit_s(source: Source) -> float:
    """Return how long an open source may be silent."""
    limits = source.limits
    is_awaited = bool(source.in_flight) or source.confirming or bool(source.confirming_early)
    if is_awaited and not source.is_lost:
        if source.share.crosses:
            return limits.crosser_silent_s
        if source.share.far:
            in_flight_s = (source.in_flight_bytes + source.unconfirmed_bytes) / limits.far_bps_min
            return min(limits.far_silent_s, limits.stall_s + in_flight_s)
    if source.confirming or (source.confirming_early and not source.in_flight):
        return limits.stall_s
    return _batch_limit_s(source) if source.in_flight else NEVER


def _batch_limit_s(source: Source) -> float:
    """Return how long a source may be silent while batches of it are in flight.

    A source whose memory is read does nothing for it: when its bytes are late, the reader is busy. Between sites TCP is
    silent for seconds after a loss, and what is asked for again crosses again. A source that was left for silence
    before, and was needed again, has the long bound as well.
    """
    limits, rate = source.limits, source.pace.rate
    if rate is None or source.is_readmitted or source.share.far or reads_memory(source.share.transport):
        return limits.stall_s
    return min(limits.stall_s, max(limits.stall_min_s, limits.stall_times * source.in_flight_bytes / rate))
