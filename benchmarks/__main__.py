"""TensorHub, its peers and the physical limit, from one run: `python -m benchmarks [--quick] [--docs]`.

One trainer and four engines, each a process with an agent of its own. docs/design/benchmarks.md says how it is measured
and what the figures mean. `--telemetry` compares telemetry on and off instead.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import page
from benchmarks.fleet import Fleet
from benchmarks.llama import MIB
from benchmarks.side_by_side import environments, machine, report, small, telemetry
from benchmarks.side_by_side.arena import Arena
from benchmarks.side_by_side.contender import Failed
from benchmarks.side_by_side.memcpy import Memcpy
from benchmarks.side_by_side.ours import HOSTS
from benchmarks.side_by_side.plan import PARTS, PartSpec, contenders
from benchmarks.side_by_side.results import Part, Result, Small
from benchmarks.side_by_side.rounds import TROUBLE, measure
from tensorhub_common.config.settings import load

ROUNDS: Final = 9
ROUNDS_QUICK: Final = 3
SMALL: Final = 100
SMALL_QUICK: Final = 20
MINUTES_TELEMETRY: Final = 3.0
MINUTES: Final = 5.5
MINUTES_PEERS: Final = 11.5
HUB_LOG_LEVEL: Final = "warning"
PICTURE: Final = "benchmarks.svg"
MEMORY_PAYLOADS: Final = 18
"""What a run needs at most: the arena and a hub with five payloads each, and `ucx_perftest` with eight."""


async def run(options: argparse.Namespace, environment: dict[str, str]) -> Result:
    """Measure all, and print it as it comes."""
    began, others = time.monotonic(), machine.Others()
    result = Result(machine=machine.facts(environment), mib=options.mib, parts=[])
    print(report.of_machine(result.machine))
    made = await _environments(options.peers)
    seconds = 60 * (options.minutes or (MINUTES_PEERS if options.peers else MINUTES))
    began_rounds = time.monotonic()
    with Arena.create(load(environment).shm_dir, options.mib * MIB) as arena, Memcpy(arena) as memcpy:
        async with await Fleet.start(environment) as fleet:
            for spec in [spec for spec in PARTS if spec.transport in options.transports]:
                label = f"{spec.transport}, digests {'on' if spec.digests else 'off'}"
                all_of_them = contenders(spec, fleet, arena, options.mib, made, environment)
                until = began_rounds + seconds * spec.until
                lines = await measure(all_of_them, memcpy, options.rounds, until, label)
                part = Part(transport=spec.transport, digests=spec.digests, lines=lines)
                if spec.small and ours_went(part):
                    part.small = await _small(spec, fleet, environment, options.small)
                result.parts.append(part)
                print("\n" + report.of_part(part, options.mib), flush=True)
    result.seconds, result.others = time.monotonic() - began, others.share()
    print("\n" + report.of_goals(result) + "\n\n" + report.of_end(result))
    return result


def ours_went(part: Part) -> bool:
    """Tell whether a hub of this kind works here at all."""
    return part.ours.failed is None


async def _small(spec: PartSpec, fleet: Fleet, environment: dict[str, str], count: int) -> Small | None:
    """Measure the small model on a hub of its own, whose log holds nothing else."""
    print(f"{spec.transport}: 1 MiB, {count} publications", file=sys.stderr)
    try:
        return await small.on_new_hub(fleet, HOSTS[spec.transport], spec.transport, environment, count)
    except TROUBLE as why:
        print(f"the small model is left out: {why}", file=sys.stderr)
        return None


async def _environments(names: list[str]) -> dict[str, environments.Environment]:
    made: dict[str, environments.Environment] = {}
    for name in names:
        try:
            made[name] = await environments.prepare(name)
        except Failed as why:
            print(f"{name} is left out: {why}", file=sys.stderr)
    return made


def write_docs(result: Result) -> None:
    """Write the tables and the picture of a run into docs/."""
    from benchmarks.side_by_side import picture  # noqa: PLC0415 (matplotlib is wanted here alone)

    picture.draw(result, page.DOCS / PICTURE)
    page.write("run", f"![How long everybody took]({PICTURE})\n\n" + report.whole(result))


def main() -> None:
    """Read the options, measure, and write the figures down."""
    options = _options()
    environment = dict(os.environ) | {"TENSORHUB_LOG_LEVEL": HUB_LOG_LEVEL}
    if options.from_ is not None:
        result = msgspec.json.decode(options.from_.read_bytes(), type=Result)
        print(report.whole(result))
    elif options.telemetry:
        found = asyncio.run(telemetry.measure(options.mib, options.minutes or MINUTES_TELEMETRY, environment))
        print("\n" + telemetry.words(found))
        if options.docs:
            page.write("telemetry", telemetry.words(found))
        return
    else:
        needed = MEMORY_PAYLOADS * options.mib * MIB
        if machine.free_bytes() < needed:
            sys.exit(
                f"a run with {options.mib} MiB needs {needed / 2**30:.0f} GiB of free memory, and this machine has "
                f"{machine.free_bytes() / 2**30:.0f}: take a smaller model with --mib"
            )
        result = asyncio.run(run(options, environment))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if options.docs:
        write_docs(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about two minutes")
    parser.add_argument("--peers", type=_some(environments.NAMES), default=[], help="any of ray,nixl,mooncake,monarch")
    parser.add_argument("--transports", type=_some(tuple(HOSTS)), default=list(HOSTS), help="local,ucxx")
    parser.add_argument("--telemetry", action="store_true", help="compare telemetry on and off, and nothing else")
    parser.add_argument("--docs", action="store_true", help="write tables and picture into docs/")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--from", dest="from_", type=Path, metavar="FILE", help="measure nothing: take this file")
    parser.add_argument("--mib", type=int, default=1024, help="size of the large model")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--small", type=int, help="publications of the small model")
    parser.add_argument("--minutes", type=float, help="no round begins later than this, but for the first few")
    options = parser.parse_args()
    options.rounds = options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)
    options.small = options.small or (SMALL_QUICK if options.quick else SMALL)
    return options


def _some(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is unknown: take some of {','.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
