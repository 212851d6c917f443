"""Trains undisturbed and with kills, on the same seeds, and compares: `make demo-rl`, `python -m benchmarks.demo_rl`.

It fails if a response was lost or counted twice, if a run did not learn, or if the final rewards differ by more than
those of seeds do.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import page
from benchmarks.demo_rl import picture, report
from benchmarks.demo_rl.progress import Progress
from benchmarks.demo_rl.tally import Run
from benchmarks.demo_rl.training_run import TrainingRun
from benchmarks.demo_rl.verdict import agreement, faults_of, learning_faults_of
from tensorhub_common.errors import TensorHubError

DOCS: Final = page.DOCS.parent
GUIDE: Final = DOCS / "guides" / "reinforcement-learning.md"
PICTURE: Final = DOCS / "assets" / "demo-rl.svg"
FIGURES: Final = DOCS / "assets" / "demo-rl.json"

STEPS: Final = 80
STEPS_LEARNED_MIN: Final = 60
"""A run of fewer steps is not expected to have learned."""
KILL_EVERY_S: Final = 6.0
KILLS_MIN: Final = 3


class Demo(msgspec.Struct):
    """All runs of one call, on one machine."""

    steps: int
    kill_every_s: float
    mode: str
    cores: int
    runs: list[Run]


async def measure(options: argparse.Namespace) -> tuple[list[Run], list[str]]:
    """Run all seeds of both kinds; return the runs, and what went wrong with them."""
    runs, faults = list[Run](), list[str]()
    with Progress() as progress:
        for seed in range(options.seeds):
            for kill_every_s in (None, options.kill_every) if options.undisturbed else (options.kill_every,):
                with tempfile.TemporaryDirectory(prefix="tensorhub-rl-", ignore_cleanup_errors=True) as folder:
                    one = TrainingRun(
                        Path(folder),
                        seed,
                        options.steps,
                        kill_every_s=kill_every_s,
                        device=options.device,
                        on_change=progress.changed,
                    )
                    try:
                        run = await one.run()
                    except TensorHubError as why:
                        faults.append(str(why))
                        continue
                runs.append(run)
                faults += [*one.faults, *faults_of(run, options.steps, KILLS_MIN)]
                if options.steps >= STEPS_LEARNED_MIN:
                    faults += learning_faults_of(run)
    return runs, faults


def conclude(runs: list[Run], faults: list[str]) -> int:
    """Print table and verdict; return the exit code."""
    print(f"\n{report.table(runs)}\n")
    found = agreement(runs)
    print("one seed has no spread: the final rewards are not compared" if found is None else found.sentence)
    if found is not None and not found.holds:
        faults = [*faults, "the final rewards differ by more than those of seeds do"]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


def main() -> None:
    """Run, print, and write the figures down."""
    options = _options()
    if options.from_ is not None:
        demo, faults = msgspec.json.decode(options.from_.read_bytes(), type=Demo), list[str]()
    else:
        logging.getLogger("tensorhub").setLevel(logging.ERROR)  # That processes were killed is no news.
        runs, faults = asyncio.run(measure(options))
        is_exact = options.device == "cpu" and os.environ.get("TENSORHUB_RUNNER_EXACT", "on") == "on"
        demo = Demo(options.steps, options.kill_every, "exact" if is_exact else "fast", os.cpu_count() or 1, runs)
    code = conclude(demo.runs, faults)
    if options.json is not None:
        options.json.write_bytes(encoded(demo))
    if options.docs:
        FIGURES.write_bytes(encoded(demo))
        picture.draw(demo.runs, PICTURE)
        page.write("demo-rl", report.table(demo.runs), GUIDE)
    sys.exit(code)


def encoded(demo: Demo) -> bytes:
    """Return the figures as JSON."""
    return msgspec.json.format(msgspec.json.encode(demo), indent=1) + b"\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_rl", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill-every", type=float, default=KILL_EVERY_S, metavar="S", help="a runner, on average")
    parser.add_argument(
        "--undisturbed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train each seed without kills too; without it, as many steps as it takes to kill often",
    )
    parser.add_argument("--device", default="cpu", help="what trainer and runners compute on, as in --device cuda")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--docs", action="store_true", help="write figures, picture and table into docs/")
    parser.add_argument(
        "--from", dest="from_", type=Path, metavar="FILE", help="run nothing: take the figures of this file"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
