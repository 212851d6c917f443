"""Compares what each replica holds, after each of its updates, with what the trainer sealed before it published.

Always true: nothing counts as compared until both sides have said their digests of the same version; a tensor that one
side lacks is a difference.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Claim:
    """What a replica says that it holds."""

    replica: str
    version: int
    nbytes: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """A copy that is not what the trainer published, and in which tensors."""

    replica: str
    version: int
    tensors: tuple[str, ...]


@dataclass(slots=True)
class Comparison:
    """All claims, and what came of them."""

    equal: dict[str, int] = field(default_factory=dict)
    """How many claims of each replica were found equal."""
    compared: int = 0
    nbytes: int = 0
    """Compared in all."""
    differences: list[Difference] = field(default_factory=list)
    open: list[Claim] = field(default_factory=list)
    """About versions of which the trainer has not spoken yet."""
    _truths: dict[int, dict[str, str]] = field(default_factory=dict)

    def seal(self, version: int, digests: dict[str, str]) -> None:
        """Take the trainer's word for a version, and compare what waited for it."""
        self._truths[version] = digests
        waiting, self.open = self.open, []
        for claim in waiting:
            self.claim(claim)

    def claim(self, claim: Claim) -> bool | None:
        """Compare a copy. Return whether it is equal, or None when that will be known later."""
        truth = self._truths.get(claim.version)
        if truth is None:
            self.open.append(claim)
            return None
        names = truth.keys() | claim.digests.keys()
        differing = tuple(sorted(name for name in names if truth.get(name) != claim.digests.get(name)))
        self.compared += 1
        self.nbytes += claim.nbytes
        if differing:
            self.differences.append(Difference(claim.replica, claim.version, differing))
            return False
        self.equal[claim.replica] = self.equal.get(claim.replica, 0) + 1
        return True
