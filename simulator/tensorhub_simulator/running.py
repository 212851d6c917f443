"""Running seeds one after the other, with production's limits scaled down to the simulation's few bytes."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent import reading
from tensorhub_simulator.memory import Violation
from tensorhub_simulator.setting import draw
from tensorhub_simulator.world import World

BATCH_BYTES: Final = 16
"""So that a read of a few pieces takes several batches."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant, and its story."""

    seed: int
    invariant: str
    what: str
    story: tuple[str, ...]


@dataclass(slots=True)
class Totals:
    """What the seeds amounted to."""

    seeds: int = 0
    steps: int = 0
    commands: int = 0
    events: int = 0
    versions: int = 0
    reads: int = 0
    kills: int = 0
    stops: int = 0
    outages: int = 0
    seconds: float = 0.0
    raised: Counter[str] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        """Count a seed's world."""
        self.seeds += 1
        self.steps += world.clock.steps
        self.commands += world.truth.commands
        self.events += world.truth.events
        self.versions += sum(world.truth.published.values())
        self.reads += world.calls.reads
        self.kills += world.faults.kills
        self.stops += world.faults.stops
        self.outages += world.faults.outages
        self.raised.update(world.calls.raised)


@contextmanager
def scaled_down() -> Iterator[None]:
    """Scale the size of a batch down while this lasts."""
    before = reading.BATCH_BYTES
    setattr(reading, "BATCH_BYTES", BATCH_BYTES)  # noqa: B010 (a constant elsewhere, changed on purpose)
    try:
        yield
    finally:
        setattr(reading, "BATCH_BYTES", before)  # noqa: B010 (as above)


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
    world = World(seed, draw(seed, calm=calm), steps=steps)
    try:
        world.run()
    except Violation as why:
        return Failure(seed, why.invariant, why.what, tuple(world.story))
    except Exception as why:  # noqa: BLE001 (whatever a core raises is found out here)
        return Failure(seed, f"{type(why).__name__} in {_place(why)}", str(why), tuple(world.story))
    finally:
        totals.add(world)
    if steps:
        print("\n".join(world.story))
    return None


def _place(why: Exception) -> str:
    """Name the file and line that raised."""
    trace = why.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
