"""The limits that one read works under: how much may be in flight, and how long each wait may take. Pure.

A simulation of a few bytes and seconds passes smaller values. docs/design/protocol/transfer-faults.md says why each
bound is safe.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from tensorhub_agent.rates.source_rate import BatchLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """The limits of one read. The first three are settings of the agent."""

    window_bytes: int = 128 * 1024 * 1024
    """All sources of a read together have at most this much in flight."""
    stall_s: float = 5.0
    """A source whose rate is not known is left after this time without progress."""
    sources_lost_s: float = 1.2
    """A running read without a source waits this long for another one before it fails."""
    batches: BatchLimits = field(default_factory=BatchLimits)

    # Opening sources.

    opening_max: int = 32
    """At most this many sources are being opened at a time: of a thousand handshakes at once, most would be late."""
    transports_max: int = 64
    """At most this many sources have a transport. Each may have two batches in flight whatever the window is, so more
    transports would exceed the window."""
    open_s_max: float = 2.0
    """A source that has not granted a lease and opened a transport within this time is left out."""
    crosser_open_s_max: float = 10.0
    """The same bound for a peer of the reader's site, which first opens a source in another site, and for that source:
    where it is left, its part crosses to another reader."""

    # Silence.

    stall_min_s: float = 1.0
    """A source of any rate may be silent for this long: a busy machine rarely keeps a process waiting for longer."""
    stall_times: int = 4
    """A source may be silent for this many times as long as its bytes in flight should take."""
    waiting_silent_s: float = 3.0
    """A half-filled source of which pieces are awaited reports with each renewal that it lives; three may be missed."""
    crosser_silent_s: float = 30.0
    """A peer of the reader's site may be silent for this long while the log has not lost its agent: to leave it means
    to bring its part over once more. The connection of a killed one ends at once, and a stopped one is lost."""
    crosser_starved_s: float = 60.0
    """A peer of the reader's site may have nothing new for this long: what it promises is in flight there, and it gives
    up by itself."""
    far_bps_min: int = 500_000
    """A source in another site is given as long as its bytes in flight take at this rate: the transport brings all of
    them side by side, so the first may arrive with the last."""
    far_silent_s: float = 30.0
    """But no longer than this. The log loses a stopped agent long before, and then the bounds of any source count."""
    starved_times: int = 2
    """A half-filled source may have nothing new for this many times `stall_s`: it may have to leave its own source
    first."""
    unpromised_wait_s: float = 5.0
    """A piece that its source has not promised is awaited for this long: the source may have to open a source of its
    own first, or to receive the handoff of the piece, on a busy machine."""
    look_s: float = 0.25
    """A read that waits is called this often, to see slow sources and its own pauses."""
    late_s: float = 0.1
    """A call that comes later than this after its time shows a pause of the reader, which is no source's silence."""

    # Slow sources.

    slow_min_s: float = 0.5
    """A source that is expected to end within this time is not closed for being slow."""
    slow_times: int = 2
    """Nor one that is expected to take less than this many times what an idle one would take."""
    slow_closed_max: int = 4
    """One read closes at most this many sources for being slow."""
    switch_s: float = 0.1
    """What closing one source and asking another costs, estimated high."""
    trial_s: float = 1.0
    """A half-filled source is the only one for this long, and expected to be for as long again, before another source
    is tried."""
    trial_times: int = 2
    """Each further trial of a read comes after this many times as long."""
    trials_max: int = 8
    """One read tries other sources at most this often."""
    trial_bytes: int = 8 * 1024 * 1024
    """About this much is asked of a source on trial: enough to see how fast it is, and little to lose."""
    trial_better_times: int = 3
    """It is kept when it brings that in less than one part in this many of the time that the other source takes."""

    # Readers that wait for this read.

    relayed_bytes: int = 8 * 1024 * 1024
    """A source is asked to confirm this much at a time while other readers wait for what it brings."""
    relayed_far_bytes: int = 1024 * 1024
    """The same for a source in another site: its line is thin, and the whole site waits."""
    handoff_gain_s: float = 1.0
    """A crosser hands a part over where all of it arrives by more than this sooner."""
    handoff_pause_s: float = 1.0
    """A reader keeps what was handed to it for at least this long: by then all peers know its new owner."""


DEFAULT_LIMITS: Final = TransferLimits()

DEVICE_BATCH_BYTES: Final = 2 * 1024 * 1024 * 1024
"""A GPU copies this much in two milliseconds, several times what a batch costs beside its bytes."""

DEVICE_WINDOW_BYTES: Final = 4 * DEVICE_BATCH_BYTES


def on_device(limits: TransferLimits) -> TransferLimits:
    """Return the limits of a read into the memory of a GPU: what it copies on this host takes no memory of the host."""
    batches = replace(
        limits.batches,
        memory_bytes=max(DEVICE_BATCH_BYTES, limits.batches.memory_bytes),
        # What comes over a wire does pass through the host.
        wire_window_bytes=limits.window_bytes,
    )
    return replace(limits, window_bytes=max(DEVICE_WINDOW_BYTES, limits.window_bytes), batches=batches)
