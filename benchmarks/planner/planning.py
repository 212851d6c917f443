"""How long resharding a model of 10^12 parameters takes to plan: all ranks' programs and plans, on one core.

    python -m benchmarks.planner.planning [--case NAME] [--rounds 3] [--docs]

Measured is what a planner computes from the first demand of a replica on: the sources' and the readers' layouts out of
their blobs, the index of the sources, a program for each reader, and the plans; then the plans of the next version. Not
measured are NATS and the blobs' way. Each case and round is a process of its own, so that memory is that of the case.

Figures are seconds of processor time, the median of the rounds. The machine may be busy with other things, which makes
a core slower by its caches and its other half: how long a fixed loop in Python takes, measured between the steps of the
same run, stands beside.

*Cached programs* is what compiling costs from the second time on: all readers' programs, asked for by the digests of
their layouts and of the sources'. *Again* are whole plans for the next version, as they are decided, proven and
counted.
"""

import argparse
import asyncio
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import msgspec

from benchmarks.page import write
from benchmarks.planner import moe
from tensorhub_common.catalog.state import AgentRecord, Catalog, Model, Replica, Shard, Version, root_key
from tensorhub_common.catalog.transitions import AgentState, ShardState
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout, encoded, layout_digest
from tensorhub_common.programs import program as programs
from tensorhub_common.programs.numbered_program import NumberedProgram, PatternCache
from tensorhub_common.programs.program import TransferProgram
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.app.main import GC_YOUNG
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.catalog_view.holders import Candidates
from tensorhub_planner.compiler.compiler import CompiledProgram, compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.compiler.layout_reader import LayoutReader
from tensorhub_planner.context.layout_store import LayoutStore
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.planning.decision import ProgramPlanDecision, found_in
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet

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

    def demands(self, version: int) -> list[PlanRequest]:
        """Return what the readers ask."""
        seq = self.catalog.seq
        return [
            PlanRequest(
                model=MODEL,
                version=version,
                replica="rollout",
                shard=rank,
                agent=f"rollout-{rank}",
                root=None,
                at_seq=seq,
                turn=ReadPriority(seq, seq),
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


class Folder:
    """A case's blobs on disk, which stand in for the blob store."""

    def __init__(self, folder: Path) -> None:
        """Read them."""
        self.names: dict[str, list[str]] = json.loads((folder / "ranks.json").read_text())
        # In the order of ranks, as an index reads its sources, and as the shards of a replica come to ask.
        in_order = dict.fromkeys((*self.sources, *self.readers))
        self.stored = {digest: (folder / digest).read_bytes() for digest in in_order}

    @property
    def sources(self) -> list[str]:
        """The layouts of the sources' ranks."""
        return self.names["sources"]

    @property
    def readers(self) -> list[str]:
        """The layouts of the readers' ranks."""
        return self.names["readers"]

    async def get(self, _job: str, digest: str) -> bytes:
        """Return a blob."""
        return self.stored[digest]

    async def put(self, _job: str, data: bytes) -> str:
        """Keep a blob."""
        digest = blob_digest(data)
        self.stored[digest] = data
        return digest


class Planner:
    """What a planner knows of a world, and decides by."""

    def __init__(self, world: World) -> None:
        """Know what the trainer has published."""
        self.world, self.limits = world, PlanLimits()
        self.fold, self.ledger, self.kept = CatalogReplica(world.catalog, 1), LoadLedger(self.limits), PlanCache()
        self.chosen = self._found(world.demands(1)[0]).of_replica.source_set

    def _found(self, demand: PlanRequest) -> Candidates:
        found = found_in(self.fold, demand, self.limits, any_layout=True)
        assert isinstance(found, Candidates), found
        return found

    def plans(
        self, demands: Sequence[PlanRequest], compiled: Mapping[str, tuple[NumberedProgram, PieceSizes]]
    ) -> list[Plan]:
        """Plan for all readers."""
        self.fold.position = self.world.catalog.seq
        self.fold.rolls.clear()
        answers = []
        for demand in demands:
            found = self._found(demand)
            assert found.of_replica.source_set == self.chosen
            execution, sizes = compiled[found.seat.layout]
            asked = msgspec.structs.replace(demand, program=execution.digest)
            question = ProgramPlanDecision("job", asked, found, execution, sizes)
            answer = question.decide(self.kept, self.ledger, self.limits, float(demand.version))
            assert isinstance(answer, Plan), answer
            answers.append(answer)
        return answers

    def over(self) -> None:
        """Take from the log that all reads are over."""
        for rank in range(len(self.world.readers)):
            self.ledger.done(ReaderId("job", MODEL, "rollout", rank))


async def cached(folder: Folder, chosen: LayoutSet, watch: "Stopwatch") -> None:
    """Ask for all programs again that a planner has compiled."""
    blobs = cast("BlobStore", folder)
    work = Supervisor("the planner of a benchmark")
    known = ProgramStore(blobs, LayoutStore(blobs, work), work)

    async def all_programs() -> list[CompiledProgram]:
        return [await known.compiled("job", each, chosen) for each in folder.readers]

    before = await all_programs()
    cpu = time.process_time()
    again = await all_programs()
    watch.cpu_s["cached"] = time.process_time() - cpu
    assert all(one is other for one, other in zip(before, again, strict=True))


def run(folder: Path) -> dict[str, float]:
    """Plan one case from the blobs in a folder."""
    gc.set_threshold(GC_YOUNG, 20, 20)
    files, watch, before = Folder(folder), Stopwatch(), _rss_mib()
    entries = LayoutReader()
    layouts = watch("decode", lambda: {digest: entries.decoded(data, digest) for digest, data in files.stored.items()})
    world = World(files.sources, files.readers)
    world.publish(1)
    planner = Planner(world)
    chosen = planner.chosen
    index = watch("index", lambda: LayoutIndex({each: layouts[each] for each in chosen.layouts}, chosen.originals))
    made = watch("compile", lambda: {each: compile_program(each, layouts[each], index) for each in files.readers})
    sent = watch("encode", lambda: {each: programs.encoded(program) for each, program in made.items()})
    compiled = watch("ready", lambda: {each: _ready(program, each, index.executed) for each, program in made.items()})
    asked = world.demands(1)
    answers = watch("plan", lambda: planner.plans(asked, compiled))
    rss = _rss_mib() - before
    planner.over()
    world.publish(2)
    asked = world.demands(2)
    again = watch("again", lambda: planner.plans(asked, compiled))
    assert all(plan.why.startswith("as version 1 was read") for plan in again), "a plan was decided anew"
    blob_bytes = sum(map(len, files.stored.values()))
    asyncio.run(cached(files, chosen, watch))
    return {
        **watch.cpu_s,
        "wall": sum(each for name, each in watch.wall_s.items() if name != "again"),
        "loop": statistics.median(watch.loops),
        "readers": len(files.readers),
        "tensors": sum(len(layouts[digest].tensors) for digest in files.sources),
        "blobs_mib": blob_bytes / 2**20,
        "units": statistics.median(len(it) for it, _ in compiled.values()),
        "cells": statistics.median(sum(map(len, program.patterns)) for program in made.values()),
        "program_kib": statistics.median(map(len, sent.values())) / 1024,
        "shares": statistics.median(len(plan.shares) for plan in answers),
        "plan_kib": statistics.median(len(msgspec.json.encode(plan)) for plan in answers) / 1024,
        "rss_mib": rss,
    }


def _ready(program: TransferProgram, digest: str, patterns: PatternCache) -> tuple[NumberedProgram, PieceSizes]:
    execution = NumberedProgram(program, digest, patterns)
    return execution, PieceSizes.repeated(execution.runs())


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
        command = [sys.executable, "-m", "benchmarks.planner.planning", "--run", folder]
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
    seconds = [
        "| ranks | layouts read | index | compile | ready | plan | first, all | a reader | cached programs, all "
    ]
    seconds[0] += "| again, all | loop |"
    seconds += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
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
            f"**{at['cached'] * 1e3:.1f} ms** | **{at['again'] * 1e3:.1f} ms** | {at['loop'] * 1e3:.0f} ms |"
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
