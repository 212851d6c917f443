"""What a leader measures of a model's steps for seeding (NSDI'26, Algorithm 1): the half of remote instances. Pure.

A step ends where the trainer publishes the next version. Remote instances are all but the trainer's own.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class RemoteStep:
    """One step that has ended. Times in seconds."""

    version: int
    """The version whose publication ended it."""
    whole_s: float
    remote_s: float
    """From its beginning to the last token of a remote instance."""
    last_token_at: float
    """When its last token of a remote instance came."""
    instances: int
    """Remote ones, at its end."""
    is_steady: bool
    """Whether no remote instance came or went."""

    @property
    def remote_wait_s(self) -> float:
        """From the last remote token to the end."""
        return self.whole_s - self.remote_s


@dataclass(slots=True)
class StepMeter:
    """The steps of one model, as one leader sees them: what began before it does not count."""

    began_at: float | None = None
    last_token_at: float = 0.0
    """When a remote instance last sent tokens."""
    last: RemoteStep | None = None
    """The last step that was seen whole."""
    _remote: frozenset[str] = field(default_factory=frozenset)
    _is_steady: bool = True

    @property
    def instances(self) -> int:
        """How many remote instances there are now."""
        return len(self._remote)

    def see_fleet(self, remote: frozenset[str]) -> None:
        """Note which remote instances there are."""
        if remote != self._remote:
            self._remote, self._is_steady = remote, False

    def end(self, version: int, now: float) -> None:
        """End the step: a version was published. The next one begins."""
        if self.began_at is not None:
            remote_s = max(0.0, self.last_token_at - self.began_at)
            self.last = RemoteStep(
                version, now - self.began_at, remote_s, self.last_token_at, self.instances, self._is_steady
            )
        self.began_at, self._is_steady = now, True
