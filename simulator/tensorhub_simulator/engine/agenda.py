"""Virtual time: actions at times, taken in order; ties go by the order in which they were planned. Pure.

Always true: time never goes back, and equal plans give equal runs.
"""

import heapq
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """What is to happen, and when. `now` is in seconds."""

    def __init__(self) -> None:
        """Begin at zero with nothing to do."""
        self.now = 0.0
        self.steps = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._planned = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing more will happen."""
        return not self._heap

    @property
    def next_at(self) -> float | None:
        """When the next thing happens, if there is one."""
        return self._heap[0][0] if self._heap else None

    def at(self, when: float, action: Action) -> None:
        """Plan an action; one for the past happens at once."""
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Plan an action for later."""
        self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()
        return True


class ServerQueue:
    """One server with a queue: each job takes its time, one after the other, and is answered when it is done."""

    def __init__(self, agenda: Agenda) -> None:
        """Begin idle."""
        self._agenda = agenda
        self._queue: deque[tuple[Callable[[], float], Action]] = deque()
        self._busy = False

    def __len__(self) -> int:
        """Return how many jobs wait."""
        return len(self._queue)

    def serve(self, work: Callable[[], float], done: Action) -> None:
        """Do a job once all before it are done: `work` says how long it takes, and then `done` happens."""
        self._queue.append((work, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._busy = False
            return
        self._busy = True
        work, done = self._queue.popleft()

        def end() -> None:
            done()
            self._next()

        self._agenda.after(work(), end)
