"""What a display of the demo does; and the two that write lines, for people without a terminal and for programs.

Always true: a line goes out whole and at once; neither kind writes an escape code.
"""

import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from tensorhub.demo.plot import LATECOMER, VICTIM
from tensorhub.demo.show import GB, MB, MS, Note, Show

INTRODUCTION: Final = (
    "A small Llama learns verses in one process, `trainer`, and publishes its weights as versions. Three others",
    "follow them version by version and generate, through a real registry, planner and NATS, and an agent each; every",
    f"replica has two shards. {VICTIM} is killed, with its agent, in the middle of a transfer, and comes back;",
    f"{LATECOMER} joins late and takes its weights from a peer. After each update the process digests (BLAKE2b) every",
    "byte of its own copy; all digests are compared with those that the trainer took before it published.",
)
PEACEFUL_INTRODUCTION: Final = (
    "A small Llama learns verses in one process, `trainer`, and publishes its weights as versions. Three others",
    "follow them version by version and generate, in a hub that ran before and goes on after; every replica has two",
    f"shards. {LATECOMER} joins late and takes its weights from a peer. Nobody is killed. After each update a process",
    "digests (BLAKE2b) every byte of its own copy; all digests are compared with those that the trainer took before it",
    "published.",
)
PLAIN_KINDS: Final = frozenset(
    {"started", "joined", "published", "held", "said", "killed", "wreck", "back", "joined-late", "trouble", "up"}
)


class Display(Protocol):
    """Shows the demo. `draw` is called some times a second, `tell` once for each note, `close` in any case."""

    def open(self, heading: str, introduction: Sequence[str] = INTRODUCTION) -> None:
        """Begin."""

    def tell(self, note: Note) -> None:
        """Take one line of the story."""

    def draw(self, show: Show, at_s: float) -> None:
        """Draw how things stand."""

    def sum_up(self, show: Show, faults: list[str], at_s: float) -> None:
        """Tell how it ended."""

    def close(self) -> None:
        """Give the terminal back."""


class Lines:
    """For a pipe: a line for each note."""

    def open(self, heading: str, introduction: Sequence[str] = INTRODUCTION) -> None:
        """Say what will be seen."""
        _write(f"{heading}\n")
        for line in introduction:
            _write(line)
        _write("")

    def tell(self, note: Note) -> None:
        """Write the note, if it is for people."""
        if note.kind in PLAIN_KINDS or note.is_event:
            _write(f"{note.at_s:6.1f} s  {note.replica:<10}{note.text}")

    def draw(self, show: Show, at_s: float) -> None:
        """The lines have told it already."""

    def sum_up(self, show: Show, faults: list[str], at_s: float) -> None:
        """Write a table, and the verdict."""
        _write("")
        rows = [SUMMARY_HEADS, *summary_rows(show)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(SUMMARY_HEADS))]
        for row in rows:
            cells = [
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            _write("  ".join(cells).rstrip())
        _write("")
        for line in verdict(show, faults, at_s):
            _write(line)

    def close(self) -> None:
        """Nothing to give back."""


class Objects:
    """For programs: a JSON object a line; the last one is the summary."""

    def open(self, heading: str, introduction: Sequence[str] = INTRODUCTION) -> None:
        """Nothing but objects."""

    def tell(self, note: Note) -> None:
        """Write the note with its facts."""
        fields: dict[str, Any] = {
            "kind": note.kind,
            "at_s": round(note.at_s, 3),
            "replica": note.replica,
            **note.facts,
        }
        _write(msgspec.json.encode(fields).decode())

    def draw(self, show: Show, at_s: float) -> None:
        """The objects have told it already."""

    def sum_up(self, show: Show, faults: list[str], at_s: float) -> None:
        """Write the last object."""
        summary = {
            "kind": "summary",
            "at_s": round(at_s, 3),
            "ok": not faults,
            "faults": faults,
            "versions": show.published,
            "loss_first": show.losses[0] if show.losses else None,
            "loss_last": show.losses[-1] if show.losses else None,
            "compared": show.comparison.compared,
            "nbytes_compared": show.comparison.nbytes,
            "differences": len(show.comparison.differences),
            "replicas": show.totals(),
        }
        _write(msgspec.json.encode(summary).decode())

    def close(self) -> None:
        """Nothing to give back."""


SUMMARY_HEADS: Final = (
    "replica",
    "version",
    "updates",
    "from trainer",
    "from peers",
    "GB/s",
    "waited",
    "at most",
    "equal",
    "at end",
)


def summary_rows(show: Show) -> list[tuple[str, ...]]:
    """Return the summary as text, a row for each replica."""
    return [_summary_row(total) for total in show.totals()]


def _summary_row(total: dict[str, Any]) -> tuple[str, ...]:
    wait, longest, rate = total["wait_s_median"], total["wait_s_max"], total["gb_s_median"]
    # The trainer's one comparison and each replica's last one is that at the end.
    equal = total["compared_equal"] - (1 if total["equal_at_end"] else 0)
    reads = bool(total["updates"])
    return (
        total["replica"],
        "-" if total["version"] is None else str(total["version"]),
        str(total["updates"]) if reads else "-",
        f"{total['nbytes_from_trainer'] / MB:.0f} MB" if reads else "-",
        f"{total['nbytes_from_peers'] / MB:.0f} MB" if reads else "-",
        "-" if rate is None else f"{rate:.1f}",
        "-" if wait is None else f"{wait * MS:.0f} ms",
        "-" if longest is None else f"{longest * MS:.0f} ms",
        f"{equal} of {total['updates']}" if reads else "-",
        {True: "equal", False: "DIFFERS", None: "-"}[total["equal_at_end"]],
    )


def verdict(show: Show, faults: list[str], at_s: float) -> list[str]:
    """Return the last lines: what was compared, and what was promised and not seen."""
    done = show.comparison
    if show.losses:
        loss = f"loss {show.losses[0]:.2f} -> {show.losses[-1]:.2f} in {len(show.losses)} steps"
    else:
        loss = "no step was taken"
    lines = [f"{show.published} versions in {at_s:.0f} s; {loss}"]
    if done.compared and not done.differences:
        lines.append(
            f"every byte of {done.compared} copies of {show.nbytes / MB:.0f} MB was compared with what the trainer "
            f"published, {done.nbytes / GB:.1f} GB in all: equal"
        )
    return lines + [f"FAILED: {fault}" for fault in faults]


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
