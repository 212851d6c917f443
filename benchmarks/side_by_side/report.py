"""A run as Markdown that reads well in a terminal too: what is printed, and what docs/design/benchmarks.md holds."""

import statistics
from collections.abc import Mapping

from benchmarks import page
from benchmarks.llama import TENSORS
from benchmarks.side_by_side import goals
from benchmarks.side_by_side.ours import STAGES
from benchmarks.side_by_side.results import Line, Part, Result, Small

HEAD = ("", "1→1, ms", "min – max", "memcpys", "1→4, ms", "min – max", "memcpys")
NOT_MEASURED = "–"


def whole(result: Result) -> str:
    """Return everything."""
    parts = [of_machine(result.machine), *(of_part(part, result.mib) for part in result.parts), of_goals(result)]
    return "\n\n".join([*parts, of_end(result)])


def of_machine(facts: Mapping[str, str]) -> str:
    """Say what the figures mean nothing without."""
    return page.table(("machine and settings", ""), list(facts.items()))


def of_part(part: Part, mib: int) -> str:
    """Show one part: everybody in it, our stages, and the small model."""
    title = f"### {mib} MiB in {TENSORS} tensors over {part.transport}, digests {goals.on_off(part)}"
    found = [title, page.table(HEAD, [_row(line) for line in part.lines])]
    found += [f"{line.title} is left out: {line.failed}." for line in part.lines if line.failed is not None]
    if part.ours.of(4):
        found.append(of_stages(part.ours))
    if part.small is not None:
        found.append(of_small(part.small, part.transport))
    return "\n\n".join(found)


def of_stages(ours: Line) -> str:
    """Show where the time of a read goes."""
    rows = []
    for readers in (1, 4):
        besides = ours.besides(readers)
        names = [*STAGES, "publish", "unpublish", "source's processor"]
        rows.append((f"1→{readers}", *(_ms(besides[name]) for name in names)))
    return page.table(("stage, ms", *STAGES, "publish", "unpublish", "source's processor"), rows)


def of_small(small: Small, transport: str) -> str:
    """Show the latency of the small model and what it costs."""
    rows = [
        (name, _ms(statistics.median(times)), _ms(sorted(times)[int(len(times) * 0.9)]), f"{len(times)}")
        for name, times in (("publish to all ready", small.ready), ("publish returned to all ready", small.behind))
    ]
    stages = {("publish and round" if stage == "round" else stage): s for stage, s in small.stages.items()}
    return "\n\n".join(
        (
            f"#### 1 MiB over {transport}, 4 replicas waiting, digests on",
            page.table(("", "p50, ms", "p90, ms", "publications"), rows),
            page.table(("stage, ms", *stages), [("p50", *map(_ms, stages.values()))]),
            page.table(
                ("processor time of a cycle, ms", *small.processor, "in all", "log entries"),
                [
                    (
                        "mean",
                        *map(_ms, small.processor.values()),
                        _ms(sum(small.processor.values())),
                        f"{small.entries:.0f}",
                    )
                ],
            ),
        )
    )


def of_goals(result: Result) -> str:
    """Show what was to be reached, and whether it was."""
    rows = [(goal.what, goal.measured, goal.wanted, "met" if goal.met else "missed") for goal in goals.of(result)]
    return "### Goals\n\n" + page.table(("goal", "measured", "wanted", ""), rows)


def of_end(result: Result) -> str:
    """Say how long it took and how busy others kept the machine."""
    return f"The run took {result.seconds:.0f} s, in which other programs used {result.others:.0%} of the processors."


def _row(line: Line) -> tuple[str, ...]:
    cells: list[str] = []
    for readers in (1, 4):
        times = line.seconds(readers)
        if not times:
            cells += [NOT_MEASURED] * 3
            continue
        spread = f"{_ms(min(times))} – {_ms(max(times))}"
        cells += [_ms(statistics.median(times)), spread, f"{line.in_memcpys(readers):.2f}"]
    title = f"**{line.title}**" if line.is_ours else line.title
    return (title, *cells)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
