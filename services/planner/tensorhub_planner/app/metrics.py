"""A planner's metrics, counted as requests are answered; docs/operate/metrics.md lists them."""

from collections import Counter
from typing import Final

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_common.observability.metrics import METER, labelled, observe, recorder, unlabelled
from tensorhub_common.protocol.plans import Plan, Refusal
from tensorhub_common.protocol.queries import QueryError

_took: Final = recorder(api.get_meter(METER), "tensorhub.planner.plan.duration")


class AnswerCounts:
    """The requests that one planner has answered."""

    def __init__(self) -> None:
        self.plans = 0
        self.refusals: Counter[str] = Counter()
        """By the name of the error."""

    def add(self, answer: Plan | Refusal | QueryError, seconds: float) -> None:
        """Count an answer that took this time."""
        if isinstance(answer, Plan):
            self.plans += 1
        else:
            self.refusals[answer.error] += 1
        _took(seconds)


def watch(counts: AnswerCounts, meter: Meter | None = None) -> None:
    """Have a planner's metrics read from here on; once in a process."""
    meter = meter or api.get_meter(METER)
    observe(meter, "tensorhub.planner.plans", unlabelled(lambda: counts.plans))
    observe(meter, "tensorhub.planner.refusals", labelled("error", lambda: counts.refusals))
