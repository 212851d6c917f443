"""How far the runs are: a live table on a terminal, and a line now and then elsewhere."""

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.demo_rl.training_run import TrainingRun

LINE_EVERY_STEPS: Final = 10
BAR: Final = 30
"""Characters of a whole bar of reward 1."""


class Progress:
    """Shows runs that change."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._runs: list[TrainingRun] = []
        self._said: dict[TrainingRun, int] = {}

    def changed(self, run: TrainingRun) -> None:
        """Show how far a run is."""
        if run not in self._runs:
            self._runs.append(run)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        step = 0 if run.last is None else run.last.step
        if step != self._said.get(run, 0) and (step % LINE_EVERY_STEPS == 0 or step in {1, run.steps}):
            self._said[run] = step
            self._console.print(" ".join(_cells(run)), highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("RUN", "STEP", "REWARD", "TOKENS/S", "KILLED", "RUNNERS"):
            drawn.add_column(name)
        for run in self._runs:
            drawn.add_row(*_cells(run))
        return drawn

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _cells(run: TrainingRun) -> tuple[str, ...]:
    reward = 0.0 if run.last is None else run.last.reward
    killed = ", ".join(f"{who} {count}" for who, count in sorted(run.kills.items()))
    instances = () if run.status is None else run.status.instances
    states = ", ".join(f"{each.runner} {each.state} {each.version or '-'}" for each in instances)
    return (
        f"seed {run.seed} {'with kills' if run.is_disturbed else 'undisturbed'}",
        f"{0 if run.last is None else run.last.step:3d}/{run.steps}",
        f"{reward:.3f} {'█' * round(BAR * reward):<{BAR}}",
        "-" if run.status is None else f"{run.status.tokens_per_s:5.0f}",
        killed or "-",
        states if run.status is not None else "no manager",
    )
