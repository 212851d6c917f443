"""A batch from a source that offers patches: which pieces come how, and what becomes of patches that are wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.encodings.compression import pack, unpack
from tensorhub_agent.encodings.patch import apply, make
from tensorhub_agent.leases.delta_store import COMING, NO_PATCH, SIZE
from tensorhub_agent.primitives.digests import piece_digest
from tensorhub_agent.rates.encoding_choice import LOOK_AFTER_MIN, SLOW_BATCHES_MIN, LineEstimate
from tensorhub_agent.sources import batch_reader
from tensorhub_agent.sources.batch_reader import BatchReader, BatchResult, BatchTarget
from tensorhub_agent.transports.base import TransportLost, silent
from tensorhub_common.layout.layout import PieceTable, TensorEntry, layout_of, pieces, segment_bytes

ROWS = 8
PIECE_BYTES = 10_000
LAYOUT = layout_of([TensorEntry(f"t{n}", "bfloat16", 2, (5000,), (5000,), (0,)) for n in range(ROWS)])
TABLE: PieceTable = pieces(LAYOUT)
EVERY = tuple(range(ROWS))


class Scene:
    """A batch reader and its session: a source of `new` bytes, which keeps a note of what was asked of it."""

    def __init__(self, *, without: Sequence[int] = (), rate_bytes: int = 0, line: LineEstimate | None = None) -> None:
        """Take the pieces without a patch, and what came in a second, earlier in this read or as `line` has it."""
        chance = np.random.default_rng(1)
        old = np.frombuffer(chance.bytes(segment_bytes(LAYOUT)), np.uint16)
        new = old.copy()
        new[chance.random(len(new)) < 0.01] ^= 1
        self.old, self.new, self.memory = old.tobytes(), new.tobytes(), bytearray(old.tobytes())
        self.read_pieces: list[list[int]] = []
        self.overwritten: list[list[int]] = []
        self.unpacked: list[list[int]] = []
        self.stiff: set[int] = set()
        """The pieces that don't shrink."""
        self.fails = False
        self.rate = 1e10
        """Bytes of pieces as they are that come in a second of its own time."""
        self.now = 100.0
        self.patches = {number: self.patch(number) for number in EVERY}
        sizes = [NO_PATCH if number in without else len(self.patches[number]) for number in EVERY]
        session: Any = self
        self.reader = BatchReader(session, self.digests(EVERY), sizes_of(*sizes), clock=self.clock)
        self.reader.line = line or self.reader.line
        for number in range(SLOW_BATCHES_MIN if rate_bytes else 0):
            self.reader.line.asked(float(number))
            self.reader.line.came(rate_bytes, number + 1.0)

    def clock(self) -> float:
        """Return a later time at each call, as clocks do."""
        self.now += 1e-9
        return self.now

    # The session.

    async def read(
        self, destination: Any, spans: Spans, *, digests: bool, progress: Callable[[int], None] = silent
    ) -> bytes:
        assert digests
        progress(0)
        self.read_pieces.append([TABLE.at.index(at) for at in spans.to])
        self.now += sum(spans.nbytes) / self.rate
        for at, nbytes in zip(spans.to, spans.nbytes, strict=True):
            destination[at : at + nbytes] = self.new[at : at + nbytes]
        return b"".join(piece_digest(destination[at : at + n]) for at, n in zip(spans.to, spans.nbytes, strict=True))

    async def overwrite(self, destination: Any, base: Any, wanted: PatchTargets) -> tuple[bytes, list[bytes]]:
        self.overwritten.append(list(wanted.pieces))
        if self.fails:
            raise TransportLost("gone")
        found = b""
        for number in wanted.pieces:
            place = place_of(number)
            if base is not None:
                destination[place] = base[place]
            apply(self.patches[number], destination[place], 2)
            found += piece_digest(destination[place])
        return found, [self.patches[number] for number in wanted.pieces]

    async def unpack(self, destination: Any, spans: Spans, units: Sequence[int]) -> tuple[bytes, int]:
        numbers = [TABLE.at.index(at) for at in spans.to]
        self.unpacked.append(numbers)
        found, came = b"", 0
        for number, unit in zip(numbers, units, strict=True):
            place = place_of(number)
            packed = b"" if number in self.stiff else pack(memoryview(self.new)[place], unit)
            if packed:
                unpack(packed, destination[place], unit)
            found += piece_digest(destination[place]) if packed else bytes(16)
            came += len(packed)
        return found, came

    # What a test does and sees.

    def digests(self, numbers: Sequence[int]) -> bytes:
        return b"".join(piece_digest(self.new[place_of(number)]) for number in numbers)

    def patch(self, number: int) -> bytes:
        patch = make(memoryview(self.old)[place_of(number)], memoryview(self.new)[place_of(number)], 2)
        assert patch is not None
        return patch

    async def batch(self, *ranges: tuple[int, int], base: Any = None) -> BatchResult:
        """Read pieces over the old version, all of them by default; they are right then."""
        where = BatchTarget(memoryview(self.memory), base, TABLE)
        result = await self.reader.read(where, ranges or ((0, ROWS),), silent)
        numbers = [number for first, count in ranges or ((0, ROWS),) for number in range(first, first + count)]
        assert all(self.memory[place_of(number)] == self.new[place_of(number)] for number in numbers)
        assert result.digests == self.digests(numbers)
        return result

    def patch_all(self, told_bytes: int) -> "Scene":
        """Say that each piece's patch has so many bytes."""
        self.reader.sizes = sizes_of(*[told_bytes] * ROWS)
        return self

    def answers(self, *sizes: bytes, then_ends: bool = False) -> list[int]:
        """Let patches be made while a batch waits, and answer so; returns what it has been asked for."""
        asked: list[int] = []

        async def more(first: int) -> tuple[bytes, bool]:
            asked.append(first)
            return sizes[len(asked) - 1], not (then_ends and len(asked) == len(sizes))

        self.reader.more = more
        return asked


def place_of(number: int) -> slice:
    return slice(TABLE.at[number], TABLE.at[number] + TABLE.nbytes[number])


def sizes_of(*sizes: int) -> bytes:
    return b"".join(SIZE.pack(size) for size in sizes)


@pytest.mark.parametrize("beside", [False, True])
async def test_what_has_patches_is_patched_and_the_rest_is_read(beside: bool) -> None:  # noqa: FBT001
    it = Scene(without=(2, 5))
    if beside:
        it.memory = bytearray(len(it.old))
    brought = await it.batch((4, 4), (0, 4), base=memoryview(it.old) if beside else None)
    assert (it.overwritten, it.read_pieces) == ([[4, 6, 7, 0, 1, 3]], [[5, 2]])
    assert sorted(brought.patches) == [0, 1, 3, 4, 6, 7]
    [encoded] = brought.encoded
    assert (encoded.how, encoded.nbytes) == ("delta", 6 * PIECE_BYTES)
    assert encoded.wire_bytes == sum(len(it.patches[n]) for n in (0, 1, 3, 4, 6, 7))


async def test_a_patch_for_other_bytes_is_found_by_the_digest_and_the_piece_is_read() -> None:
    """The third piece is not what the reader's version was: the patch leaves it wrong."""
    it = Scene()
    for offset in (100, 101):
        it.memory[TABLE.at[3] + offset] ^= 0xFF
    brought = await it.batch()
    assert it.read_pieces == [[3]]
    assert 3 not in brought.patches
    assert brought.encoded[0].nbytes == (ROWS - 1) * PIECE_BYTES


async def test_sizes_that_were_not_told_are_of_no_patch() -> None:
    it = Scene()
    it.reader.sizes = it.reader.sizes[: 3 * SIZE.size]
    await it.batch()
    assert it.overwritten == [[0, 1, 2]]


async def test_from_a_source_that_is_faster_than_patches_are_applied_pieces_are_read() -> None:
    it = Scene(rate_bytes=10**15)
    brought = await it.batch()
    assert (it.overwritten, brought.encoded, brought.patches) == ([], (), {})


async def test_over_a_link_that_other_reads_have_found_fast_only_what_has_not_changed_is_left_where_it_is() -> None:
    """If every piece had a patch no read would ever see how fast the link is."""
    it = Scene(line=LineEstimate(known=20e9))
    it.patches[4] = b""
    it.reader.sizes = sizes_of(*[0 if number == 4 else len(it.patches[number]) for number in EVERY])
    it.memory[place_of(4)] = it.new[place_of(4)]
    brought = await it.batch()
    assert (it.overwritten, it.read_pieces) == ([[4]], [[0, 1, 2, 3, 5, 6, 7]])
    assert [(each.how, each.wire_bytes) for each in brought.encoded] == [("delta", 0)]


async def test_a_loss_is_told_when_both_ways_have_ended() -> None:
    it = Scene(without=(1,))
    it.fails = True
    with pytest.raises(TransportLost):
        await it.batch()
    assert it.read_pieces == [[1]]


# Slow lines.


def slow(*, stiff: Sequence[int] = ()) -> Scene:
    """A scene of weights, which shrink, without patches, over a line of which 10 MB/s came."""
    it = Scene(without=EVERY, rate_bytes=10**7)
    values = np.random.default_rng(3).standard_normal(len(it.new), dtype=np.float32) * 0.02
    it.new = values.view(np.uint16)[1::2].tobytes()[: len(it.new)]
    it.stiff = set(stiff)
    it.reader.digests = it.digests(EVERY)
    return it


async def test_over_a_slow_line_pieces_come_packed_and_those_that_do_not_shrink_as_they_are() -> None:
    it = slow(stiff=(2,))
    brought = await it.batch()
    assert (it.unpacked, it.read_pieces) == ([list(EVERY)], [[2]])
    [encoded] = brought.encoded
    assert (encoded.how, encoded.nbytes) == ("zstd", (ROWS - 1) * PIECE_BYTES)
    assert encoded.wire_bytes < 0.8 * encoded.nbytes


def as_slow_as_known() -> Scene:
    it = Scene(line=LineEstimate(known=1e8)).patch_all(4_000)
    it.rate = 1e8
    return it


@pytest.mark.parametrize(
    ("made", "unpacked", "patched", "plain", "total"),
    [
        (slow, LOOK_AFTER_MIN, 0, 3, LOOK_AFTER_MIN + 3),
        (lambda: slow(stiff=EVERY), 1, 0, 3, 3),
        (lambda: Scene(without=EVERY), 0, 0, 3, 3),
        (lambda: Scene(rate_bytes=10**7).patch_all(8_000), 0, LOOK_AFTER_MIN, 3, LOOK_AFTER_MIN + 3),
        (lambda: Scene(line=LineEstimate(known=1e8)).patch_all(4_000), 0, LOOK_AFTER_MIN, 3, LOOK_AFTER_MIN + 3),
        (as_slow_as_known, 0, 49, 1, 50),
    ],
    ids=["packed", "nothing shrinks", "not known yet", "patched", "patched, by earlier reads", "as slow as known"],
)
async def test_a_line_that_seemed_slow_is_measured_again_and_then_pieces_come_as_they_are(
    made: Callable[[], Scene], unpacked: int, patched: int, plain: int, total: int
) -> None:
    """The machine paused, and the line is fast. If patches came of every piece no read would ever see how fast it is.

    What does not shrink is not asked for packed again, and one that is as slow as earlier reads found it is looked at
    once.
    """
    it = made()
    for _ in range(total):
        brought = await it.batch()
    assert (len(it.unpacked), len(it.overwritten), len(it.read_pieces)) == (unpacked, patched, plain)
    assert (brought.encoded == ()) is (it.rate == 1e10)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (slow, "10 MB/s in this read"),
        (Scene, "1000 MB/s guessed"),
        (lambda: Scene(line=LineEstimate(known=5e7)), "50 MB/s in earlier reads"),
    ],
)
async def test_what_comes_otherwise_says_by_which_rate(made: Callable[[], Scene], why: str) -> None:
    assert [each.why for each in (await made().batch()).encoded] == [why]


# Patches that are being made.


async def test_patches_that_are_being_made_are_waited_for() -> None:
    """The third piece's is made while the batch waits, and the fourth has none in the end."""
    it = Scene()
    third, others = len(it.patches[2]), [len(it.patches[number]) for number in EVERY]
    it.reader.sizes, made, over = (
        sizes_of(*others[:2], *two, *others[4:]) for two in ((COMING, COMING), (third, COMING), (third, NO_PATCH))
    )
    asked = it.answers(it.reader.sizes, made, over, then_ends=True)
    await it.batch()
    assert asked == [0, 0, 0]
    assert it.overwritten == [[0, 1, 2, 4, 5, 6, 7]]
    assert it.reader.more is None


async def test_what_is_not_made_within_the_bound_is_read_as_it_is_and_who_has_waited_in_vain_waits_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A publisher that is busy with other readers makes nothing, and each batch of a long read would wait again."""
    monkeypatch.setattr(batch_reader, "PATCHES_S", 0.0)
    it = Scene()
    nothing, one = sizes_of(*[COMING] * ROWS), sizes_of(len(it.patches[0]), *[COMING] * (ROWS - 1))
    it.reader.sizes = nothing
    asked = it.answers(one, one)
    await it.batch((0, 4))
    assert it.reader.more is not None, "something was made meanwhile"
    for piece in range(4, ROWS):
        await it.batch((piece, 1))
    assert (asked, it.overwritten) == ([0, 0], [[0]])
