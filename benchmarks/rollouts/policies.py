"""The policies of placement on real jobs, one after the other with the same seeds and kills.

`python -m benchmarks.rollouts.policies [--seeding | --streams] [--without TERM] [--docs]`: a hub, runners with the
torch engine, responses of skewed lengths, SIGKILLs of runners and updates of the weights, once for each policy a round.
Medians over rounds are told, and ratios of runs of one round, since a shared machine is slower at one time than at
another.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import msgspec

from benchmarks import page
from benchmarks.rollouts.trained_job import Took, TrainedJob, Workload, middle
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.rollout.entries import DEFAULT_POLICY, ArrivalTerm, PolicyName
from tensorhub_rollout.policy.plateau import StepModel

PAGE: Final = page.DOCS / "rollouts" / "measured.md"
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)
TERMS: Final[tuple[ArrivalTerm, ...]] = get_args(ArrivalTerm)


class Compared(msgspec.Struct):
    """All runs of one call."""

    workload: Workload
    runs: list[Took]


async def compared(
    workload: Workload,
    rounds: int,
    policies: Sequence[PolicyName],
    out: Path | None = None,
    terms_off: Sequence[ArrivalTerm] = (),
) -> Compared:
    """Run each policy once in each round, which has a seed of its own; the order turns from round to round.

    The default policy runs once more without each of `terms_off`. What there is stands in `out` after each run.
    """
    found = Compared(workload, [])
    every: list[tuple[PolicyName, frozenset[ArrivalTerm]]] = [(policy, frozenset()) for policy in policies]
    every += [(DEFAULT_POLICY, frozenset({term})) for term in terms_off]
    for number in range(rounds):
        first = number % len(every)
        for policy, off in (*every[first:], *every[:first]):
            seeded = msgspec.structs.replace(workload, seed=workload.seed + number)
            with tempfile.TemporaryDirectory(prefix="tensorhub-job-", ignore_cleanup_errors=True) as folder:
                took = await TrainedJob(Path(folder), seeded, policy, off).run()
            found.runs.append(took)
            if out is not None:
                write(out, found)
            said = f"{took.tokens_per_s:.0f} tokens/s in {took.seconds:.1f} s"
            sys.stderr.write(f"seed {seeded.seed}, {took.name}: {said}\n")
    return found


def write(path: Path, found: Compared | Sequence[Compared]) -> None:
    """Write all figures as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def ratios(found: Compared, name: str) -> list[float]:
    """Return the throughput of a policy, as its runs name it, for each round, in parts of the default policy's."""
    rates = {(each.name, each.seed): each.tokens_per_s for each in found.runs}
    return [
        rate / rates[DEFAULT_POLICY, seed]
        for (of, seed), rate in rates.items()
        if of == name and (DEFAULT_POLICY, seed) in rates
    ]


def table(found: Compared) -> str:
    """Return the table of medians over rounds."""
    head = [
        "policy",
        "tokens/s",
        f"of {DEFAULT_POLICY}'s",
        "range",
        "step, s",
        "longest",
        "away, s",
        "trainer waits",
        "made again",
        "moved",
        "computed for moves",
        "for updates",
        "age",
    ]
    if found.workload.seeds:
        head.insert(8, "seeds, s")
    rows = []
    for name in sorted({each.name for each in found.runs}):
        runs = [each for each in found.runs if each.name == name]
        parts = ratios(found, name)
        row = [
            name,
            f"{middle(each.tokens_per_s for each in runs):.0f}",
            f"{middle(parts):.2f}",
            f"{min(parts):.2f} to {max(parts):.2f}" if parts else "",
            f"{middle(second for each in runs for second in each.steps):.1f}",
            f"{middle(max(each.steps) for each in runs):.1f}",
            f"{middle(each.away_s for each in runs):.0f}",
            f"{middle(each.waits_share for each in runs):.1%}",
            # Without steps some of what was made is not done at the end.
            "" if found.workload.streams else f"{middle(each.again_share for each in runs):.2%}",
            f"{middle(each.moved for each in runs):.0f}",
            f"{middle(each.computed_by_moves for each in runs):.0f}",
            f"{middle(each.computed_by_updates for each in runs):.0f}",
            f"{middle(each.age for each in runs):.2f}",
        ]
        if found.workload.seeds:
            row.insert(8, f"{middle(each.seeded_s for each in runs):.1f}")
        rows.append(row)
    return page.table(head, rows)


def main() -> None:
    """Measure, print, and write the figures down."""
    options = _options()
    logging.getLogger("tensorhub").setLevel(logging.ERROR)  # That processes were killed is no news.
    if options.from_ is not None:
        read = [each for path in options.from_ for each in runs_in(path)]
        found = Compared(read[0].workload, [run for each in read for run in each.runs])
    else:
        workload = Workload(
            runners=options.runners, steps=options.steps, kills=options.kills, seeds=options.seeding, seed=options.seed
        )
        if options.streams:
            workload = streamed(workload)
        if not options.paced:
            workload = msgspec.structs.replace(workload, step=StepModel(0.0, 0.0, 0.0))
        found = asyncio.run(
            compared(workload, options.rounds, options.policy or POLICIES, options.json, options.without)
        )
    print(table(found))
    if options.docs:
        kind = "-seeding" if found.workload.seeds else "-streams" if found.workload.streams else ""
        page.write(f"policies{kind}", table(found), PAGE)


def streamed(workload: Workload) -> Workload:
    """Return the same job without steps: all that is open runs, and a version comes for each eight responses.

    Contexts are computed at 2.3 times the speed of generation, as in the simulator's `stream-7b`, and a version comes
    while a response makes half of its tokens.
    """
    return msgspec.structs.replace(
        workload,
        streams=True,
        groups=2,
        ahead=3,
        steps=8 * workload.steps,
        micro_batch=4,
        median=120.0,
        prefill_s=0.0015,
    )


def runs_in(path: Path) -> list[Compared]:
    """Return the runs of a file that a benchmark of policies wrote. Exits where it is none."""
    try:
        found: Compared | list[Compared] = msgspec.json.decode(path.read_bytes(), type=Compared | list[Compared])
    except (OSError, *MALFORMED) as why:
        sys.exit(f"{path} has no runs: {why}")
    return found if isinstance(found, list) else [found]


def at_least(parser: argparse.ArgumentParser, options: argparse.Namespace, **least: int) -> None:
    """Exit where an option is below its least number."""
    for name, number in least.items():
        if getattr(options, name) < number:
            parser.error(f"--{name} is {getattr(options, name)}, and must be at least {number}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts.policies",
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m benchmarks.rollouts.policies --rounds 5 --kills 4 --json policies.json",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="these alone; by default all")
    parser.add_argument("--runners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kills", type=int, default=3, help="of runners, evenly over a job")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--seeding", action="store_true", help="the trainer's own engine generates, no step ahead")
    kind.add_argument(
        "--streams", action="store_true", help="no steps: a version for each eight responses, three versions ahead"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=TERMS,
        help=f"runs {DEFAULT_POLICY} once more without this term; may be given again",
    )
    parser.add_argument(
        "--paced",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stretch steps, as if each engine had a processor of its own",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    parser.add_argument(
        "--from",
        dest="from_",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: take these files' figures, of one workload with different seeds",
    )
    options = parser.parse_args()
    at_least(parser, options, rounds=1, runners=1, steps=1, kills=0)
    return options


if __name__ == "__main__":
    main()
