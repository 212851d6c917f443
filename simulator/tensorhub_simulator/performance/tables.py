"""What a comparison says, as tables for people and as one JSON object a line for programs."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from rich import box
from rich.table import Table

from tensorhub_simulator.performance.calibration import Compared, errors
from tensorhub_simulator.performance.comparison import WANTED, BaselineComparison, Case
from tensorhub_simulator.performance.config import Cluster

TIERS_MAX: Final = 12
"""This many tiers of links are shown, those that carried most."""

NONE_FILLED: Final = "none"
"""In place of a factor, where one of both had no replica to fill, or none that stayed for it."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario with everything that was run of it."""

    cluster: Cluster
    cases: tuple[Case, ...]
    pairs: tuple[BaselineComparison, ...]

    def of(self, kind: str) -> list[BaselineComparison]:
        """Return the pairs of one kind."""
        return [pair for case, pair in zip(self.cases, self.pairs, strict=True) if case.kind == kind]

    @property
    def itself(self) -> BaselineComparison:
        """The pair of the file as it stands."""
        return self.of("itself")[0]


def seconds(value: float) -> str:
    """Return seconds with as many digits as mean something."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"  # noqa: PLR2004 (digits)


def tables(finding: Finding) -> Iterator[Table | str]:
    """Yield what to print of a scenario."""
    yield f"{finding.cluster.name}: {finding.cluster.about}" if finding.cluster.about else finding.cluster.name
    sizes = finding.of("size")
    yield _stalls([*([] if any(_same(p, finding.itself) for p in sizes) else [finding.itself]), *sizes])
    yield _links(finding.itself)
    others = finding.of("variation")
    if others:
        yield _variations(others)
    yield summary(finding)


def _same(one: BaselineComparison, other: BaselineComparison) -> bool:
    return one.gpus == other.gpus


def _stalls(pairs: Sequence[BaselineComparison]) -> Table:
    table = Table(title="stall of a GPU in each update, s", title_justify="left", box=box.SIMPLE)
    heads = ("GPUs", "mean", "of it waits", "p99", "most", "all have it", "baseline mean", "of it waits", "all have it")
    for head in (*heads, "bytes / link", "factor"):
        table.add_column(head, justify="right")
    for pair in sorted(pairs, key=lambda each: each.gpus):
        ours, other = pair.ours, pair.baseline
        stalls = (ours.stall_s.mean, ours.waits_s, ours.stall_s.p99, ours.stall_s.most, ours.last_s)
        cells = (*stalls, other.stall_s.mean, other.waits_s, other.last_s, pair.bound_s)
        table.add_row(str(pair.gpus), *map(seconds, cells), _factor(pair))
    return table


def _factor(pair: BaselineComparison) -> str:
    if pair.factor is None:
        return NONE_FILLED
    return f"{pair.stuck} stuck" if pair.stuck else f"{pair.factor:.2f}"


def _links(pair: BaselineComparison) -> Table:
    table = Table(title=f"GB carried, {pair.gpus} GPUs", title_justify="left", box=box.SIMPLE)
    for head in ("links", "ours", "baseline"):
        table.add_column(head, justify="left" if head == "links" else "right")
    tiers = sorted(
        {*pair.ours.link_gbytes, *pair.baseline.link_gbytes},
        key=lambda tier: (-max(pair.ours.link_gbytes.get(tier, 0), pair.baseline.link_gbytes.get(tier, 0)), tier),
    )
    for tier in tiers[:TIERS_MAX]:
        cells = [f"{side.link_gbytes.get(tier, 0):.0f}" for side in (pair.ours, pair.baseline)]
        table.add_row(tier, *cells)
    return table


def _variations(pairs: Sequence[BaselineComparison]) -> Table:
    table = Table(title="if instead", title_justify="left", box=box.SIMPLE)
    for head in ("", "ours, s", "baseline, s", "bytes / link, s", "factor"):
        table.add_column(head, justify="right" if head else "left")
    for pair in sorted(pairs, key=lambda each: -(each.factor or 0.0)):
        cells = (pair.ours.stall_s.mean, pair.baseline.stall_s.mean, pair.bound_s)
        table.add_row(pair.what, *map(seconds, cells), _factor(pair))
    return table


def summary(finding: Finding) -> str:
    """Return the factor, its range, and what was wanted of it, in a sentence."""
    wanted = WANTED[finding.cluster.baseline]
    text = _itself(finding.itself, wanted)
    others = [each.factor for each in finding.of("variation") if each.factor is not None]
    if not others:
        return f"{text}."
    reached = sum(1 for each in others if each >= wanted)
    return (
        f"{text}; {min(others):.2f} to {max(others):.0f} where something is assumed otherwise, "
        f"{reached} of {len(others)} times at least {wanted:g}."
    )


def _itself(pair: BaselineComparison, wanted: float) -> str:
    if pair.stuck:
        return (
            f"no factor with {pair.gpus} GPUs: {pair.stuck} of our updates have no end, for no piece comes within a "
            "read's patience (a link is too slow, or model.piece_mib too large)"
        )
    if pair.factor is None:
        return f"no factor with {pair.gpus} GPUs: on one of the two sides no replica was filled and stayed for it"
    return f"factor {pair.factor:.1f} with {pair.gpus} GPUs (the paper measured {wanted:g} on its own)"


def calibrated(found: Sequence[Compared]) -> str:
    """Return how far the models are from real runs, in a sentence."""
    ours = errors([each.error for each in found])
    stars = errors([each.baseline_error for each in found if each.baseline_seconds is not None])
    return (
        f"Calibration, against {len(found)} real runs with 1 to 8 readers: our model is off by {ours.median:.1%} in "
        f"the median and {ours.worst:.1%} at worst, the baseline's star by {stars.median:.1%} and {stars.worst:.1%}."
    )


def objects(finding: Finding) -> Iterator[dict[str, Any]]:
    """Yield a scenario's JSON objects: each pair, then each replica's updates."""
    for case, pair in zip(finding.cases, finding.pairs, strict=True):
        tree = msgspec.to_builtins(pair)
        del tree["updates"]
        yield {"type": "pair", "scenario": finding.cluster.name, "kind": case.kind, **tree, "factor": pair.factor}
    for side, updates in zip(("ours", "baseline"), finding.itself.updates, strict=True):
        for update in updates:
            yield {
                "type": "update",
                "scenario": finding.cluster.name,
                "side": side,
                **msgspec.to_builtins(update),
            }


def calibration_object(found: Sequence[Compared]) -> dict[str, Any]:
    """Return the calibration for programs."""
    stars = [each.baseline_error for each in found if each.baseline_seconds is not None]
    return {
        "type": "calibration",
        "runs": len(found),
        "ours": msgspec.to_builtins(errors([each.error for each in found])),
        "baseline": msgspec.to_builtins(errors(stars)),
    }
