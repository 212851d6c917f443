"""The instances that one leader has heard of: who is there, who is silent, and how fast each is. Pure.

Invariants: silence counts only while this leader was connected and running, and from when it began to listen. So no
instance is lost for what the leader could not hear. Who is remote, and when the first may be lost, is kept as a walk
through all instances would find it: in a large fleet a leader that walked at each look would do little else.
"""

import math
from collections import Counter
from collections.abc import Iterator

from tensorhub_rollout.core.instance import Instance


class Fleet:
    """All instances of a job."""

    def __init__(self, now: float, *, silence_s: float, stall_s: float, gather_s: float) -> None:
        """Know no instance yet, and begin to listen. The bounds are those of `LeaderLimits`."""
        self.instances: dict[str, Instance] = {}
        """By runner."""
        self.has_gathered = False
        """Whether the first window is over, and all who were heard in it have reported what they hold."""
        self._silence_s, self._stall_s, self._gather_s = silence_s, stall_s, gather_s
        self._is_connected = True
        self._now = self._listening_since = self._rated_at = now
        self._gathered_at = now + gather_s
        self._lost_at = now
        """No instance is silent, or stalls, before."""
        self.changes = 0
        """How often something of an instance was otherwise than policies saw it, beside its requests."""
        self._remote: dict[str, frozenset[str]] = {}
        """By model, until an instance changes: the runners that are not the trainer's own, and stay."""

    # ------------------------------------------------------------------------------------------ listening

    def note_time(self, now: float) -> None:
        """Note that this leader runs. Where it did not for a while, that it heard nothing says nothing."""
        was_away = now - self._now > self._silence_s / 2
        self._now = now
        if was_away:
            self._listen_anew()

    def note_connection(self, *, is_connected: bool) -> None:
        """Note that the connection to NATS came or went."""
        self._is_connected = is_connected
        self._listen_anew()

    def _listen_anew(self) -> None:
        """Begin a whole window of silence anew, and of gathering if that was not over."""
        if not self.has_gathered:
            self._gathered_at = self._now + self._gather_s
        self._listening_since = self._now

    def gather(self) -> bool:
        """End the first window where it is over and no report is missing; tell whether it ended just now."""
        if self.has_gathered or not self._is_connected or self._now < self._gathered_at:
            return False
        self.has_gathered = all(each.has_reported for each in self.instances.values())
        return self.has_gathered

    def silent(self) -> Iterator[tuple[Instance, str]]:
        """Yield the instances that are lost, with the reason. The caller may remove them meanwhile."""
        if not self._is_connected or self._now < self._lost_at:
            return
        # What is heard later is silent later.
        self._lost_at = self._now + min(self._silence_s, self._stall_s)
        for instance in [*self.instances.values()]:
            heard_at = max(instance.heard_at, self._listening_since)
            stepped_at = max(instance.stepped_at, self._listening_since)
            self._lost_at = min(self._lost_at, heard_at + self._silence_s, stepped_at + self._stall_s)
            if self._now - heard_at >= self._silence_s:
                yield instance, f"it was silent for {self._silence_s:g} s"
            elif instance.attempts and self._now - stepped_at >= self._stall_s:
                yield instance, f"its engine made no step for {self._stall_s:g} s"

    def note_silence(self, runner: str) -> None:
        """Take an instance for silent, whenever it was heard: a simulation knows it without its heartbeats."""
        instance = self.instances.get(runner)
        if instance is not None:
            instance.heard_at = self._lost_at = -math.inf

    # ------------------------------------------------------------------------------------------ who is there

    def known(self, runner: str, incarnation: int) -> Instance | None:
        """Return the instance if this is its incarnation on record, and note that it lives."""
        instance = self.instances.get(runner)
        if instance is None or instance.incarnation != incarnation:
            return None
        instance.heard_at = self._now
        return instance

    def heard(self, runner: str, incarnation: int) -> Instance:
        """Return the instance of a runner that says something, and note that it lives.

        Whatever it says first makes it known, so that a new leader waits for its report.
        """
        instance = self.instances.get(runner)
        if instance is None:
            instance = Instance(runner, incarnation, self._now, stepped_at=self._now, checkpointed_at=self._now)
            self.instances[runner] = instance
            self.note_changed(instance)
        instance.heard_at = self._now
        return instance

    def remove(self, runner: str) -> bool:
        """Forget an instance; tell whether it was there."""
        instance = self.instances.pop(runner, None)
        if instance is not None:
            self.note_changed(instance)
        return instance is not None

    def note_changed(self, instance: Instance) -> None:
        """Note that something of an instance is otherwise than policies saw it, beside its requests."""
        instance.shown = None
        self.changes += 1
        self._remote.clear()

    def models(self) -> set[str]:
        """Return the models that instances run."""
        return {each.model for each in self.instances.values()}

    def of_model(self, model: str) -> list[Instance]:
        """Return the instances that run a model."""
        return [each for each in self.instances.values() if each.model == model]

    def serving(self) -> dict[str, int]:
        """Return by model how many instances take requests."""
        return Counter(each.model for each in self.instances.values() if each.takes_more)

    def remote_of(self, model: str) -> frozenset[str]:
        """Return the runners of a model that are not the trainer's own, and stay."""
        if model not in self._remote:
            remote = (each for each in self.of_model(model) if not each.is_local and not each.is_leaving)
            self._remote[model] = frozenset(each.runner for each in remote)
        return self._remote[model]

    def check(self) -> None:
        """Raise AssertionError where what is kept is not what the instances say."""
        kept, self._remote = self._remote, {}
        for model, remote in kept.items():
            assert remote == self.remote_of(model)

    # ------------------------------------------------------------------------------------------ from time to time

    def count_rates(self, every_s: float) -> bool:
        """Count each instance's tokens per second, where that was last done so long ago; tell whether it was done."""
        seconds = self._now - self._rated_at
        if seconds < every_s:
            return False
        self._rated_at = self._now
        for instance in self.instances.values():
            instance.tokens_per_s = (instance.tokens - instance.tokens_rated) / seconds
            instance.tokens_rated = instance.tokens
        return True

    def due_to_checkpoint(self, every_s: float) -> list[Instance]:
        """Return the instances whose last checkpoint is so long ago, the longest first."""
        last = self._now - every_s
        due = [each for each in self.instances.values() if each.checkpointed_at <= last]
        return sorted(due, key=lambda each: each.checkpointed_at)
