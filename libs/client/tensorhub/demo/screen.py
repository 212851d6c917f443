"""The demo on a terminal: a table that stands still while the numbers in it change.

Always true: it is drawn only when told to, by the thread that tells; it never grows higher than `EVENTS_SHOWN` and the
rows need, so it fits a small window; what it showed last stays in the scroll-back.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tensorhub.demo.display import INTRODUCTION, SUMMARY_HEADS, summary_rows, verdict
from tensorhub.demo.show import MB, MS, Note, Row, Show, origin_of

EVENTS_SHOWN: Final = 6
SPARKS: Final = "▁▂▃▄▅▆▇█"
SPARKS_MAX: Final = 48
STYLES: Final = {
    "training": "yellow",
    "publishing": "bold yellow",
    "generating": "cyan",
    "KILLED": "bold white on red",
    "starting again": "red",
    "equal": "green",
    "DIFFERS": "bold red",
}


class Screen:
    """Draws with rich."""

    def __init__(self) -> None:
        self._console = Console()
        self._events: deque[Note] = deque(maxlen=EVENTS_SHOWN)
        self._live: Live | None = None

    def open(self, heading: str, introduction: Sequence[str] = INTRODUCTION) -> None:
        """Say what will be seen, and begin to draw below."""
        self._console.print(Text(heading, style="bold"))
        self._console.print(Text(" ".join(introduction), style="dim"))
        self._console.print()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        self._live.update(Text("bringing up NATS, a registry, a planner and the agents …"), refresh=True)

    def tell(self, note: Note) -> None:
        """Keep what is out of the ordinary, to show it below the table."""
        if note.is_event:
            self._events.append(note)

    def draw(self, show: Show, at_s: float) -> None:
        """Draw everything anew."""
        if self._live is not None:
            self._live.update(Group(_loss(show, at_s), _table(show), _story(self._events)), refresh=True)

    def sum_up(self, show: Show, faults: list[str], at_s: float) -> None:
        """Draw for the last time, and the summary below."""
        self.draw(show, at_s)
        self.close()
        self._console.print(Rule(style="dim"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, head in enumerate(SUMMARY_HEADS):
            table.add_column(head, justify="left" if number == 0 else "right")
        for row in summary_rows(show):
            table.add_row(*row)
        self._console.print(table)
        self._console.print()
        for line in verdict(show, faults, at_s):
            style = "bold red" if line.startswith("FAILED") else "bold green" if line.endswith("equal") else ""
            self._console.print(Text(line, style=style))

    def close(self) -> None:
        """Give the terminal back."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _loss(show: Show, at_s: float) -> Text:
    text = Text(f"{at_s:3.0f} s", style="bold")
    if show.losses:
        text.append(f"   step {len(show.losses)}   loss {show.losses[0]:.2f} ", style="default")
        text.append(_sparks(show.losses[-SPARKS_MAX:]), style="yellow")
        text.append(f" {show.losses[-1]:.2f}", style="bold yellow")
    compared, differing = show.comparison.compared, len(show.comparison.differences)
    text.append(f"   copies equal: {compared - differing} of {compared}", style="red" if differing else "green")
    return text


def _sparks(values: list[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in values)


def _table(show: Show) -> Table:
    table = Table(box=SIMPLE_HEAD, expand=True, pad_edge=False, header_style="bold", border_style="dim")
    table.add_column("replica", no_wrap=True, min_width=9)
    table.add_column("holds", justify="right", no_wrap=True, min_width=5)
    table.add_column("state", no_wrap=True, min_width=11)
    table.add_column("from", no_wrap=True, min_width=9)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("waited", justify="right", no_wrap=True, min_width=7)
    table.add_column("says", no_wrap=True, ratio=1, overflow="ellipsis")
    for row in show.rows.values():
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[Text | str, ...]:
    holds = Text("-" if row.version is None else str(row.version), style="bold")
    state = Text(row.state, style=STYLES.get(row.state, "default"))
    read = row.last
    if read is None:
        return row.replica, holds, state, "-", "-", "-", "-", Text(row.text, style="dim")
    rate = "-" if read.gb_s is None else f"{read.gb_s:.1f}"
    return (
        row.replica,
        holds,
        state,
        origin_of(read.sources),
        f"{read.nbytes / MB:.0f}",
        rate,
        f"{read.wait_s * MS:.0f} ms",
        Text(row.text, style="italic"),
    )


def _story(notes: Iterable[Note]) -> Table:
    story = Table.grid(padding=(0, 1))
    for style in ("dim", "bold", "default"):
        story.add_column(style=style, no_wrap=style != "default")
    for note in notes:
        story.add_row(f"{note.at_s:5.1f} s", note.replica, Text(note.text))
    return story
