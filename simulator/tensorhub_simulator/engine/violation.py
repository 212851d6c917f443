"""A broken invariant. Models, nodes and invariants raise it."""


class Violation(AssertionError):
    """Something happened that must never happen."""

    def __init__(self, invariant: str, what: str) -> None:
        """Name the invariant and say what broke it."""
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what
