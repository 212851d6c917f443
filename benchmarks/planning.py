"""How long resharding a model of 10^12 parameters takes to plan: all ranks' programs and plans, on one core.

    python -m benchmarks.planning [--case NAME] [--rounds 3] [--docs]

Measured is what a planner computes from the first demand of a replica on: the sources' and the readers' layouts out of
their blobs, the index of the sources, a program for each reader, and the plans; then the plans of the next version. Not
measured are NATS and the blobs' way. Each case and round is a process of its own, so that memory is that of the case.

Figures are seconds of processor time, the median of the rounds. The machine may be busy with other things, which makes
a core slower by its caches and its other half: how long a fixed loop in Python takes, measured between the steps of the
same run, stands beside.
"""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from benchmarks import moe
from benchmarks.page import write
from tensorhub_common import program as programs
from tensorhub_common.catalog.state import AgentRecord, Catalog, Model, Replica, Shard, Version, root_key
from tensorhub_common.catalog.table import AgentState, ShardState
from tensorhub_common.layout import Layout, encoded, layout_digest
from tensorhub_common.program import Execution, Program
from tensorhub_common.wire.transfer import Demand, Plan, Turn
from tensorhub_planner.again import Kept
from tensorhub_planner.compiling import SourceIndex, compile_program
from tensorhub_planner.deciding import found_in
from tensorhub_planner.fold import Fold
from tensorhub_planner.layouts import decoded
from tensorhub_planner.limits import Limits
from tensorhub_planner.load import Ledger, Reader
from tensorhub_planner.main import GC_YOUNG
from tensorhub_planner.ranges import Sizes
from tensorhub_planner.resharding import ProgramQuestion, source_set
from tensorhub_planner.sources import Found

MODEL: Final = "policy"
HOST_GPUS: Final = 8
LOOP: Final = 2_000_000
"""The fixed loop adds up so many numbers: some 0.1 s of a present core."""

_Value = TypeVar("_Value")


class Case(NamedTuple):
    """A trainer's ranks and an engine's."""

    title: str
    sources: Callable[[], list[Layout]]
    readers: Callable[[], list[Layout]]


CASES: Final = {
    "stages": Case(
        "256 (PP 8 × EP 32, TP 4) → 128 (EP 128, TP 8)",
        lambda: moe.by_stages(8, 32, 4),
        lambda: moe.by_stages(1, 128, 8),
    ),
    "stacked": Case(
        "256 (FSDP2, experts stacked) → 128 (EP 128, TP 8)",
        lambda: moe.fully_sharded(256, stacked=True),
        lambda: moe.by_stages(1, 128, 8, stacked=True),
    ),
    "thousands": Case(
        "2,048 (PP 8 × EP 256, TP 8) → 1,024 (PP 4 × EP 256, TP 4)",
        lambda: moe.by_stages(8, 256, 8),
        lambda: moe.by_stages(4, 256, 4),
    ),
    "equal": Case(
        "2,048 (PP 8 × EP 256, TP 8) → 2,048 (PP 8 × EP 256, TP 4)",
        lambda: moe.by_stages(8, 256, 8),
        lambda: moe.by_stages(8, 256, 4),
    ),
    "singles": Case(
        "32 (FSDP2, each expert by itself) → 32 (EP 32, TP 8)",
        lambda: moe.fully_sharded(32, stacked=False),
        lambda: moe.by_stages(1, 32, 8),
    ),
}


class World:
    """A catalog in which a trainer has published, and a replica is to read."""

    def __init__(self, sources: list[str], readers: list[str]) -> None:
        """Register all ranks, `HOST_GPUS` on each host."""
        self.catalog = Catalog("job")
        self.model = self.catalog.models[MODEL] = Model(MODEL)
        self._add("trainer", sources)
        self._add("rollout", readers)
        self.readers = readers

    def _add(self, name: str, layouts: list[str]) -> None:
        replica = self.model.replicas[name] = Replica(name, len(layouts), spot=False)
        for rank, layout in enumerate(layouts):
            agent = f"{name}-{rank}"
            host = f"{name}-host-{rank // HOST_GPUS}"
            self.catalog.agents[agent] = AgentRecord(agent, 1, host, "site", AgentState.LIVE)
            replica.members[rank] = Shard(rank, agent, layout, 1)

    def publish(self, version: int) -> None:
        """Let the trainer hold a version."""
        trainer = self.model.replicas["trainer"]
        roots = {}
        for shard in trainer.members.values():
            shard.state, shard.version, shard.root = ShardState.READY, version, f"{version:08x}{shard.index:024x}"
            roots[root_key(trainer.shards, shard.index, shard.layout)] = shard.root
        self.model.versions[version] = Version(version, 0.0, "trainer", roots)
        self.catalog.seq += 1

    def demands(self, version: int) -> list[Demand]:
        """Return what the readers ask."""
        seq = self.catalog.seq
        return [
            Demand(
                model=MODEL,
                version=version,
                replica="rollout",
                shard=rank,
                agent=f"rollout-{rank}",
                root=None,
                at_seq=seq,
                turn=Turn(seq, seq),
            )
            for rank in range(len(self.readers))
        ]


class Stopwatch:
    """Processor time of the steps of a run, and of the fixed loop between them."""

    def __init__(self) -> None:
        """Begin with none."""
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self.loops: list[float] = []

    def __call__(self, name: str, work: Callable[[], _Value]) -> _Value:
        """Measure a step."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        self.cpu_s[name] = time.process_time() - cpu
        self.wall_s[name] = time.perf_counter() - wall
        began = time.process_time()
        total = 0
        for number in range(LOOP):
            total += number
        self.loops.append(time.process_time() - began)
        return result


def run(folder: Path) -> dict[str, float]:
    """Plan one case from the blobs in a folder."""
    names: dict[str, list[str]] = json.loads((folder / "ranks.json").read_text())
    gc.set_threshold(GC_YOUNG, 20, 20)
    watch = Stopwatch()
    before = _rss_mib()
    blobs = {digest: (folder / digest).read_bytes() for digest in {*names["sources"], *names["readers"]}}
    layouts = watch("decode", lambda: {digest: decoded(data, digest) for digest, data in blobs.items()})
    blob_bytes = sum(map(len, blobs.values()))
    tensors = sum(len(layouts[digest].tensors) for digest in names["sources"])
    blobs.clear()
    world = World(names["sources"], names["readers"])
    world.publish(1)
    fold = Fold(world.catalog, 1)
    limits = Limits()
    ledger, kept = Ledger(limits), Kept()
    first = found_in(fold, world.demands(1)[0], limits, any_layout=True)
    assert isinstance(first, Found), first
    chosen = source_set(first)
    index = watch("index", lambda: SourceIndex({each: layouts[each] for each in chosen.layouts}, chosen.originals))
    made = watch("compile", lambda: {each: compile_program(each, layouts[each], index) for each in names["readers"]})
    sent = watch("encode", lambda: {each: programs.encoded(program) for each, program in made.items()})
    compiled = watch("ready", lambda: {each: _ready(program, each) for each, program in made.items()})

    def plans(version: int) -> list[Plan]:
        fold.position = world.catalog.seq
        fold.rolls.clear()
        answers = []
        for demand in world.demands(version):
            found = found_in(fold, demand, limits, any_layout=True)
            assert isinstance(found, Found), found
            assert source_set(found) == chosen
            execution, sizes = compiled[found.seat.layout]
            asked = msgspec.structs.replace(demand, program=execution.digest)
            answer = ProgramQuestion("job", asked, found, execution, sizes).decide(kept, ledger, limits, float(version))
            assert isinstance(answer, Plan), answer
            answers.append(answer)
        return answers

    answers = watch("plan", lambda: plans(1))
    rss = _rss_mib() - before
    for rank in range(len(world.readers)):
        # The log says that the read is over.
        ledger.done(Reader("job", MODEL, "rollout", rank))
    world.publish(2)
    again = watch("again", lambda: plans(2))
    assert all(plan.why.startswith("as version 1 was read") for plan in again), "a plan was decided anew"
    return {
        **watch.cpu_s,
        "wall": sum(each for name, each in watch.wall_s.items() if name != "again"),
        "loop": statistics.median(watch.loops),
        "readers": len(names["readers"]),
        "tensors": tensors,
        "blobs_mib": blob_bytes / 2**20,
        "units": statistics.median(len(it) for it, _ in compiled.values()),
        "cells": statistics.median(sum(map(len, program.patterns)) for program in made.values()),
        "program_kib": statistics.median(map(len, sent.values())) / 1024,
        "shares": statistics.median(len(plan.shares) for plan in answers),
        "plan_kib": statistics.median(len(msgspec.json.encode(plan)) for plan in answers) / 1024,
        "rss_mib": rss,
    }


def _ready(program: Program, digest: str) -> tuple[Execution, Sizes]:
    execution = Execution(program, digest)
    return execution, Sizes.repeated(execution.runs())


def _rss_mib() -> float:
    """Return what is resident now. The highest mark would begin with that of the process which started this one."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def prepare(case: Case, folder: Path) -> None:
    """Write a case's layouts as blobs."""
    ranks = {}
    for side, layouts in (("sources", case.sources()), ("readers", case.readers())):
        ranks[side] = [layout_digest(layout) for layout in layouts]
        for digest, layout in zip(ranks[side], layouts, strict=True):
            (folder / digest).write_bytes(encoded(layout))
    (folder / "ranks.json").write_text(json.dumps(ranks))


FIRST: Final = ("decode", "index", "compile", "encode", "ready", "plan")
"""The steps until all readers have their first plan."""


def measured(case: Case, rounds: int) -> tuple[Case, dict[str, float]]:
    """Run a case so often, each time in a process of its own; return the medians."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(case, Path(folder))
        command = [sys.executable, "-m", "benchmarks.planning", "--run", folder]
        runs: list[dict[str, float]] = []
        for _ in range(rounds):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout))
            print(case.title, runs[-1], file=sys.stderr, flush=True)
    return case, {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table(cases: list[tuple[Case, dict[str, float]]]) -> str:
    """Write the figures as tables of Markdown."""
    sizes = ["| ranks | tensors of the sources | their layouts | cells | units | program | plan | memory |"]
    sizes += ["|---|--:|--:|--:|--:|--:|--:|--:|"]
    seconds = ["| ranks | layouts read | index | compile | ready | plan | first, all | a reader | again, all | loop |"]
    seconds += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for case, at in cases:
        sizes.append(
            f"| {case.title} | {at['tensors']:,.0f} | {at['blobs_mib']:.0f} MiB | {at['cells']:,.0f} | "
            f"{at['units']:,.0f} | {at['program_kib']:,.0f} KiB | {at['plan_kib']:.1f} KiB in {at['shares']:.0f} "
            f"shares | {at['rss_mib']:,.0f} MiB |"
        )
        first = sum(at[name] for name in FIRST)
        seconds.append(
            f"| {case.title} | {at['decode']:.2f} | {at['index']:.2f} | {at['compile'] + at['encode']:.2f} | "
            f"{at['ready']:.2f} | {at['plan']:.2f} | **{first:.2f} s** | {first / at['readers'] * 1e3:.1f} ms | "
            f"**{at['again'] * 1e3:.1f} ms** | {at['loop'] * 1e3:.0f} ms |"
        )
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    python = platform.python_version()
    machine = f"Load {load} on {len(os.sched_getaffinity(0))} cores; Python {python}, {platform.machine()}."
    return "\n".join([*seconds, "", *sizes, "", machine])


def main() -> None:
    """Measure all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(run(options.run)))
        return
    text = table([measured(CASES[name], options.rounds) for name in ([options.case] if options.case else CASES)])
    print(text)
    if options.docs:
        write("planning", text)


if __name__ == "__main__":
    main()
