"""An engine in virtual time: how many tokens its requests have, and when the next one ends. Pure.

A step makes one token of each running request and takes `StepModel.seconds`. A prompt, with what its response has
already, is computed before the next step, one after the other, and nothing else runs meanwhile.

Where `EngineCosts.kv_tokens` is a limit, requests begin in their order as far as their contexts fit. When the next
step's tokens don't, the request that began last goes to the front of those that wait, and all of it is computed again
when it fits: as vLLM's scheduler preempts by recomputation. Nothing else begins before it.

Always true: between two calls time moves by whole steps, so that a step that is not over makes no token; and how often
it is looked at changes nothing. With a limit, contexts never have more tokens than that.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts

Key = TypeVar("Key", bound=Hashable)
_ROUNDING = 1e-9
"""Of a step: what is whole but for rounding is whole."""


@dataclass(slots=True)
class _Request:
    left: int
    """Tokens until it ends; while it runs, when it began to."""
    context: int
    """The same."""
    number: int
    """The order in which requests came."""
    ends_at: int = 0
    """While it runs: after which step of the engine it ends."""
    begun_at: int = 0
    """While it runs: after which step of the engine it began."""


@dataclass(frozen=True, slots=True)
class Made(Generic[Key]):
    """What some steps made: `tokens` of each of `requests`; the first step took `step_s`."""

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
    running: dict[Key, _Request] = field(default_factory=dict)
    waiting: deque[Key] = field(default_factory=deque)
    """Requests for which there is no memory yet."""
    preempted: int = 0
    """How often one that ran had to be put back."""
    _held: dict[Key, _Request] = field(default_factory=dict)
    """Of those that wait."""
    _steps: int = 0
    _base: int = 0
    """The contexts of all that run, less the steps that the engine had made when each began."""
    _prefills: dict[Key, float] = field(default_factory=dict)
    """Context tokens that are to be computed before the next step, in this order."""
    _ends: list[tuple[int, int, Key]] = field(default_factory=list)
    """A heap of (after which step, number, request); one that was stopped stays in it."""
    _number: int = 0

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.running or self.waiting)

    def begin(self, key: Key, context: int, left: int, now: float) -> None:
        """Begin with a request behind `context` tokens, of which nothing is computed; it ends `left` tokens later."""
        if not self.has_work:
            self.at = max(self.at, now)
        self.stop(key)
        self._number += 1
        self._held[key] = _Request(left, context, self._number)
        self.waiting.append(key)
        self._admit()

    def stop(self, key: Key) -> None:
        """Leave a request."""
        if self._leave(key) is None and self._held.pop(key, None) is not None:
            self.waiting.remove(key)
        self._admit()

    def pause(self, until: float) -> None:
        """Do nothing until then."""
        self.at = max(self.at, until)

    def advance(self, now: float) -> Made[Key] | None:
        """Return what the steps up to `now` have made until the first request ends; None: they made nothing."""
        while self.running and self._computed(now):
            least = self._least()
            if least <= 0:
                return self._made(0, self._step_s())
            if self._room() <= 0:
                self._preempt()
                continue
            step_s = self._step_s()
            steps = min(least, self._room(), self._steps_in(now - self.at))
            if steps <= 0:
                return None
            self.at += self._seconds(steps)
            self._steps += steps
            return self._made(steps, step_s)
        return None

    def next_at(self) -> float | None:
        """Return when the next request ends, or has to make room; None: none runs."""
        if not self.running:
            return None
        steps = max(0, min(self._least(), self._room()))
        return self.at + sum(self._prefills.values()) / self.costs.prefill_tokens_per_s + self._seconds(steps)

    def next_step_at(self) -> float:
        """Return when the next step ends of what runs, all prompts computed."""
        return self.at + sum(self._prefills.values()) / self.costs.prefill_tokens_per_s + self._step_s()

    # ------------------------------------------------------------------------------------------ steps

    @property
    def contexts(self) -> int:
        """Return how many context tokens all have together that run."""
        return self._base + len(self.running) * self._steps

    def _step_s(self) -> float:
        return self.costs.fixed_s + len(self.running) * self.costs.each_s + self.costs.attention_s * self.contexts

    def _seconds(self, steps: int) -> float:
        """Return how long the next steps take: in each, every context has one token more."""
        return steps * self._step_s() + self.costs.attention_s * len(self.running) * steps * (steps - 1) / 2

    def _steps_in(self, seconds: float) -> int:
        """Return how many whole steps fit, in closed form."""
        first, more = self._step_s(), self.costs.attention_s * len(self.running)
        seconds += _ROUNDING * first
        if seconds < first:
            return 0
        half = first - more / 2
        steps = int(2 * seconds / (half + math.sqrt(half * half + 2 * more * seconds)))
        # The root is rounded.
        while self._seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self._seconds(steps) > seconds:
            steps -= 1
        return steps

    def _least(self) -> int:
        """Return how many steps there are until the first request ends."""
        while True:
            ends_at, number, key = self._ends[0]
            found = self.running.get(key)
            if found is not None and found.number == number and found.ends_at == ends_at:
                return ends_at - self._steps
            heappop(self._ends)

    def _computed(self, now: float) -> bool:
        """Compute prompts; tell whether all are."""
        while self._prefills:
            key, tokens = next(iter(self._prefills.items()))
            done = min(tokens, max(0.0, now - self.at) * self.costs.prefill_tokens_per_s)
            self.at += done / self.costs.prefill_tokens_per_s
            if tokens - done > _ROUNDING:
                self._prefills[key] = tokens - done
                return False
            del self._prefills[key]
        return True

    def _made(self, tokens: int, step_s: float) -> Made[Key]:
        requests, ended = tuple(self.running), []
        while self._ends and self._ends[0][0] <= self._steps:
            _, number, key = heappop(self._ends)
            found = self.running.get(key)
            if found is not None and found.number == number and found.ends_at <= self._steps:
                self._leave(key)
                ended.append(key)
        if ended:
            self._admit()
        return Made(tokens, requests, frozenset(ended), step_s)

    # ------------------------------------------------------------------------------------------ memory

    def _room(self) -> int:
        """Return how many steps there is memory for."""
        limit = self.costs.kv_tokens
        return 1 << 60 if limit is None else (limit - self.contexts) // len(self.running)

    def _admit(self) -> None:
        """Begin with those that wait, in their order, as far as their contexts and the next step's tokens fit."""
        limit = self.costs.kv_tokens
        while self.waiting:
            found = self._held[self.waiting[0]]
            if limit is not None and self.running and self.contexts + found.context + len(self.running) >= limit:
                return
            key = self.waiting.popleft()
            self.running[key] = self._held.pop(key)
            found.begun_at, found.ends_at = self._steps, self._steps + found.left
            self._base += found.context - self._steps
            self._prefills[key] = float(found.context)
            heappush(self._ends, (found.ends_at, found.number, key))

    def _preempt(self) -> None:
        """Put the request back that began last, unless it runs alone: that always may."""
        key = next(reversed(self.running))
        assert len(self.running) > 1, f"{key} has more context tokens than there is memory for"
        found = self._leave(key)
        assert found is not None
        made = self._steps - found.begun_at
        found.left, found.context = found.left - made, found.context + made
        self.preempted += 1
        self._held[key] = found
        self.waiting.appendleft(key)

    def _leave(self, key: Key) -> _Request | None:
        found = self.running.pop(key, None)
        if found is not None:
            self._base -= found.context - found.begun_at
            self._prefills.pop(key, None)
        return found


def ends_s(lengths: Sequence[int], prompt: int, costs: EngineCosts) -> float:
    """Return when an engine has made responses of these lengths that all begin at once."""
    engine = EngineModel[int](costs, 0.0)
    for number, length in enumerate(lengths):
        engine.begin(number, prompt, length, 0.0)
    while (ends := engine.next_at()) is not None:
        engine.advance(ends)
    return engine.at
