"""When a read asks the planner, how often, and what silence or a refusal leads to. Pure.

Invariants:
- One question of a read is out at a time.
- Silence says nothing about sources: the planner is asked again.
- While the log counts a holder, a read asks again until its call ends; once it counts none, the read ends at once.
"""

from typing import Final

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.transfer.exclusions import Exclusions
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.plans import PlanAnswer, Refusal

PLAN_S_MAX: Final = 1.0
"""A planner that has not answered within this is asked again."""

PLAN_AGAIN_S: Final = 0.1
"""How long to wait before asking the planner again after a refusal in mid-read."""

PLAN_AGAIN_S_MAX: Final = 1.0
"""While the log counts a holder that can't be read from, the pauses grow to this."""

PLANS_MAX: Final = 256
"""One read is planned at most so often where the planner does not say that the log counts a holder."""

NO_ANSWER: Final = RegistryUnavailable.__name__
"""The error of a refusal that stands for no answer. Silence says nothing of sources: the planner is asked again."""


class PlanRequests:
    """The questions of one read to the planner: one at a time."""

    def __init__(self, now: float) -> None:
        """Want a plan at once."""
        self.at: float | None = now
        self.waiting = False
        self.count = 0
        self.unanswered: str | None = None
        """Why the last question had no answer; None where it had one."""
        self.sent = now
        """When the question that is out went out; `NEVER` while it is kept back."""
        self.log_counts_holder = False
        """The last refusal said that the log counts a holder."""
        self._again_s = PLAN_AGAIN_S
        self._dry_since: float | None = None

    def want(self, now: float) -> bool:
        """Say that pieces need a source; returns whether to ask now."""
        if self.waiting:
            return False
        self.at = now if self.at is None else self.at
        return now >= self.at

    def rest(self) -> None:
        """Say that no piece needs a source any more: what was to be asked again need not be."""
        self.at = None

    def asked(self, now: float) -> None:
        """The question goes out."""
        self.at, self.sent, self.waiting = None, now, True
        self.count += 1

    def answered(self, answer: PlanAnswer) -> None:
        """The answer came, or what stands for none."""
        self.waiting = False
        is_none = isinstance(answer, Refusal) and answer.error == NO_ANSWER
        self.unanswered = answer.reason if is_none and isinstance(answer, Refusal) else None

    def kept_back(self) -> None:
        """The question waits for others of this agent: its time begins with `goes_out`."""
        self.sent = NEVER

    def goes_out(self, now: float) -> None:
        """The question that was kept back goes out now."""
        self.sent = now

    @property
    def is_out(self) -> bool:
        """Whether a question is on its way, and not kept back."""
        return self.waiting and self.sent != NEVER

    def is_silent(self, now: float) -> bool:
        """Tell whether the answer is overdue."""
        return self.waiting and now >= self.sent + PLAN_S_MAX

    def planned(self) -> None:
        """There are sources."""
        self._dry_since = None

    def progressed(self) -> None:
        """Bytes have come: the next refusal is the first one."""
        self._again_s = PLAN_AGAIN_S
        self.log_counts_holder = False

    def refused(self, refusal: Refusal, trust: Exclusions, lost_s: float, now: float) -> bool:
        """Ask again later, or forgive sources that the read left out; False when there is nothing to wait for.

        `lost_s`: how long there may be no source where the planner can't say whether the log counts a holder.
        """
        if refusal.error == NO_ANSWER:
            self.at = now + PLAN_AGAIN_S
            return True
        self.log_counts_holder = bool(refusal.is_held)
        if refusal.is_held is not False and trust.readmit_suspects():
            # No time is set since the question went out, so it is asked again at once.
            return True
        if refusal.is_held:
            self.at = now + self._again_s
            self._again_s = min(2 * self._again_s, PLAN_AGAIN_S_MAX)
            return trust.readmit_failed()
        self._dry_since = now if self._dry_since is None else self._dry_since
        self.at = now + PLAN_AGAIN_S
        return refusal.is_held is None and now - self._dry_since < lost_s

    def deadline(self) -> float | None:
        """Say when time matters."""
        if not self.waiting:
            return self.at
        return self.sent + PLAN_S_MAX if self.is_out else None
