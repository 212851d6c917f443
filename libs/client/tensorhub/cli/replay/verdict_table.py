"""What replay found, as people read it: a row for each version, and a line for each run that is not confirmed."""

from collections.abc import Iterator, Sequence
from typing import Final

from tensorhub._rollouts.replay import WORST_FIRST, ResponseVerdict, RunVerdict, Verdict, counts
from tensorhub._rollouts.responses import RunEngine
from tensorhub.cli.output import line, table

REASONS_MAX: Final = 20
"""Limit of the runs that are told one by one."""

_HEAD: Final = ("VERSION", "RUNS", "TOKENS", "CONFIRMED", "DIFFER", "GONE", "KEPT", "MAX DIFFERENCE", "MEAN")
_MEANS: Final[dict[Verdict, str]] = {"differs": "differ", "gone": "can't be scored", "kept": "can't be confirmed"}


def print_verdicts(verdicts: Sequence[ResponseVerdict], engine: RunEngine) -> None:
    """Print all of it; `engine` has scored."""
    runs = [each for verdict in verdicts for each in verdict.runs]
    if runs:
        table(_HEAD, _rows(runs), right=_HEAD)
        line("")
    told = list(_reasons(verdicts))
    for reason in told[:REASONS_MAX]:
        line(reason)
    if len(told) > REASONS_MAX:
        line(f"and {len(told) - REASONS_MAX} more: --json tells all")
    named = ", ".join(f"{count} {verdict}" for verdict, count in counts(each.verdict for each in verdicts).items())
    tokens = sum(each.end - each.start for each in runs)
    line(f"{len(verdicts)} responses ({tokens} tokens in {len(runs)} runs): {named}")
    line(f"scored in {engine.dtype} by {engine.kind}: {engine.build}")


def _rows(runs: Sequence[RunVerdict]) -> Iterator[tuple[object, ...]]:
    by_version = dict[int, list[RunVerdict]]()
    for each in runs:
        by_version.setdefault(each.version, []).append(each)
    for version, those in sorted(by_version.items()):
        found = counts(each.verdict for each in those)
        tokens = sum(each.end - each.start for each in those)
        differences = [
            (each.logprob_diff_max, each.logprob_diff_mean, each.end - each.start)
            for each in those
            if each.logprob_diff_max is not None and each.logprob_diff_mean is not None
        ]
        scored = sum(count for _, _, count in differences)
        numbers = (found.get(each, 0) for each in ("confirmed", "differs", "gone", "kept"))
        yield (
            version,
            len(those),
            tokens,
            *numbers,
            f"{max(most for most, _, _ in differences):.3g}" if scored else None,
            f"{sum(mean * count for _, mean, count in differences) / scored:.3g}" if scored else None,
        )


def _reasons(verdicts: Sequence[ResponseVerdict]) -> Iterator[str]:
    """Say of each run that is not confirmed why it is not, the worst first."""
    told = list[tuple[Verdict, str]]()
    for response in verdicts:
        where = f"{response.group}/{response.index}"
        if response.reason:
            told.append(("differs", f"{where} differs: {response.reason}"))
        told += [
            (
                each.verdict,
                f"{where} tokens {each.start} to {each.end} ({each.instance}) {_MEANS[each.verdict]}: {each.reason}",
            )
            for each in response.runs
            if each.verdict != "confirmed"
        ]
    for _, reason in sorted(told, key=lambda each: WORST_FIRST.index(each[0])):
        yield reason
