"""Spans that are made a little later than what they tell of, so that the hot path makes none."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final
from weakref import WeakSet

from tensorhub_common.observability.span_cost import SPAN_CPU
from tensorhub_common.runtime.supervision import Supervisor, log_only

SPAN_ID_BITS: Final = 64
TRACE_ID_BITS: Final = 128

SOON_S: Final = 0.5
"""So long after a story's end its spans are made, with those of all that have ended since."""


LATER_S: Final = 2.0
"""Where stories end all the time, their spans are made so seldom: waking up would cost more than the spans. Who asks a
process for its spans gets them all the same (`flush_deferred_spans`)."""


_TURN: Final = "making spans"


TURN_STORIES_MAX: Final = 4
"""The spans of this many stories are made in one turn of the event loop, which takes some tenths of a millisecond."""


STORIES_MAX: Final = 1024
"""Limit of finished stories that wait for their spans; the oldest are dropped."""


# Of its own: a program that seeds `random`, as trainers do, gets the numbers that it expects, and other ids than the
# next one with the same seed.
_chance: Final = Random()  # noqa: S311 (an id is no secret)
os.register_at_fork(after_in_child=_chance.seed)
random_bits: Final = _chance.getrandbits
"""Draws ids, in a child that was forked other ones than in its parent."""


MakeSpans = Callable[[], None]
"""Makes the spans of what is over."""


def new_span_id() -> str:
    """Return an id that no other span has."""
    return f"{random_bits(SPAN_ID_BITS) or 1:016x}"


def new_trace_id() -> str:
    """Return an id that no other trace has."""
    return f"{random_bits(TRACE_ID_BITS) or 1:032x}"


_waiting: Final[WeakSet["DeferredSpans"]] = WeakSet()


def flush_deferred_spans() -> None:
    """Make the spans of all stories of the running event loop that have ended."""
    loop = asyncio.get_running_loop()
    for each in list(_waiting):
        if each.is_of(loop):
            each.flush()


class DeferredSpans:
    """Finished stories that wait for their spans. It belongs to the event loop that made it."""

    def __init__(self, after_all: Callable[[], None] | None = None) -> None:
        """Begin with none. `after_all` is called when the spans of all stories up to now have been made."""
        self._loop = asyncio.get_running_loop()
        self._work = Supervisor("the spans of finished stories", on_fault=log_only)
        self._after_all = after_all
        _waiting.add(self)
        self._stories: deque[MakeSpans] = deque(maxlen=STORIES_MAX)
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = -LATER_S

    def add(self, story: MakeSpans) -> None:
        """Make the spans of a story a little later."""
        self._stories.append(story)
        if self._timer is None:
            at = max(self._loop.time() + SOON_S, self._told_at + LATER_S)
            self._timer = self._work.call_at(at, self._next_turn, what=_TURN)

    def flush(self) -> None:
        """Make all of them now: the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._stories:
            self._turn()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether it belongs to this event loop."""
        return self._loop is loop

    def _next_turn(self) -> None:
        self._timer = None
        self._turn()
        if self._stories:
            self._timer = self._work.call_later(0, self._next_turn, what=_TURN)
        else:
            self._told_at = self._loop.time()

    def _turn(self) -> None:
        with SPAN_CPU.counted():
            for _ in range(min(TURN_STORIES_MAX, len(self._stories))):
                self._tell(self._stories.popleft())
            if self._after_all is not None and not self._stories:
                self._after_all()

    def _tell(self, story: MakeSpans) -> None:
        try:
            story()
        except Exception as error:  # noqa: BLE001 (whatever a story or somebody's processor does, the process goes on)
            self._work.fault(_TURN, error)
