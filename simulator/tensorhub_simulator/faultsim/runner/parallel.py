"""Many seeds on all cores: a few at a time in processes of their own, and what they amount to together.

Always true: of several seeds that broke something the lowest is told, so a run on many cores says what a run on one
core says.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tensorhub_simulator.faultsim.mutants.planting import planted
from tensorhub_simulator.faultsim.runner.run import Failure, Totals, run
from tensorhub_simulator.faultsim.runner.transitions import Tallies, counted

CHUNK_SEEDS: Final = 8
"""One process takes this many seeds at a time: few enough to see progress, and to stop soon after a failure."""
AHEAD_PER_PROCESS: Final = 2
"""This many chunks wait or run for each process at most."""
PROCESSES_MAX: Final = 16

Advance = Callable[[int], None]


@dataclass(slots=True)
class Result:
    """What some seeds came to."""

    failure: Failure | None = None
    totals: Totals = field(default_factory=Totals)
    tallies: Tallies = field(default_factory=dict)

    def add(self, other: "Result") -> None:
        """Take in what other seeds came to."""
        if other.failure is not None and (self.failure is None or other.failure.seed < self.failure.seed):
            self.failure = other.failure
        self.totals.merge(other.totals)
        for name, tally in other.tallies.items():
            if name in self.tallies:
                self.tallies[name].add(tally)
            else:
                self.tallies[name] = tally


def spread(seeds: Sequence[int], *, bug: str | None, calm: bool, processes: int, title: str) -> Result:
    """Run seeds until one breaks an invariant, or to their end."""
    result = Result()
    chunks = (seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS))
    with _progress(title, len(seeds)) as advance, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        under_way: dict[Future[Result], int] = {}
        while True:
            room = AHEAD_PER_PROCESS * processes - len(under_way) if result.failure is None else 0
            for chunk in islice(chunks, room):
                under_way[pool.submit(work, chunk, bug, calm=calm)] = chunk[0]
            if result.failure is not None:
                # Lower seeds may still fail; higher ones don't matter any more.
                _drop(under_way, result.failure.seed)
            if not under_way:
                return result
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                del under_way[done]
                part = done.result()
                result.add(part)
                advance(part.totals.seeds)


def _drop(under_way: dict[Future[Result], int], above: int) -> None:
    for future in [future for future, first in under_way.items() if first > above and future.cancel()]:
        del under_way[future]


def work(seeds: Sequence[int], bug: str | None, *, calm: bool) -> Result:
    """Run some seeds in this process."""
    totals = Totals()
    with counted() as tallies, planted(bug):
        failure = run(seeds, totals, calm=calm)
    return Result(failure, totals, tallies)


def processes_here() -> int:
    """Return how many processes are of use on this machine."""
    return min(len(os.sched_getaffinity(0)), PROCESSES_MAX)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Advance]:
    """Show how far it is, if somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)
