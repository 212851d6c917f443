"""What became of the reads of one job: plain numbers for the metrics, counted when their calls are answered."""

from collections import Counter
from typing import Final

from opentelemetry import metrics as api

from tensorhub_agent.effects import Answer, Raise
from tensorhub_common.metrics import METER, recorder

DONE: Final = "done"

_read_took: Final = recorder(api.get_meter(METER), "tensorhub.agent.read.duration")


class ReadCounts:
    """The reads of one job that have ended."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.ended: Counter[str] = Counter()
        """How many ended, by outcome."""
        self.retried = 0
        """Pieces that were asked for once more."""

    def count(self, effect: Answer | Raise) -> None:
        """Count a read whose call is being answered."""
        if isinstance(effect, Raise):
            self.ended[effect.error] += 1
        elif effect.report is not None:
            self.ended[DONE] += 1
            self.retried += effect.report.retried
            _read_took(effect.report.total_s)
