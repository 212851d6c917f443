"""An agent's number, as `incarnation.py` keeps it: higher each time, unless its disk was lost."""

from tensorhub_simulator.engine.clock import Clock


class Numbers:
    """The present number of a process."""

    def __init__(self, clock: Clock) -> None:
        """Begin with none."""
        self.clock = clock
        self.number = 0
        self.lost = False
        """The number may be lower than one that was used before."""
        self._step = 1
        self._used: set[int] = set()

    def next(self) -> None:
        """Take a higher one."""
        self.number += self._step * self.clock.rng.choice((1, 1, 2, 1000))
        self._step *= 2
        # It is the wall clock in milliseconds: after a loss it may be lower, and is still none that was used.
        while self.number in self._used:
            self.number += 1
        self._used.add(self.number)

    def accepted(self) -> None:
        """The log took it."""
        self._step = 1

    def lose(self) -> None:
        """The disk is lost, and with it what was used last."""
        self.number = max(0, self.number - self.clock.rng.choice((0, 1, 500, 5000)))
        self.lost = True
