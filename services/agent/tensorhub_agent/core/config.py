"""The settings that an agent's cores work under. Pure: whoever starts the agent has read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The settings that the core works under."""

    digests: bool = True
    window_bytes: int = 128 * 1024 * 1024
    stall_s: float = 5.0
    sources_lost_s: float = 1.2
    slow_read_s: float = 2.0
    """A read that takes longer, and than its bytes account for, is told in the log."""
    refill_drain_s: float = 0.0
    cache_bytes: int = 0
    """So many bytes of copies of retained versions this agent takes in."""
    encodings: bool = True
    """Reads here take patches and packed pieces where these come sooner."""
    deltas: int = 0
    """For so many versions back deltas of what is published here are kept; 0: none are made."""
