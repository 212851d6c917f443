"""The settings and limits that an agent's cores work under. Pure: the process that starts the agent has read them."""

from dataclasses import dataclass, field

from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_agent.transfer.limits import TransferLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The settings of an agent's core, and the limits of its reads and leases."""

    digests: bool = True
    """Pieces are verified by their digests."""
    slow_read_s: float = 2.0
    """A read that takes longer than this, and longer than its bytes account for, is logged."""
    refill_drain_s: float = 0.0
    """A read into a published shard waits this long for the shard's readers before it breaks their leases."""
    cache_bytes: int = 0
    """This agent takes in at most this many bytes of copies of retained versions."""
    encodings: bool = True
    """Reads take patches and compressed pieces where these come sooner."""
    deltas: int = 0
    """Deltas of published memory are kept for this many versions back; 0: none are made."""
    transfer: TransferLimits = field(default_factory=TransferLimits)
    leases: LeaseLimits = field(default_factory=LeaseLimits)
    wish_s_max: float = 60.0
    """A publication requested from outside is given up after this."""
    handed_back_s_max: float = 5.0
    """The publication of handed-back memory is given up after this; calls of the shard's worker wait for its end."""
    read_finish_s: float = 0.5
    """A read of an overtaken version that is expected to end within this time is finished first."""
    copy_read_s_max: float = 600.0
    """A copy of a retained version that is not read within this time is tried again."""
    copy_again_s: float = 1.0
    """A copy is tried again this long after it failed."""
