"""What became of an agent's reads: plain numbers for the metrics, counted when their calls are answered.

They belong to the agent and not to a job, so they outlive a job that is set aside or deleted.
"""

from collections import Counter
from typing import Final

from opentelemetry import metrics as api

from tensorhub_agent.core.effects import CompleteCall, FailCall
from tensorhub_agent.core.operations.read_report import transfer_s
from tensorhub_common.observability.metrics import METER, recorder

DONE: Final = "done"

PUT_OFF: Final = "put-off"
"""The outcome of an update that found a newer version and could not have it just then."""

_read_took: Final = recorder(api.get_meter(METER), "tensorhub.agent.read.duration")
_read_waited: Final = recorder(api.get_meter(METER), "tensorhub.agent.read.wait")


class ReadCounts:
    """The reads of all jobs that have ended."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.ended: Counter[str] = Counter()
        """How many ended, by outcome."""
        self.late: Counter[str] = Counter()
        """How many stalled, and how many were slow: see `observability/read_log.py`."""
        self.retried = 0
        """Pieces that were asked for once more."""

    def count(self, effect: CompleteCall | FailCall) -> None:
        """Count a read whose call is being answered."""
        report = effect.report
        self.retried += 0 if report is None else report.retried
        if isinstance(effect, FailCall):
            self.ended[effect.error] += 1
        elif report is not None and report.failure:
            self.ended[PUT_OFF] += 1
        elif report is not None:
            self.ended[DONE] += 1
            waited_s = 0.0 if report.stages is None else report.stages.round_s
            _read_waited(waited_s)
            _read_took(transfer_s(report))
