"""The log of a simulated job: entries are folded as they are appended, and one manager leads."""

from collections.abc import Callable
from typing import Final

from tensorhub_common.protocol.rollout.entries import AnyEntry, Attach, Lead, Payload, PolicyName, SdkSender
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.outcomes import Attached, Outcome
from tensorhub_rollout.log.state import RolloutState

MODEL: Final = "policy"


class JobLog:
    """One log; what comes of each entry is told once it is folded."""

    def __init__(self, told: Callable[[Outcome], None]) -> None:
        """Begin with a manager that leads."""
        self.state = RolloutState("job")
        self.attachment = 0
        """Where its trainer has attached."""
        self._told = told
        self._seq = 1
        self._sent = self._payloads = 0
        fold(self.state, self._seq, Lead(1, "manager"))

    def attach(self, policy: PolicyName) -> None:
        """Have the trainer attach, with the policy that it asks for."""
        self.append(Attach("main", MODEL, 0, "nonce", policy))

    def append(self, entry: AnyEntry) -> None:
        """Fold an entry, and tell what comes of it."""
        self._seq += 1
        outcome = fold(self.state, self._seq, entry).outcome
        if isinstance(outcome, Attached):
            self.attachment = self._seq
        self._told(outcome)

    def sender(self) -> SdkSender:
        """Return the sender of the trainer's next entry."""
        self._sent += 1
        return SdkSender(self.attachment, self._sent)

    def payload(self, size: int) -> Payload:
        """Return a payload of so many bytes that is like no other."""
        self._payloads += 1
        return Payload(f"{self._payloads:064x}", size)
