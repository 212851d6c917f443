"""What one event costs a read, by how many sources the read has: `python benchmarks/kernels/many_sources.py`.

    python benchmarks/kernels/many_sources.py [--sources 1,2,8,64] [--rounds 5] [--against FOLDER] [--profile N]

The pure machine alone, driven as a driver does it: after each event it gets a tick, is asked what it wants, and when
it wants to be called. Each source has a layout of its own and brings some units, as each rank of a fully sharded
trainer does; `--alike` lets all of them have the reader's layout instead. No bytes move. `--against` names a folder
with another tree's `tensorhub_agent`: both are measured in turns, each in a process of its own, so that what else the
machine does falls on both, and the ratio is that of two runs of one round.
"""

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.plans import Plan, Share, SourceId

UNITS_OF_EACH: Final = 16
UNITS_LEAST: Final = 4_096
"""Reads of few sources have more units of each."""
UNIT_BYTES: Final = 4 << 20
WINDOW_BYTES: Final = 256 << 20
EVENT_S: Final = 1e-4
"""So much of the machine's time passes with each event."""
EVENTS_LEAST: Final = 4_000
"""Reads of few sources are repeated until there were so many."""


class Read:
    """One read, and the answers to what it wants, oldest first."""

    def __init__(self, sources: int, *, alike: bool) -> None:
        """Ask for nothing yet."""
        self._each = max(UNITS_OF_EACH, UNITS_LEAST // sources)
        units = sources * self._each
        self.now, self.events, self._alike = 0.0, 0, alike
        self.transfer = Transfer(
            version=1,
            root=None,
            nbytes=[UNIT_BYTES] * units,
            verify=False,
            limits=TransferLimits(window_bytes=WINDOW_BYTES),
            first_number=1,
            now=0.0,
            able=self._able,
        )
        self._sources, self._units = sources, units
        self._answers: deque[tuple[str, int, int]] = deque()

    def _able(self, share: Share) -> bytearray | None:
        """Each source gives its own units, or any."""
        if self._alike:
            return None
        marks = bytearray(self._units)
        first = share.source.shard * self._each
        marks[first : first + self._each] = b"\x01" * self._each
        return marks

    def _plan(self) -> Plan:
        shares = tuple(
            Share(
                source=SourceId(f"agent-{shard}", 1, "trainer", shard),
                transport="ucxx",
                pieces=((shard * self._each, self._each),),
                nbytes=self._each * UNIT_BYTES,
                why="",
                layout=None if self._alike else f"layout-{shard}",
            )
            for shard in range(self._sources)
        )
        return Plan(version=1, shares=shares, why="")

    def run(self) -> None:
        """Read all of it."""
        self.transfer.tick(self.now)
        self._take()
        self.transfer.planned(self._plan(), self.now)
        self._take()
        while self.transfer.phase is not TransferPhase.DONE or not self.transfer.quiet:
            if self.transfer.phase is TransferPhase.LEASED:
                self.transfer.start(self.now)
                self._take()
            self._answer(*self._answers.popleft())
            self._take()

    def _answer(self, what: str, number: int, batch: int) -> None:
        transfer = self.transfer
        self.now += EVENT_S
        self.events += 1
        if what == "batch":
            transfer.batch_done(number, batch, b"", self.now)
        elif what == "open":
            transfer.opened(number, b"", self.now)
        elif what == "lease":
            transfer.held(number, b"", self.now)
        elif what == "confirm":
            transfer.confirmed(number, holds=True, now=self.now)
        else:
            transfer.closed(number, self.now)

    def _take(self) -> None:
        self.transfer.tick(self.now)
        actions, answers = self.transfer.take_actions(), self._answers
        answers.extend(("open", number, 0) for number, _ in actions.open)
        if hasattr(actions, "hold"):
            answers.extend(("lease", number, 0) for number, _ in actions.hold)
            answers.extend(("open", number, 0) for number in actions.enter)
        answers.extend(("batch", number, batch) for number, batch, _ in actions.post)
        answers.extend(("confirm", number, 0) for number in actions.confirm)
        answers.extend(("close", number, 0) for number in actions.close)
        self.transfer.deadline()


def measure(sources: int, *, alike: bool) -> tuple[int, float]:
    """Return how many events one read had, and the microseconds that each took."""
    events, took_s, reads = 0, 0.0, 0
    while events < EVENTS_LEAST:
        read = Read(sources, alike=alike)
        gc.collect()
        began = time.process_time()
        read.run()
        took_s += time.process_time() - began
        assert total_count(read.transfer.pool.loose) == 0
        events, reads = events + read.events, reads + 1
    return events // reads, 1e6 * took_s / events


def measured_in(folder: Path | None, sources: int, *, alike: bool) -> tuple[int, float]:
    """Do so in a process of its own, with `tensorhub_agent` of another tree, or of this one."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--once", str(sources), *(["--alike"] if alike else [])]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    events, took_us = said.stdout.split()
    return int(events), float(took_us)


def compare(options: argparse.Namespace) -> None:
    """Print a line for each number of sources."""
    for sources in map(int, options.sources.split(",")):
        here, there, ratios, events = [], [], [], 0
        for _ in range(options.rounds):
            events, took_us = measured_in(None, sources, alike=options.alike)
            here.append(took_us)
            if options.against:
                _, before_us = measured_in(options.against, sources, alike=options.alike)
                there.append(before_us)
                ratios.append(took_us / before_us)
        line = f"{sources:5} sources  {events:6} events  {statistics.median(here):8.1f} us an event"
        line += f"  {events * statistics.median(here) / 1e6:8.3f} s in all"
        if ratios:
            line += f"  before {statistics.median(there):8.1f} us, ratio {statistics.median(ratios):.3f}"
        print(line, flush=True)


def main() -> None:
    """Measure, or profile one read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", default="1,2,4,8,64,256,1024,2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--profile", type=int)
    parser.add_argument("--once", type=int)
    options = parser.parse_args()
    if options.once:
        print(*measure(options.once, alike=options.alike))
    elif options.profile:
        read = Read(options.profile, alike=options.alike)
        with cProfile.Profile() as profile:
            read.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    else:
        compare(options)


if __name__ == "__main__":
    main()
