"""Virtual time, and processes that can be killed or stopped.

All that happens in a simulated world is an action at a time, taken from one heap; ties are broken by the order in which
the actions were planned. So one seed gives one history.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

Action = Callable[[], None]

QUICK_S: Final = 0.004
"""Most messages take up to this long."""


@dataclass(slots=True)
class State:
    """What a process is in all of its jobs alike."""

    paused: bool = False
    slept_s: float = 0.0
    stops: int = 0
    """How often it was stopped."""
    cut_off: bool = False
    """It does not reach NATS."""
    left: bool = False
    """It is away, and no process waits for it."""
    rate: float = 1.0
    offset_s: float = 0.0
    """How fast its own clock goes, and how far it is ahead."""


class Node:
    """A process, or what it does in one job. What it planned dies with it, and waits while it is stopped (SIGSTOP)."""

    clock: "Clock"

    def __init__(self, name: str, messages: Random) -> None:
        """Begin down, before the first life. `messages`: how long what it sends takes, and what of it is lost."""
        self.name, self.messages = name, messages
        self.life = 0
        self.up = False
        self.state = State()
        self.backlog: list[tuple[int, Action]] = []
        self.family: list[Any] = [self]
        """What the same process does in each of its jobs; a kill or a start of the first one is one of all."""

    def join_family(self, first: "Node") -> None:
        """Be what another node's process does in another job."""
        self.state, self.family = first.state, first.family
        self.family.append(self)

    @property
    def now(self) -> float:
        """What its own clock says: no two of a world need agree."""
        return self.clock.now * self.state.rate + self.state.offset_s

    def jump(self, by_s: float) -> None:
        """Let its clock jump forward, as it does where a whole machine was stopped."""
        self.state.offset_s += by_s
        self.state.slept_s += by_s

    @property
    def runs(self) -> bool:
        """Whether it does something now."""
        return self.up and not self.state.paused

    def lag(self) -> float:
        """Return how long its next message takes: mostly quick, sometimes not."""
        rng = self.messages
        dice = rng.random()
        if dice < 0.9:  # noqa: PLR2004 (odds)
            return rng.random() * QUICK_S
        if dice < 0.99:  # noqa: PLR2004 (odds)
            return rng.random() * 0.06
        return rng.random() * 0.8

    def happens(self, odds: float) -> bool:
        """Draw whether something happens to a message of this process."""
        return self.messages.random() < odds


class Clock:
    """The time and the plan."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.now = 0.0
        self.steps = 0
        self._heap: list[tuple[float, int, Node | None, int, Action]] = []
        self._planned = 0

    def after(self, delay_s: float, node: Node | None, action: Action, life: int | None = None) -> None:
        """Plan an action; one of a node's happens only in the node's present life, or in the one that is named."""
        self._planned += 1
        if life is None:
            life = node.life if node is not None else 0
        heapq.heappush(self._heap, (self.now + delay_s, self._planned, node, life, action))

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is planned."""
        while self._heap:
            when, _, node, life, action = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            if node is not None and (node.life != life or not node.up):
                continue
            if node is not None and node.state.paused:
                node.backlog.append((life, action))
                continue
            self.steps += 1
            action()
            return True
        return False

    def resume(self, node: Node) -> None:
        """Let a stopped node go on with all that came meanwhile."""
        node.state.paused = False
        for each in node.family:
            backlog, each.backlog = each.backlog, []
            for life, action in backlog:
                if life == each.life:
                    self.after(0.0, each, action)
