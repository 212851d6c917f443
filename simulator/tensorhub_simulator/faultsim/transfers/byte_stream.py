"""How the bytes of one source reach a reader: out of mapped memory, or over a wire that goes on by itself.

`local`: the reader copies out of the source's memory, which needs nothing of the source. `ucxx`: the source sends, half
a piece at a time, whatever stands in its memory just then, for all that it was asked for and until it hears that the
reader has closed; so it sends on after it was stopped and woken. What arrives, in any order, is written as long as the
reader's receives are open, whatever either side believes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.byte_ranges import Spans
from tensorhub_simulator.faultsim.models.deltas import Delta, Overwrites
from tensorhub_simulator.faultsim.models.host import Session
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.segments import Segment
from tensorhub_simulator.faultsim.models.unit_compute import UnitCompute
from tensorhub_simulator.faultsim.observations import PieceSent

STUCK_S: Final = 0.05
ON_THE_WAY_MAX: Final = 4
"""This many halves of pieces are on the wire at most."""

Half = tuple[int, int]
"""A piece and which half of it."""


class ByteSession(Session, Protocol):
    """A session whose bytes these are."""

    job: Job
    spans: Spans
    computing: UnitCompute | None
    receives: "OpenReceives"
    is_local: bool
    source_life: int

    def here(self, number: int) -> Sequence[int]:
        """Return which bytes of the reader's memory a piece or unit is."""
        ...


@dataclass(slots=True)
class Landing:
    """A batch that is being written, and how many halves of its pieces are awaited."""

    batch: int
    pieces: list[int]
    halves: int


class OpenReceives:
    """The reader's open receives of one source: where its bytes may land, and how much has."""

    def __init__(self, link: ByteSession) -> None:
        """Begin with none."""
        self.link = link
        self.open = True
        self._batches: dict[int, Landing] = {}
        """By piece, the batch that it belongs to."""

    def post(self, batch: int, pieces: list[int]) -> None:
        """Let these pieces be written from now on."""
        segment = self._segment
        for piece in pieces:
            for at in self.link.here(piece):
                other = segment.writers.get(at)
                if other is not None:
                    what = f"piece {piece} of {self.link.key} is asked for while {other} may write"
                    raise Violation("one writer", what)
                segment.writers[at] = self.link
        landing = Landing(batch, pieces, 2 * len(pieces))
        self._batches.update(dict.fromkeys(pieces, landing))

    @property
    def awaited(self) -> bool:
        """Whether there are any."""
        return any(landing.halves for landing in self._batches.values())

    @property
    def _segment(self) -> Segment:
        return self.link.reader.stored[self.link.key].target

    def land(self, half: Half, where: Sequence[int], data: bytes) -> Landing | None:
        """Write half a piece; returns the batch that has ended with it."""
        piece = half[0]
        if self.link.key not in self.link.reader.stored:
            raise Violation("one writer", f"piece {piece} of {self.link.key} is written into memory that was freed")
        segment = self._segment
        if any(segment.writers.get(at) is not self.link for at in where):
            raise Violation("one writer", f"piece {piece} of {self.link.key} is written by a source that was closed")
        if self.link.computing is None or not self.link.computing.is_partial(piece):
            self.link.reader.written_by(self.link.key, where, data)
        elif data:
            self.link.computing.land(piece, data)
        landing = self._batches[piece]
        landing.halves -= 1
        if landing.halves:
            return None
        for done in landing.pieces:
            for at in self.link.here(done):
                segment.writers.pop(at, None)
        return landing

    def again(self, landing: Landing, pieces: list[int]) -> None:
        """Let these pieces of a batch that has just landed be written once more, before it is told of."""
        landing.halves = 2 * len(pieces)
        for piece in pieces:
            self._segment.writers.update(dict.fromkeys(self.link.here(piece), self.link))

    def close(self) -> None:
        """Let nothing be written any more."""
        self.open = False
        self.forget()

    def forget(self) -> None:
        """What the reader believes once it is told that the source is closed."""
        place = self.link.reader.stored.get(self.link.key)
        if place is not None:
            for at in [at for at, writer in place.target.writers.items() if writer is self.link]:
                del place.target.writers[at]


class ByteStream:
    """The bytes of one source on their way."""

    def __init__(
        self,
        link: ByteSession,
        memory: Segment,
        arrived: Callable[[Half, Sequence[int], bytes | Overwrites], None],
        delta: Delta | None = None,
    ) -> None:
        """Bring them out of the source's memory to `arrived`; with a delta only what changed."""
        self._delta = delta
        self._plain: set[int] = set()
        """Pieces that are wanted as they are all the same."""
        self.link, self.memory, self._arrived = link, memory, arrived
        self.asked: deque[Half] = deque()
        self._on_the_way = 0
        self._sending = False
        self._raw: dict[int, bytes] = {}
        """The first half of what a piece is computed of."""

    def ask(self, pieces: list[int]) -> None:
        """Ask for pieces."""
        self.asked.extend((piece, half) for piece in pieces for half in (0, 1))
        self._go_on()

    def ask_plain(self, pieces: list[int]) -> None:
        """Ask for pieces as they are."""
        self._plain.update(pieces)
        self.ask(pieces)

    def is_patched(self, piece: int) -> bool:
        """Tell whether of a piece only what changed is sent."""
        return self._delta is not None and piece not in self._plain

    def stop(self) -> None:
        """The source has heard that the reader is gone."""
        self.asked.clear()

    def _go_on(self) -> None:
        if self._sending or not self.asked or self._on_the_way >= ON_THE_WAY_MAX:
            return
        self._sending = True
        link, clock = self.link, self.link.job.clock
        delay_s = link.source.lag() * link.job.slowness
        if link.is_local:
            clock.after(delay_s, link.reader, self._copy, link.reader_life)
        else:
            clock.after(delay_s * link.source.drag, link.source, self._send, link.source_life)

    def _next(self) -> tuple[Half, Sequence[int], bytes | Overwrites]:
        piece, half = self.asked.popleft()
        there, here = self.link.spans.there(piece), self.link.spans.here(piece)
        source = self.link.source.core if self.link.source_lives else None
        sent = PieceSent(source, self.link.source_key, self.link.lease, piece, there, self.memory.table)
        self.link.job.observe(sent)
        middle = len(there) // 2
        part = slice(middle, None) if half else slice(None, middle)
        computing = self.link.computing
        if computing is not None and computing.form(piece).cast:
            # It is read at two moments all the same, and comes as a whole.
            raw = self.memory.get(there[part])
            if not half:
                self._raw[piece] = raw
                return (piece, half), (), b""
            return (piece, half), self.link.here(piece), computing.computed(piece, self._raw.pop(piece) + raw)
        there, here = there[part], here[part]
        if self._delta is not None and self.is_patched(piece):
            return (piece, half), here, self._delta.part(there)
        return (piece, half), here, self.memory.get(there)

    def _copy(self) -> None:
        """The reader copies out of what is mapped."""
        self._sending = False
        if self.asked and self.link.receives.open:
            self._arrived(*self._next())
            self._go_on()

    def _send(self) -> None:
        """The source sends; what is sent arrives later, also if it dies meanwhile."""
        self._sending = False
        link = self.link
        if not self.asked:
            return
        if link.is_cut:
            self._sending = True
            link.job.clock.after(STUCK_S, link.source, self._send, link.source_life)
            return
        sent = self._next()
        self._on_the_way += 1
        link.job.clock.after(link.source.lag(), link.reader, lambda: self._land(*sent), link.reader_life)
        self._go_on()

    def _land(self, half: Half, where: Sequence[int], data: bytes | Overwrites) -> None:
        self._on_the_way -= 1
        self._arrived(half, where, data)
        self._go_on()
