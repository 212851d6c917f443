"""Running seeds one after the other, with production's limits scaled down to the simulation's few bytes."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

from tensorhub_common.catalog import availability, cache_replicas
from tensorhub_common.layout import layout
from tensorhub_planner.compiler import overlaps
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim import mutants
from tensorhub_simulator.faultsim.drawing import config_of
from tensorhub_simulator.faultsim.world import World

SCALED: Final[tuple[tuple[ModuleType, str, float], ...]] = (
    (cache_replicas, "SHUN_S", 3.0),
    (layout, "ALIGNMENT_BYTES", 4),
    (layout, "PIECE_BYTES_MAX", 20),  # A matrix has several pieces,
    (overlaps, "PIECE_BYTES_MAX", 16),  # and a box several units, which reach across those.
    (availability, "VERSIONS_KEPT_MAX", 6),  # The catalog forgets, too.
)
"""Constants of the catalog, layouts and the planner, and their values in a world of a few bytes and seconds."""

MUTANTS: Final = str(Path(mutants.__file__).parent)


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant, and its story."""

    seed: int
    invariant: str
    what: str
    story: tuple[str, ...]


@dataclass(slots=True)
class Totals:
    """What the seeds amounted to: what the observations of their worlds count, by name."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        """Count a seed's world."""
        self.seeds += 1
        self.steps += world.clock.steps
        for run in world.jobs:
            self.counts.update(run.job.counts)

    def group(self, name: str) -> Counter[str]:
        """Return the counts of a group, by the names in it."""
        begin = f"{name}: "
        return Counter({key.removeprefix(begin): count for key, count in self.counts.items() if key.startswith(begin)})

    def merge(self, other: "Totals") -> None:
        """Count the worlds that another process has counted."""
        self.seeds, self.steps = self.seeds + other.seeds, self.steps + other.steps
        self.seconds += other.seconds
        self.counts.update(other.counts)


@contextmanager
def scaled_down() -> Iterator[None]:
    """Scale production's constants down while this lasts."""
    before = [(module, name, getattr(module, name)) for module, name, _ in SCALED]
    try:
        for module, name, value in SCALED:
            setattr(module, name, value)
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def run(seeds: Iterable[int], totals: Totals, *, calm: bool = False, steps: bool = False) -> Failure | None:
    """Run seeds until one breaks an invariant; returns that, or None."""
    began = time.monotonic()
    failure = None
    with scaled_down():
        for seed in seeds:
            failure = _run_one(seed, totals, calm=calm, steps=steps)
            if failure is not None:
                break
    totals.seconds += time.monotonic() - began
    return failure


def _run_one(seed: int, totals: Totals, *, calm: bool, steps: bool) -> Failure | None:
    world = World(seed, config_of(seed, calm=calm), steps=steps)
    try:
        world.run()
    except Violation as why:
        return Failure(seed, why.invariant, why.what, tuple(world.transcript))
    except Exception as why:
        if isinstance(why, AttributeError) and _innermost(why)[0].startswith(MUTANTS):
            # The planted bug itself is out of date: that finds nothing.
            raise
        invariant = "a core's own check" if isinstance(why, AssertionError) else type(why).__name__
        return Failure(seed, invariant, f"{_place(why)}: {why}", tuple(world.transcript))
    finally:
        totals.add(world)
    if steps:
        print("\n".join(world.transcript))
    return None


def _innermost(why: Exception) -> tuple[str, int]:
    """Return the file and the line that raised."""
    trace = why.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ("nowhere", 0)


def _place(why: Exception) -> str:
    """Name the file and line that raised."""
    file, number = _innermost(why)
    return f"{file.rpartition('/')[2]}:{number}"
