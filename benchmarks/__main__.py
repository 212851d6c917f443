"""TensorHub beside the physical limit, from one run: `python -m benchmarks [--quick] [--json FILE]`.

One trainer and four engines, each a process with an agent of its own, all of one host. docs/benchmarks.md says how it
is measured and what the figures mean.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import goals, large, machine, small
from benchmarks.fleet import READERS, Fleet
from benchmarks.goals import MEMCPY, Goal
from benchmarks.llama import MIB, TENSORS
from benchmarks.memcpy import Memcpy
from tensorhub.up.up import Up
from tensorhub_common.settings import load

ROUNDS: Final = 9
ROUNDS_QUICK: Final = 3
SMALL: Final = 100
SMALL_QUICK: Final = 20
HUB_LOG_LEVEL: Final = "warning"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all and print it as it comes."""
    environment = dict(os.environ) | {"TENSORHUB_LOG_LEVEL": HUB_LOG_LEVEL}
    result: dict[str, Any] = {"machine": machine.facts(environment), "large": {}, "small": {}}
    print_facts(result["machine"])
    judged: list[Goal] = []
    memcpy = Memcpy(load(environment).shm_dir, options.mib * MIB)
    async with await Fleet.start(environment) as fleet:
        for digests in ("on", "off"):
            of_hub = environment | {"TENSORHUB_DIGESTS": digests}
            with tempfile.TemporaryDirectory(prefix="tensorhub-bench-") as folder:
                async with Up(Path(folder), agents=1 + READERS, environment=of_hub) as up:
                    took, stages = await large.measure(fleet, up.hub, memcpy, options.mib, options.rounds)
                    result["large"][digests] = {"seconds": took, "stages_ms": stages}
                    print_large(digests, options.mib, took, stages)
                    judged += goals.of_large(digests, took)
                    if digests == "on":
                        result["small"] = await small.measure(fleet, up.hub, options.small)
                        print_small(result["small"])
    judged.append(goals.of_small(result["small"]["publish to all ready"]))
    result["goals"] = [{"what": g.what, "measured": g.measured, "wanted": g.wanted, "met": g.met} for g in judged]
    print_goals(judged)
    return result


# ------------------------------------------------------------------------------------------------------- printing


def print_facts(facts: Mapping[str, str]) -> None:
    """Say what the figures mean nothing without."""
    for what, fact in facts.items():
        print(f"{what:20} {fact}")


def print_large(
    digests: str, mib: int, took: Mapping[str, Sequence[float]], stages: Mapping[str, Sequence[Mapping[str, float]]]
) -> None:
    """Print the large model's medians, each beside the memcpys of its rounds."""
    print(f"\n{mib} MiB in {TENSORS} tensors, digests {digests}, {len(took['1→1'])} rounds")
    memcpy = statistics.median(took[MEMCPY])
    for name in (MEMCPY, "memcpy, 2 threads", "1→1", f"1→{READERS}", "publish", "unpublish", "first 1→1"):
        times = took[name]
        middle = statistics.median(times)
        ratio = statistics.median(took[f"{name} in memcpys"]) if name in ("1→1", f"1→{READERS}") else middle / memcpy
        print(
            f"  {name:20} {middle * 1000:8.1f} ms   {ratio:5.2f} memcpys"
            f"   ({min(times) * 1000:.1f} – {max(times) * 1000:.1f} ms)"
        )
    for name, each in stages.items():
        middles = {stage: statistics.median(of[stage] for of in each) for stage in each[0]}
        wire_s = statistics.median(took[f"{name} wire"])
        print(
            f"  {name} by stage, ms     {_in_words(middles)}; of the wire {wire_s * 1000:.1f} by the agent's own clock"
        )


def print_small(took: Mapping[str, Any]) -> None:
    """Print the small model's latency and where it goes."""
    whole = took["publish to all ready"]
    print(f"\n1 MiB in {len(small.SHAPES)} tensors, {READERS} replicas waiting, digests on, {len(whole)} publications")
    for name in ("publish to all ready", "publish returned to all ready", "publish in the log"):
        times = sorted(took[name])
        p50, p90 = statistics.median(times), times[int(len(times) * 0.9)]
        print(f"  {name:30} p50 {p50 * 1000:6.1f} ms   p90 {p90 * 1000:6.1f} ms")
    print(f"  by stage, ms                   {_in_words(took['stages_ms'])}")
    by_role = small.by_role(took["processor_ms"])
    total = sum(by_role.values())
    print(
        f"  processor time of a cycle, ms  {_in_words(by_role)}; {total:.1f} in all, {took['entries']:.0f} log entries"
    )


def print_goals(judged: Sequence[Goal]) -> None:
    """Print what was to be reached, and whether it was."""
    print(f"\n{'goal':36} {'measured':22} {'wanted':10}")
    for goal in judged:
        print(f"{goal.what:36} {goal.measured:22} {goal.wanted:10} {'met' if goal.met else 'missed'}")


def _in_words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {figure:.1f}" for name, figure in figures.items())


def main() -> None:
    """Read the options, measure, and write the figures down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: less than 40 s")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--mib", type=int, default=1024, help="size of the large model")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--small", type=int, help="publications of the small model")
    options = parser.parse_args()
    options.rounds = options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)
    options.small = options.small or (SMALL_QUICK if options.quick else SMALL)
    began, others = time.monotonic(), machine.Others()
    result = asyncio.run(run(options))
    result["others"] = others.share()
    print(f"\n{time.monotonic() - began:.0f} s, in which other programs used {result['others']:.0%} of the processors")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
