"""Draws spans as a waterfall: one row each, indented below its parent, with a bar on one axis of time. Pure.

The axis covers what the transfers did. What happened long before (a publication of an hour ago, the wait for a version)
would press all else into one column, so it is drawn at the edge, with an arrow.
"""

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from tensorhub.cli.output import size
from tensorhub.cli.trace.responses import attempt_account, attempt_reasons
from tensorhub.cli.trace.span_tree import Node, forest, rows
from tensorhub_common.protocol.spans import ATTEMPT, QUEUE, RESPONSE, SUBMIT, TRANSFER, Attribute, FinishedSpan

NAME_CHARS_MAX: Final = 32
WHERE_CHARS_MAX: Final = 20
TOOK_CHARS: Final = 8
BAR_CHARS_MIN: Final = 12
WIDTH_WITH_WHERE_MIN: Final = 64
WIDTH_WITH_BARS_MIN: Final = 44
WIDTH_MIN: Final = 20

DEPTH_MAX: Final = 10
"""What is deeper is not indented any further."""

STRETCH: Final = 2
"""The axis reaches back to the publication if that makes it at most this many times as long."""

WAITS: Final = frozenset(
    {TRANSFER, "wait", "round", "update", "replicate", "publish", "round.decided", RESPONSE, QUEUE, SUBMIT}
)
"""These hold a wait for others, or for the version, so they don't say where the axis begins."""

_GAP: Final = "  "
_NS_PER_S: Final = 1_000_000_000
_READ: Final = "read"
LOST: Final = "lost"
"""How the end of a read begins whose source was left out."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars and marks are made of."""

    bar: str = "█"
    before: str = "◂"
    after: str = "▸"
    lost: str = "✗"


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(bar="#", before="<", after=">", lost="x")


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that is shown, in nanoseconds since 1970."""

    start: int
    end: int

    def cells(self, span: FinishedSpan, width: int) -> tuple[int, int]:
        """Return the first cell of a span's bar, and the one after its last; a bar has at least one."""
        long = max(self.end - self.start, 1)
        first = min(max((span.start_ns - self.start) * width // long, 0), width - 1)
        last = min(max(-((self.start - span.end_ns) * width // long), first + 1), width)
        return first, last


def axis_of(spans: Sequence[FinishedSpan], wanted: Collection[str]) -> Axis:
    """Choose the time that is shown: what the wanted transfers did, and what led to it if that is not far away."""
    inside = _below(spans, wanted)
    led = [span for span in spans if (span.trace, span.span) in inside] or list(spans)
    begun = [span for span in led if span.name not in WAITS] or led
    start = min((span.start_ns for span in begun), default=0)
    end = max((span.end_ns for span in led), default=start)
    long = max(end - start, 1)
    reach = [span.start_ns for span in spans if start - STRETCH * long <= span.start_ns]
    return Axis(min(reach, default=start), end)


def _below(spans: Sequence[FinishedSpan], wanted: Collection[str]) -> set[tuple[str, str]]:
    """Return the places of the wanted spans, and of all below them."""
    inside = {(span.trace, span.span) for span in spans if span.span in wanted}
    for node in forest(spans):
        for _, span in rows([node]):
            if span.parent is not None and (span.trace, span.parent) in inside:
                inside.add((span.trace, span.span))
    return inside


def draw(roots: Sequence[Node], wanted: Collection[str], width: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """Return the lines of the picture, none longer than `width` (of at least `WIDTH_MIN`)."""
    drawn = list(rows(roots))
    axis = axis_of([span for _, span in drawn], wanted)
    sheet = _Sheet.of(drawn, axis, max(width, WIDTH_MIN), glyphs)
    lines = [sheet.head()]
    for depth, span in drawn:
        lines.append(sheet.row(depth, span))
        lines += sheet.notes(depth, span)
    return lines


@dataclass(frozen=True, slots=True)
class _Sheet:
    """The columns, and how wide each is; 0: left out."""

    axis: Axis
    width: int
    name: int
    where: int
    bar: int
    glyphs: Glyphs

    @classmethod
    def of(cls, drawn: Sequence[tuple[int, FinishedSpan]], axis: Axis, width: int, glyphs: Glyphs) -> "_Sheet":
        name = min(max((2 * depth + len(_name(span, glyphs)) for depth, span in drawn), default=4), NAME_CHARS_MAX)
        where = min(max((len(_where(span)) for _, span in drawn), default=0), WHERE_CHARS_MAX)
        where = where if width >= WIDTH_WITH_WHERE_MIN else 0
        left = width - TOOK_CHARS - len(_GAP) - (where + len(_GAP) if where else 0)
        bar = left - name - len(_GAP)
        if bar < BAR_CHARS_MIN and width >= WIDTH_WITH_BARS_MIN:
            bar = BAR_CHARS_MIN
        if bar < BAR_CHARS_MIN:
            return cls(axis, width, max(left, 1), where, 0, glyphs)
        return cls(axis, width, left - bar - len(_GAP), where, bar, glyphs)

    def head(self) -> Text:
        """The names of the columns, and the ends of the axis."""
        whole = took(self.axis.end - self.axis.start)
        scale = f"0{whole:>{self.bar - 1}}" if self.bar else ""
        return self._line("SPAN", "WHERE", Text(scale), "TOOK", "dim")

    def row(self, depth: int, span: FinishedSpan) -> Text:
        """One span."""
        style = "red" if trouble(span) else "bold" if span.name in {TRANSFER, RESPONSE} else ""
        name = 2 * min(depth, DEPTH_MAX) * " " + _name(span, self.glyphs)
        return self._line(name, _where(span), self._bar(span), took(span.end_ns - span.start_ns), style)

    def notes(self, depth: int, span: FinishedSpan) -> list[Text]:
        """What else is to be said of a span, on lines of its own below it."""
        reasons = attempt_reasons(span) if span.name == ATTEMPT else ()
        said = [(text, "dim") for text in (_account(span), *reasons) if text]
        said += [(text, "red") for text in (trouble(span),) if text]
        indent = min(2 * depth + 2, self.width // 3) * " "
        return [
            Text(line, style)
            for text, style in said
            for line in textwrap.wrap(text, self.width, initial_indent=indent, subsequent_indent=f"{indent}  ")
        ]

    def _bar(self, span: FinishedSpan) -> Text:
        if not self.bar:
            return Text("")
        if span.end_ns < self.axis.start:
            return Text(_cut(f"{self.glyphs.before} {took(self.axis.start - span.start_ns)} before", self.bar), "dim")
        first, last = self.axis.cells(span, self.bar)
        cells = list(" " * first + self.glyphs.bar * (last - first))
        if span.start_ns < self.axis.start:
            cells[0] = self.glyphs.before
        if span.end_ns > self.axis.end:
            cells[-1] = self.glyphs.after
        return Text("".join(cells), _color(span))

    def _line(self, name: str, where: str, bar: Text, took_text: str, style: str) -> Text:
        line = Text(_cut(name, self.name).ljust(self.name), style)
        if self.where:
            line.append(_GAP + _cut(where, self.where).ljust(self.where), "dim")
        if self.bar:
            bar.pad_right(self.bar - len(bar))
            line.append(_GAP)
            line.append(bar)
        line.append(f"{_GAP}{took_text:>{TOOK_CHARS}}", style)
        return line


# ------------------------------------------------------------------------------------------------------------ words


def took(nanoseconds: int) -> str:
    """Return a duration in `TOOK_CHARS` characters or fewer."""
    seconds = max(nanoseconds, 0) / _NS_PER_S
    for bound, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < bound:
            number = seconds * factor
            return f"{number:.0f} {unit}" if number >= 100 or unit == "µs" else f"{number:.1f} {unit}"  # noqa: PLR2004
    return f"{seconds / 3600:.1f} h"


def number(value: Attribute | None) -> float:
    """Return an attribute that should be a number; 0 where it is none."""
    return value if isinstance(value, int | float) else 0


def _name(span: FinishedSpan, glyphs: Glyphs) -> str:
    wrong = trouble(span)
    return f"{span.name} {glyphs.lost}{' lost' if wrong.startswith(LOST) else ''}" if wrong else span.name


def _where(span: FinishedSpan) -> str:
    service = span.service.removeprefix("tensorhub-")
    # A worker has no name of its own, so its instance is the number of its process.
    return f"{service} {span.instance}" if span.instance.isdigit() else span.instance or service


def _color(span: FinishedSpan) -> str:
    colors = {_READ: "cyan", ATTEMPT: "cyan", TRANSFER: "green", RESPONSE: "green"}
    return "red" if trouble(span) else colors.get(span.name, "blue")


def _account(span: FinishedSpan) -> str:
    """Say what a read from one source brought, and why it was this source; or what an attempt made."""
    get = span.attributes.get
    if span.name == ATTEMPT:
        return attempt_account(span)
    if span.name != _READ:
        return ""
    nbytes, seconds = number(get("tensorhub.bytes")), (span.end_ns - span.start_ns) / _NS_PER_S
    rate = number(get("tensorhub.GBps")) or (nbytes / 1e9 / seconds if seconds > 0 else 0.0)
    pieces, retries = int(number(get("tensorhub.pieces"))), int(number(get("tensorhub.retries")))
    brought = f"{size(nbytes)}, {rate:.2f} GB/s, {get('tensorhub.transport', '?')}, {pieces} pieces, {retries} retried"
    brought += _encoded(span, nbytes)
    why = get("tensorhub.why")
    return f"{brought}, from {get('tensorhub.source.agent', '?')}{f': {why}' if why else ''}"


def _encoded(span: FinishedSpan, nbytes: float) -> str:
    """Say how bytes came otherwise than as they are, and which part of them that was; "" where none did."""
    get = span.attributes.get
    encodings = get("tensorhub.encodings")
    if not isinstance(encodings, tuple | list) or not encodings or nbytes <= 0:
        return ""
    base = get("tensorhub.base")
    ways = [f"delta from {base}" if way == "delta" and base is not None else str(way) for way in encodings]
    why = get("tensorhub.encodings_why")
    reason = f" ({why})" if why else ""
    return f", {' and '.join(ways)}, {100 * number(get('tensorhub.wire_bytes')) / nbytes:.1f} % of the bytes{reason}"


def trouble(span: FinishedSpan) -> str:
    """Say what went wrong in a span; "" where all went well."""
    end = str(span.attributes.get("tensorhub.end", ""))
    return span.error or (end if end.startswith(LOST) else "")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
