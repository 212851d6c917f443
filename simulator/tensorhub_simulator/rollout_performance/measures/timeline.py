"""A run over its time: how many instances there were, what the trainer did, what engines made. Pure."""

from typing import Final, Literal

import msgspec

SAMPLES_MAX: Final = 2000
"""After so many samples every other one is dropped, and they come half as often."""

Doing = Literal["seeds", "trains", "publishes"]
"""What a trainer does; else it waits for responses."""


class Sample(msgspec.Struct, frozen=True):
    """One moment."""

    at_s: float
    spot: int
    """Machines that come and go, with a running engine."""
    booting: int
    local: int
    """Engines of the trainer's own GPUs."""
    made: int
    """Tokens that all engines have made until now."""


class Span(msgspec.Struct, frozen=True):
    """The trainer did one thing; in seconds."""

    begin_s: float
    end_s: float
    doing: Doing


class Timeline(msgspec.Struct):
    """One run."""

    every_s: float = 1.0
    samples: list[Sample] = []
    spans: list[Span] = []
    lost_s: list[float] = []
    """When machines went with work on them."""

    def add(self, sample: Sample) -> None:
        """Note a moment."""
        self.samples.append(sample)
        if len(self.samples) > SAMPLES_MAX:
            del self.samples[1::2]
            self.every_s *= 2
