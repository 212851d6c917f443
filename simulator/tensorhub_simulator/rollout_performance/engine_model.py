"""An engine in virtual time: how many tokens its requests have, and when the next one ends. Pure.

A step makes one token of each running request and takes `StepModel.seconds`. A prompt, with what its response has
already, is computed before the next step, one after the other, and nothing else runs meanwhile.

Always true: between two calls time moves by whole steps, so that a step that is not over makes no token.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from tensorhub_rollout.policy.plateau import StepModel

Key = TypeVar("Key", bound=Hashable)
_ROUNDING = 1e-9


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one instance can do. Seconds of a step: fixed, for each request, for each context token of each request."""

    fixed_s: float
    each_s: float
    attention_s: float
    prefill_tokens_per_s: float
    slots: int
    """How many requests it runs at once."""

    @property
    def step(self) -> StepModel:
        """How long a step takes."""
        return StepModel(self.fixed_s, self.each_s, self.attention_s)


@dataclass(slots=True)
class _Running:
    left: int
    """Tokens until it ends."""
    context: int
    prefill: float
    """Tokens that are still to be computed before its first one."""


@dataclass(frozen=True, slots=True)
class Made(Generic[Key]):
    """What some steps made: `tokens` of each of `requests`; each step took `step_s`."""

    tokens: int
    requests: tuple[Key, ...]
    ended: frozenset[Key]
    step_s: float


@dataclass(slots=True)
class EngineModel(Generic[Key]):
    """One engine: `begin` and `stop` requests, and `advance` to a time until nothing more comes of it."""

    costs: EngineCosts
    at: float
    """Up to when its steps are counted."""
    running: dict[Key, _Running] = field(default_factory=dict)

    def begin(self, key: Key, context: int, left: int, now: float) -> None:
        """Begin with a request behind `context` tokens, of which nothing is computed; it ends `left` tokens later."""
        if not self.running:
            self.at = now
        self.running[key] = _Running(left, context, float(context))

    def stop(self, key: Key) -> None:
        """Leave a request."""
        self.running.pop(key, None)

    def pause(self, until: float) -> None:
        """Do nothing until then."""
        self.at = max(self.at, until)

    def advance(self, now: float) -> Made[Key] | None:
        """Return what the steps up to `now` have made until the first request ends; None: they made nothing."""
        if not self._prefill(now) or not self.running:
            return None
        ended = frozenset(key for key, each in self.running.items() if each.left <= 0)
        if ended:
            return self._made(0, tuple(ended), ended, 0.0)
        step_s = self._step_s()
        least = min(each.left for each in self.running.values())
        steps = min(least, int((now - self.at) / step_s + _ROUNDING))
        if steps <= 0:
            return None
        self.at += steps * step_s
        for each in self.running.values():
            each.left -= steps
            each.context += steps
        ended = frozenset(key for key, each in self.running.items() if not each.left)
        return self._made(steps, tuple(self.running), ended, step_s)

    def next_at(self) -> float | None:
        """Return when the next request ends, as far as steps take as long as now; None: none runs."""
        if not self.running:
            return None
        prefill_s = sum(each.prefill for each in self.running.values()) / self.costs.prefill_tokens_per_s
        return self.at + prefill_s + max(0, min(each.left for each in self.running.values())) * self._step_s()

    def _step_s(self) -> float:
        contexts = sum(each.context for each in self.running.values())
        return self.costs.step.seconds(len(self.running), contexts / len(self.running))

    def _prefill(self, now: float) -> bool:
        """Compute prompts; tell whether all are."""
        for each in self.running.values():
            if each.prefill:
                done = min(each.prefill, max(0.0, now - self.at) * self.costs.prefill_tokens_per_s)
                each.prefill -= done
                self.at += done / self.costs.prefill_tokens_per_s
                if each.prefill > _ROUNDING:
                    return False
                each.prefill = 0.0
        return True

    def _made(self, tokens: int, requests: tuple[Key, ...], ended: frozenset[Key], step_s: float) -> Made[Key]:
        for key in ended:
            del self.running[key]
        return Made(tokens, requests, ended, step_s)
