"""How the pieces of a read become messages of UCX. Pure.

Pieces that follow one another at both ends are one message, cut where it grows too long: UCX moves long messages best,
and the source gets only what fits between two others. Tiny pieces would cost a message each, since layouts align
tensors; so a run of them comes as one message together with the few bytes that lie between them, into memory of the
transport's own, and each is copied from there to where it belongs.

Invariant: every byte of a span is in exactly one message, and nothing of the destination but the spans is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A message is cut at this: UCX tells of nothing smaller, so a source is not taken for stalled while one comes within
`stall_s`, which is 0.8 MB/s by default. Longer messages are not faster."""

TINY_BYTES_MAX: Final = 64 * 1024
"""Pieces up to this size come packed: copying them again is cheaper than a message for each."""

GAP_BYTES_MAX: Final = 1024
"""Tiny pieces come together when at most this many bytes are between them at the source."""

MESSAGES_MAX: Final = 4096
"""The most messages of one request: as many as a batch has pieces."""


@dataclass(slots=True)
class MessagePlan:
    """Message i brings `nbytes[i]` bytes from `origin[i]` of the source to `to[i]` of the destination.

    From message `bounced` on they go to `to[i]` of the bounce instead, which has `bounce_bytes`.
    """

    origin: list[int] = field(default_factory=list)
    to: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    bounced: int = 0
    bounce_bytes: int = 0
    packed: dict[int, int] = field(default_factory=dict)
    """Where in the bounce each packed span begins, by its number."""

    def _add(self, origin: int, to: int, nbytes: int) -> None:
        self.origin.append(origin)
        self.to.append(to)
        self.nbytes.append(nbytes)

    def cut(self, run: "_Run") -> None:
        """Bring a run straight to where it belongs, in messages that are not too long."""
        for at in range(0, run.nbytes, MESSAGE_BYTES_MAX):
            self._add(run.origin + at, run.to + at, min(MESSAGE_BYTES_MAX, run.nbytes - at))

    def pack(self, runs: "Sequence[_Run]", origin: Sequence[int]) -> None:
        """Bring several runs in one message, by way of the bounce."""
        begin, end = runs[0].origin, runs[-1].origin + runs[-1].nbytes
        for run in runs:
            for number in run.spans:
                self.packed[number] = self.bounce_bytes + origin[number] - begin
        self._add(begin, self.bounce_bytes, end - begin)
        self.bounce_bytes += end - begin


def messages_in(memory: memoryview) -> list[memoryview]:
    """Cut memory into messages that are not too long."""
    return [memory[at : at + MESSAGE_BYTES_MAX] for at in range(0, len(memory), MESSAGE_BYTES_MAX)]


@dataclass(slots=True)
class _Run:
    """Spans that follow one another at both ends."""

    origin: int
    to: int
    nbytes: int
    spans: list[int]


def messages_of(to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> MessagePlan:
    """Return the messages that bring span i: `nbytes[i]` bytes from `origin[i]` to `to[i]`. Empty spans need none."""
    messages = MessagePlan()
    groups = _near(_runs(to, origin, nbytes))
    for group in groups:
        if len(group) == 1:
            messages.cut(group[0])
    messages.bounced = len(messages.nbytes)
    for group in groups:
        if len(group) > 1:
            messages.pack(group, origin)
    return messages


def _runs(to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    for number, size in enumerate(nbytes):
        if not size:
            continue
        last = runs[-1] if runs else None
        if last and origin[number] == last.origin + last.nbytes and to[number] == last.to + last.nbytes:
            last.nbytes += size
            last.spans.append(number)
        else:
            runs.append(_Run(origin[number], to[number], size, [number]))
    return runs


def _near(runs: list[_Run]) -> list[list[_Run]]:
    """Join tiny runs that are near one another at the source; every other one stays alone."""
    groups: list[list[_Run]] = []
    for run in runs:
        group = groups[-1] if groups else None
        if group and _fits(group, run):
            group.append(run)
        else:
            groups.append([run])
    return groups


def _fits(group: list[_Run], run: _Run) -> bool:
    last = group[-1]
    gap = run.origin - last.origin - last.nbytes
    return (
        max(run.nbytes, last.nbytes) <= TINY_BYTES_MAX
        and 0 <= gap <= GAP_BYTES_MAX
        and run.origin + run.nbytes - group[0].origin <= MESSAGE_BYTES_MAX
    )
