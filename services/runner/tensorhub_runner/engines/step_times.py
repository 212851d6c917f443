"""How long steps of an engine take, by what they compute: measured, and the latest count most."""

from typing import Final

LATEST: Final = 0.1
"""How much the latest step counts in an average."""


class StepTimes:
    """The times of one engine's steps, in seconds."""

    def __init__(self) -> None:
        """Have measured nothing."""
        self._decode_s: dict[int, float] = {}
        self.prefill_s: float | None = None
        """Of one token of a prompt."""

    @property
    def decode_s(self) -> tuple[tuple[int, float], ...]:
        """By batch size: of a step that makes one token of each attempt. There are at most as many as slots."""
        return tuple(sorted(self._decode_s.items()))

    def add(self, *, decoded: int, prefilled: int, step_s: float) -> None:
        """Count a step that computed so many tokens; one that did both says little about either."""
        if decoded and not prefilled:
            self._decode_s[decoded] = _average(self._decode_s.get(decoded), step_s)
        elif prefilled and not decoded:
            self.prefill_s = _average(self.prefill_s, step_s / prefilled)


def _average(before: float | None, latest: float) -> float:
    return latest if before is None else before + LATEST * (latest - before)
