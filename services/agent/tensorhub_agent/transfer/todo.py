"""What one read wants of its driver. Pure."""

from dataclasses import dataclass, field

from tensorhub_agent.transfer.ceding import Ceded
from tensorhub_common.protocol.plans import Range, Share, SourceId


@dataclass(slots=True)
class Todo:
    """What a read wants of its driver now."""

    plan: tuple[tuple[Range, ...], tuple[SourceId, ...]] | None = None
    open: list[tuple[int, Share]] = field(default_factory=list)
    hold: list[tuple[int, Share]] = field(default_factory=list)
    """Of these the lease alone is wanted, until they enter."""
    enter: list[int] = field(default_factory=list)
    post: list[tuple[int, int, tuple[Range, ...]]] = field(default_factory=list)
    confirm: list[int] = field(default_factory=list)
    accuse: list[int] = field(default_factory=list)
    """Sources whose bytes were wrong though their lease held."""
    close: list[int] = field(default_factory=list)
    fold: list[tuple[int, tuple[Range, ...], tuple[Range, ...]]] = field(default_factory=list)
    """Partials of a source that count now, and scales that follow: (source, partials, scales); comes before `post`."""
    ceded: list[Ceded] = field(default_factory=list)
    """Of what would be this reader's to bring over to its site, what a mate brings over from now on."""
    proven: list[Range] = field(default_factory=list)
    """Pieces that stand in the destination, verified: others may read them there."""
