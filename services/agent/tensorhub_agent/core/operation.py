"""The interface of a call in progress on a shard; each module of `operations` has one. Pure."""

from typing import Protocol

from tensorhub_agent.core.effects import AnyCall, EffectOutcome
from tensorhub_common.protocol.log.events import AnyEvent


class Operation(Protocol):
    """A call under way. It ends by `core.finish`."""

    @property
    def call(self) -> AnyCall:
        """What the worker asked for."""

    @property
    def reached(self) -> bool:
        """Whether the operation has got so far that it goes on though its worker is gone."""

    def start(self, now: float) -> None:
        """Begin; may end at once."""

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take an event about this shard's replica, or an answer to what was said."""

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what came of an effect."""

    def on_readers_gone(self, now: float) -> None:
        """Take note that the shard's last reader went."""

    def tick(self, now: float) -> None:
        """Let time pass."""

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""

    def abandon(self, now: float) -> None:
        """Take note that the worker is gone; only called while `reached` is False."""

    def restart(self, now: float) -> None:
        """Take note that the agent has joined anew under a higher incarnation."""


class UnattendedOperation:
    """An operation that goes on to its end though its worker is gone."""

    reached = True

    def abandon(self, now: float) -> None:
        """Go on."""


class DetachedOperation(Protocol):
    """What goes on of a call whose caller was told that the log is silent, until the log has said what became of it.

    It ends by `core.settled`. The next call of its kind takes its place.
    """

    @property
    def excludes(self) -> str | None:
        """Say why no call of another kind may begin meanwhile; None: any may."""

    def on_event(self, event: AnyEvent, now: float) -> None:
        """Take an event about this shard's replica, or an answer to what was said."""

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what came of an effect."""

    def on_readers_gone(self, now: float) -> None:
        """Take note that the shard's last reader went."""

    def tick(self, now: float) -> None:
        """Let time pass."""

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""

    def restart(self, now: float) -> None:
        """Take note that the agent has joined anew under a higher incarnation."""
