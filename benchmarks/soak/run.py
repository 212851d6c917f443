"""Thousands of updates in a row over each transport: does anything grow? `python -m benchmarks.soak [--updates 2000]`.

One trainer publishes a small model again and again, one engine fetches each version, and now and then each process is
looked at: memory that is its own, file descriptors, sockets, threads, and what the hub has in shared memory. It goes on
until there were enough updates, and until the longest of `WINDOWS_S` has passed with enough time left to judge. Ends
with 1 if something grew by more than its slack (benchmarks/growth.py).
"""

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks import page
from benchmarks.fleet import Fleet
from benchmarks.llama import shapes
from benchmarks.side_by_side.ours import HOSTS, check_reads
from benchmarks.side_by_side.small import of_hub
from benchmarks.soak.growth import KIB, MIB, SAMPLES_MIN, Growth, first_settled, growth
from tensorhub.local.hub import LocalHub
from tensorhub_agent.transports.ucxx import server
from tensorhub_common.config.segment_names import segment_beginning
from tensorhub_common.config.settings import load
from tensorhub_common.jetstream.stream_log import DUPLICATE_WINDOW_S

MODEL: Final = "soak"
AGENTS: Final = 2
WAIT_S: Final = 30.0

WINDOWS_S: Final[Mapping[str, float]] = {
    "NATS's memory of message ids": DUPLICATE_WINDOW_S,
    "connections that opened no other lease": server.IDLE_S,
}
"""For so long somebody keeps what a run brings, and grows."""

SETTLED_S: Final = 60.0
"""A run goes on for so long after the longest window, however fast its updates are."""

RUN_S_MAX: Final = 3600.0
"""A run that has not had its updates by then fails."""

SAMPLES: Final = 100
"""So often the updates that were asked for are interrupted for a look at everything, by default."""

SAID_EVERY: Final = 50
"""Samples between two lines that say how far it is."""

OF_PROCESS: Final = ("memory", "fds", "sockets", "threads")
OF_HUB: Final = ("shm bytes", "shm files")
_IN_BYTES: Final = ("memory", "shm bytes")
HUB: Final = "hub"

COLLECTING: Final = {"GOGC": "20"}
"""NATS is written in Go, whose heap grows to twice what it keeps before it is swept: too rough a measure of a leak."""


@dataclass(slots=True)
class Samples:
    """Series by process and metric, and after how many updates and seconds each sample was taken."""

    updates: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    series: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, updates: int, at_s: float, sample: Mapping[tuple[str, str], float]) -> None:
        """Take one look."""
        self.updates.append(updates)
        self.at_s.append(at_s)
        for key, value in sample.items():
            self.series.setdefault(key, []).append(value)

    def verdict(self) -> list[Growth]:
        """Judge all."""
        updates = self.updates[self.first_settled :]
        return [
            growth(process, metric, updates, values[self.first_settled :])
            for (process, metric), values in self.series.items()
        ]

    @property
    def first_settled(self) -> int:
        """The number of the first sample that is judged. Raises ValueError when the run was too short."""
        return first_settled(self.at_s, max(WINDOWS_S.values()))


def look(pids: Mapping[str, int], shm_dir: Path, beginning: str) -> dict[tuple[str, str], float]:
    """Take one sample. Raises psutil.NoSuchProcess if one of the processes is gone, for then nothing can be said."""
    found: dict[tuple[str, str], float] = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        found[name, "memory"] = _own_bytes(pid)
        found[name, "fds"] = process.num_fds()
        found[name, "sockets"] = sum(_is_socket(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        found[name, "threads"] = process.num_threads()
    files = [path.stat() for path in shm_dir.glob(f"{beginning}*")]
    found[HUB, "shm bytes"] = sum(each.st_blocks * 512 for each in files)
    found[HUB, "shm files"] = len(files)
    return found


def _own_bytes(pid: int) -> int:
    """Return the memory that belongs to no file, swapped out or not. Pages of files come and go as the kernel likes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["Anonymous"] + kib["Swap"]) * KIB


def _is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except OSError:
        return False  # Closed meanwhile.


async def soak(transport: str, updates: int, every: int, mib: int, environment: Mapping[str, str]) -> Samples:
    """Update so often, and until the windows have passed; return what was seen."""
    samples, hosts = Samples(), min(HOSTS[transport], AGENTS)
    with tempfile.TemporaryDirectory(prefix="tensorhub-soak-") as folder:
        async with (
            await Fleet.start(environment, readers=1) as fleet,
            LocalHub(Path(folder), AGENTS, hosts, environment={**environment, **COLLECTING}) as up,
        ):
            pids = of_hub(up.hub) | fleet.pids
            shm_dir, beginning = load(environment).shm_dir, segment_beginning(Path(folder))
            await fleet.register(up.hub, MODEL, shapes(mib))
            began = time.monotonic()
            for number in itertools.count():
                spent_s = time.monotonic() - began
                if number % every == 0:
                    samples.add(number, spent_s, look(pids, shm_dir, beginning))
                    if len(samples.updates) % SAID_EVERY == 1:
                        print(f"{transport}: {number} updates in {spent_s:.0f} s", file=sys.stderr)
                    if is_enough(number, updates, spent_s):
                        break
                await _update(fleet, transport, first=number == 0)
            await fleet.check_equal()
            if of_hub(up.hub) | fleet.pids != pids:
                raise RuntimeError("a process of the hub has died and was started again, so its samples say nothing")
            await fleet.close()
    return samples


def is_enough(done: int, updates: int, spent_s: float) -> bool:
    """Tell whether a run may end. Raises RuntimeError when it takes too long."""
    if spent_s > RUN_S_MAX:
        raise RuntimeError(f"{done} of {updates} updates took more than {RUN_S_MAX:g} s: ask for fewer")
    return done >= updates and spent_s >= max(WINDOWS_S.values()) + SETTLED_S


async def _update(fleet: Fleet, transport: str, *, first: bool) -> None:
    """Publish the next version while the engine waits for it."""
    if not first:
        await fleet.trainer.ask("unpublish")
    await fleet.trainer.ask("change")
    updating = asyncio.create_task(fleet.readers[0].ask("update", wait_s=WAIT_S))
    published = await fleet.trainer.ask("publish")
    check_reads([await updating], published["version"], transport)


def words(transport: str, samples: Samples, verdict: Sequence[Growth]) -> str:
    """Return the verdict as a table: for each process what it had once settled and at the end."""
    processes = list(dict.fromkeys(each.process for each in verdict))
    by_key = {(each.process, each.metric): each for each in verdict}
    metrics = [*OF_PROCESS, *OF_HUB]
    rows = [(process, *(_cell(by_key.get((process, metric))) for metric in metrics)) for process in processes]
    grown = [each for each in verdict if not each.is_bounded]
    said = [
        f"**{each.process}: {each.metric} grew by {_amount(each.metric, each.grown)}**, more than "
        f"{_amount(each.metric, each.slack)}."
        for each in grown
    ]
    first = samples.first_settled
    head = (
        f"#### {samples.updates[-1]} updates over {transport}, {samples.at_s[-1]:.0f} s: "
        f"{'something grew' if grown else 'nothing grew'}"
    )
    told = f"Judged from update {samples.updates[first]} on, {samples.at_s[first]:.0f} s after the first."
    return "\n\n".join([head, told, page.table(("settled → end", *metrics), rows), *said])


def _cell(each: Growth | None) -> str:
    if each is None:
        return ""
    text = f"{_amount(each.metric, each.settled)} → {_amount(each.metric, each.last)}"
    return text if each.is_bounded else f"**{text}**"


def _amount(metric: str, value: float) -> str:
    return f"{value / MIB:.1f} MiB" if metric in _IN_BYTES else f"{value:.0f}"


def main() -> None:
    """Read the options, soak, and say what grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=2000, help="at least so many")
    parser.add_argument("--transport", choices=list(HOSTS), action="append", help="by default one after the other")
    parser.add_argument("--every", type=int, help=f"updates between two looks; by default --updates / {SAMPLES}")
    parser.add_argument("--mib", type=int, default=1, help="size of the model")
    parser.add_argument("--docs", action="store_true", help="write verdict and pictures into docs/")
    options = parser.parse_args()
    every = options.every or max(1, options.updates // SAMPLES)
    if options.updates // every < 2 * SAMPLES_MIN:
        parser.error(f"{options.updates} updates, looked at every {every}, are too few to tell: take more")
    found: list[str] = []
    grew = False
    for transport in options.transport or list(HOSTS):
        samples = asyncio.run(soak(transport, options.updates, every, options.mib, dict(os.environ)))
        verdict = samples.verdict()
        grew = grew or not all(each.is_bounded for each in verdict)
        found.append(words(transport, samples, verdict))
        print("\n" + found[-1] + "\n", flush=True)
        if options.docs:
            from benchmarks.soak import picture as soak_picture  # noqa: PLC0415 (matplotlib is wanted here alone)

            soak_picture.draw(samples, transport, page.DOCS / f"soak-{transport}.svg")
            found.append(f"![Each metric after so many updates](soak-{transport}.svg)")
    if options.docs:
        page.write("soak", "\n\n".join(found))
    sys.exit(int(grew))


if __name__ == "__main__":
    main()
