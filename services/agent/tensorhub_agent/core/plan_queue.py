"""How many questions for plans one agent has out at a time. Pure.

A planner answers one question after another, and an answer that takes longer than the read waits for it is work for
nothing: with a thousand reads that ask at once, and again each second, no answer came in time. So the questions of an
agent wait here for their turn, and the time of each begins when it goes out.

Invariants:
- At most `PLANS_OUT_MAX` shards have a question out, and no shard has more than one that counts.
- A question that waits is dropped when its read has ended, and replaced when its read asks anew.
"""

from typing import Final

from tensorhub_agent.core.effects import RequestPlan
from tensorhub_agent.primitives.ids import ShardKey

PLANS_OUT_MAX: Final = 16
"""One agent asks a planner for at most this many plans of one job at a time."""


class PlanQueue:
    """The questions of one agent in one job."""

    def __init__(self) -> None:
        """Begin with none."""
        self._out: dict[ShardKey, int] = {}
        self._waiting: dict[ShardKey, RequestPlan] = {}

    def admit(self, question: RequestPlan) -> bool:
        """Take a question; True: it goes out at once."""
        if question.key not in self._out and (len(self._out) >= PLANS_OUT_MAX or self._waiting):
            self._waiting[question.key] = question
            return False
        self._out[question.key] = question.number
        return True

    def answered(self, key: ShardKey, number: int) -> None:
        """A question has its answer, or will get none."""
        if self._out.get(key) == number:
            del self._out[key]

    def ended(self, key: ShardKey) -> None:
        """The shard reads no more."""
        self._out.pop(key, None)
        self._waiting.pop(key, None)

    @property
    def has_room(self) -> bool:
        """Whether a question that waits may go out."""
        return bool(self._waiting) and len(self._out) < PLANS_OUT_MAX

    def next(self) -> RequestPlan:
        """Take the question that has waited longest: it goes out now."""
        key = next(iter(self._waiting))
        question = self._waiting.pop(key)
        self._out[key] = question.number
        return question
