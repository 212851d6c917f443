"""Which layouts a transfer program is compiled from, as one value with a name. Pure.

Each request of a reader names a replica of thousands of shards, so the set is digested once, and compared by that.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

_NAME_BYTES = 32


@dataclass(frozen=True, eq=False)
class LayoutSet:
    """The digests of source layouts, and of those of them in which the version was published. Order counts."""

    layouts: tuple[str, ...]
    originals: tuple[str, ...]
    name: str = field(init=False, repr=False)
    """A digest of both: equal sets have equal names."""

    def __post_init__(self) -> None:
        """Name it."""
        named = "\n".join((*self.layouts, "", *self.originals)).encode()
        object.__setattr__(self, "name", blake2b(named, digest_size=_NAME_BYTES).hexdigest())

    def __eq__(self, other: object) -> bool:
        """Compare by name."""
        return isinstance(other, LayoutSet) and self.name == other.name

    def __hash__(self) -> int:
        """Hash the name."""
        return hash(self.name)
