"""The lease of the leading registry, as the key-value store has it."""

from typing import Final

LEASE_S: Final = 2.0


class Lease:
    """Which registry leads."""

    def __init__(self) -> None:
        """Begin free."""
        self.holder: object = None
        self.term = 0
        self.until = 0.0

    def take(self, who: object, now: float) -> int | None:
        """Take or renew the lease; returns the term, or None."""
        if self.holder is who and now < self.until:
            self.until = now + LEASE_S
            return self.term
        if self.holder is not None and now < self.until:
            return None
        self.holder, self.until = who, now + LEASE_S
        self.term += 1
        return self.term
