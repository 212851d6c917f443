"""The rates that the planner counts with and the bounds that it keeps.

The rates are a model for links that are not measured yet (`planning/cost_model.py`). A plan depends on their ratios
only, and a wrong rate costs time, never bytes.
"""

from typing import Final

import msgspec

from tensorhub_common.protocol.plans import SHARES_MAX
from tensorhub_planner.primitives.topology import Distance


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How fast bytes come from a distance."""

    ingest_bps: float
    """What a reader takes in at most, in bytes per second, from all its sources together."""
    source_bps: float | None
    """What a source gives at most, in bytes per second, to all its readers together. None: the reader's own speed (or
    the link's) is the only bound, so a second source can't make it faster."""
    setup_s: float
    """What it costs to ask one more source: a lease and an endpoint."""


LOCAL: Final = Rates(ingest_bps=12e9, source_bps=None, setup_s=0.0005)
"""On one host the reader maps the source's segment and copies by itself: the source does nothing, and both stand behind
the same memory controllers. So reading from several sources gains nothing."""

NETWORK: Final = Rates(ingest_bps=25e9, source_bps=25e9, setup_s=0.001)
"""In a site both ends have a network card of one kind. One idle source fills the reader's; one with n readers already
gives an n+1st part, and then several sources fill it."""

WIDE: Final = Rates(ingest_bps=1e9, source_bps=None, setup_s=0.1)
"""Between sites the link is the bound, whichever source's bytes it carries."""


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan keeps to."""

    local: Rates = LOCAL
    rack: Rates = NETWORK
    """What the switches between racks take away is not known before it is measured."""
    network: Rates = NETWORK
    wide: Rates = WIDE
    stripes_max: int = 16
    """Equal pieces are striped over at most this many sources."""
    shares_max: int = SHARES_MAX
    """A plan has at most this many sources; more than `stripes_max` only where holders have parts."""
    slack: float = 0.1
    """The fewest sources are taken whose time is within this part of the least time."""
    assigned_s_max: float = 30.0
    """A read whose end the log never told counts as load for so long."""
    readers_max: int = 65_536
    """The ledger knows at most this many reads; the oldest is forgotten first."""
    pipelining: bool = True
    """Half-filled replicas are named as sources. Without, each reader reads from a holder that is ready."""
    samples_min: int = 2
    """A rate counts as measured from this many samples on: the first read of a link may have met a busy one."""
    measured_s_max: float = 300.0
    """What was measured longer ago counts no more. So a source that is avoided for being slow is tried again."""
    nearer_times: float = 2.0
    """A nearer source is read after a farther one of the site if that brings more than this many times as much."""
    said_s_max: float = 3.0
    """What an agent said of its readers counts for so long; by then it is lost."""
    hop_bytes: int = 8 * 1024 * 1024
    """A reader ends later by as long as this many bytes take, for each half-filled replica through which its bytes
    come: a batch must stand there, verified, before it is told of and asked for. In bytes, since a batch is, and since
    only ratios of the rates are known."""
    chain_max: int = 64
    """A piece may come through at most this many half-filled replicas."""
    wan_streams: int = 8
    """One shard crosses to another site in this many streams at a time, whether one replica of the site reads them all
    or as many replicas one each."""
    reserved_max: int = 64
    """A question makes room for at most this many readers whose turn is earlier and who have not asked yet."""

    def rates(self, distance: Distance) -> Rates:
        """Return the rates that hold over a distance."""
        if distance <= Distance.HOST:
            return self.local
        if distance is Distance.RACK:
            return self.rack
        return self.network if distance is Distance.SITE else self.wide
