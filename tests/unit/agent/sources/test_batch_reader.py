"""A batch from a source that offers patches: which pieces come how, and what becomes of patches that are wrong."""

from typing import Any

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.encodings.compression import pack, unpack
from tensorhub_agent.encodings.patch import apply, make
from tensorhub_agent.leases.delta_store import COMING, NO_PATCH, SIZE
from tensorhub_agent.rates.encoding_choice import LOOK_AFTER_MIN, SLOW_BATCHES_MIN, LineEstimate
from tensorhub_agent.sources import batch_reader
from tensorhub_agent.sources.batch_reader import BatchReader, BatchResult, BatchTarget
from tensorhub_agent.transports.base import TransportLost, silent
from tensorhub_common.layout.layout import PieceTable, TensorEntry, layout_of, pieces, segment_bytes

ROWS = 8
LAYOUT = layout_of([TensorEntry(f"t{n}", "bfloat16", 2, (5000,), (5000,), (0,)) for n in range(ROWS)])
TABLE: PieceTable = pieces(LAYOUT)


def digest(view: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(view)


@dataclass
class Session:
    """A source of `new` bytes that keeps a note of what was asked of it."""

    new: bytes
    patches: dict[int, bytes]
    read_spans: list[list[int]] = field(default_factory=list)
    overwritten: list[list[int]] = field(default_factory=list)
    unpacked: list[list[int]] = field(default_factory=list)
    stiff: set[int] = field(default_factory=set)
    """Where pieces stand that don't shrink."""
    fails: bool = False
    rate: float = 1e10
    """Bytes of pieces as they are that come in a second of its own time."""
    now: float = 100.0

    def clock(self) -> float:
        """Return a later time at each call, as clocks do."""
        self.now += 1e-9
        return self.now

    async def read(
        self, destination: Any, spans: Spans, *, digests: bool, progress: Callable[[int], None] = silent
    ) -> bytes:
        assert digests
        progress(0)
        self.read_spans.append(list(spans.to))
        self.now += sum(spans.nbytes) / self.rate
        for at, nbytes in zip(spans.to, spans.nbytes, strict=True):
            destination[at : at + nbytes] = self.new[at : at + nbytes]
        return b"".join(digest(destination[at : at + n]) for at, n in zip(spans.to, spans.nbytes, strict=True))

    async def overwrite(
        self, destination: Any, base: Any, wanted: PatchTargets
    ) -> tuple[bytes, list[bytes]]:
        self.overwritten.append(list(wanted.pieces))
        if self.fails:
            raise TransportLost("gone")
        for number, at, nbytes in zip(wanted.pieces, wanted.spans.to, wanted.spans.nbytes, strict=True):
            if base is not None:
                destination[at : at + nbytes] = base[at : at + nbytes]
            apply(self.patches[number], destination[at : at + nbytes], 2)
        found = [digest(destination[a : a + n]) for a, n in zip(wanted.spans.to, wanted.spans.nbytes, strict=True)]
        return b"".join(found), [self.patches[number] for number in wanted.pieces]

    async def unpack(self, destination: Any, spans: Spans, units: Sequence[int]) -> tuple[bytes, int]:
        self.unpacked.append(list(spans.to))
        found, came = b"", 0
        for at, nbytes, unit in zip(spans.to, spans.nbytes, units, strict=True):
            packed = b"" if at in self.stiff else pack(memoryview(self.new)[at : at + nbytes], unit)
            if packed:
                unpack(packed, destination[at : at + nbytes], unit)
            found += digest(destination[at : at + nbytes]) if packed else bytes(16)
            came += len(packed)
        return found, came

    async def gather(self, *_: object, **__: object) -> None:
        raise AssertionError("patches are of pieces of one layout")

    async def still_holds(self) -> bool:
        return True

    async def close(self) -> None:
        pass


@dataclass
class Scene:
    old: bytes
    new: bytes
    session: Session
    reader: BatchReader

    memory: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.memory = bytearray(self.old)

    def bytes_of(self, number: int) -> bytes:
        return self.new[TABLE.at[number] : TABLE.at[number] + TABLE.nbytes[number]]

    def is_whole(self) -> bool:
        return all(self.memory[a : a + n] == self.new[a : a + n] for a, n in zip(TABLE.at, TABLE.nbytes, strict=True))

    async def read(self, *ranges: tuple[int, int]) -> BatchResult:
        """Read pieces over the old version; all of them by default."""
        where = BatchTarget(memoryview(self.memory), None, TABLE)
        return await self.reader.read(where, ranges or ((0, ROWS),), silent)

    def patch_all(self, told_bytes: int) -> None:
        """Let every piece have a patch that overwrites much of it, and say that each has so many bytes."""
        self.reader.sizes = SIZE.pack(told_bytes) * ROWS
        self.session.patches = {number: make_whole(self, number) for number in range(ROWS)}


def scene(*, without: tuple[int, ...] = (), rate_bytes: int = 0) -> Scene:
    chance = np.random.default_rng(1)
    old = np.frombuffer(chance.bytes(segment_bytes(LAYOUT)), np.uint16)
    new = old.copy()
    new[chance.random(len(new)) < 0.01] ^= 1
    views = memoryview(old.tobytes()), memoryview(new.tobytes())
    patches, sizes, digests = {}, b"", b""
    for number, (at, nbytes) in enumerate(zip(TABLE.at, TABLE.nbytes, strict=True)):
        patch = make(views[0][at : at + nbytes], views[1][at : at + nbytes], 2)
        assert patch is not None
        patches[number] = patch
        sizes += SIZE.pack(NO_PATCH if number in without else len(patch))
        digests += digest(views[1][at : at + nbytes])
    session = Session(new.tobytes(), patches)
    reader = BatchReader(session, digests, sizes, clock=session.clock)
    for number in range(SLOW_BATCHES_MIN if rate_bytes else 0):
        reader.line.asked(float(number))
        reader.line.came(rate_bytes, number + 1.0)
    return Scene(old.tobytes(), new.tobytes(), session, reader)


def make_whole(it: Scene, number: int) -> bytes:
    """Return a patch that overwrites much of a piece."""
    patch = make(memoryview(it.old)[TABLE.at[number] :][: TABLE.nbytes[number]], memoryview(it.bytes_of(number)), 2)
    assert patch is not None
    return patch


@pytest.mark.parametrize("beside", [False, True])
async def test_what_has_patches_is_patched_and_the_rest_is_read(beside: bool) -> None:  # noqa: FBT001
    it = scene(without=(2, 5))
    if beside:
        it.memory = bytearray(len(it.old))
    where = BatchTarget(memoryview(it.memory), memoryview(it.old) if beside else None, TABLE)
    brought = await it.reader.read(where, ((4, 4), (0, 4)), silent)
    assert it.is_whole()
    assert it.session.overwritten == [[4, 6, 7, 0, 1, 3]]
    assert it.session.read_spans == [[TABLE.at[5], TABLE.at[2]]]
    assert brought.digests == b"".join(digest(it.bytes_of(n)) for n in (4, 5, 6, 7, 0, 1, 2, 3))
    assert sorted(brought.patches) == [0, 1, 3, 4, 6, 7]
    (encoded,) = brought.encoded
    assert (encoded.how, encoded.nbytes) == ("delta", 6 * 10_000)
    assert encoded.wire_bytes == sum(len(it.session.patches[n]) for n in (0, 1, 3, 4, 6, 7))


async def test_a_patch_for_other_bytes_is_found_by_the_digest_and_the_piece_is_read() -> None:
    """The third piece is not what the reader's version was: the patch leaves it wrong."""
    it = scene()
    it.memory[TABLE.at[3] + 100] ^= 0xFF
    it.memory[TABLE.at[3] + 101] ^= 0xFF
    brought = await it.read()
    assert it.is_whole()
    assert it.session.read_spans == [[TABLE.at[3]]]
    assert 3 not in brought.patches
    assert brought.digests == b"".join(digest(it.bytes_of(n)) for n in range(ROWS))
    assert brought.encoded[0].nbytes == (ROWS - 1) * 10_000


async def test_sizes_that_were_not_told_are_of_no_patch() -> None:
    it = scene()
    it.reader.sizes = it.reader.sizes[: 3 * SIZE.size]
    await it.read()
    assert it.session.overwritten == [[0, 1, 2]]


async def test_from_a_source_that_is_faster_than_patches_are_applied_pieces_are_read() -> None:
    it = scene(rate_bytes=10**15)
    brought = await it.read()
    assert it.is_whole()
    assert (it.session.overwritten, brought.encoded, brought.patches) == ([], (), {})


async def test_over_a_link_that_other_reads_have_found_fast_only_what_has_not_changed_is_left_where_it_is() -> None:
    """If every piece had a patch no read would ever see how fast the link is."""
    it = scene()
    it.reader.line = LineEstimate(known=20e9)
    it.session.patches[4] = b""
    it.reader.sizes = it.reader.sizes[: 4 * SIZE.size] + SIZE.pack(0) + it.reader.sizes[5 * SIZE.size :]
    at, end = TABLE.at[4], TABLE.at[4] + TABLE.nbytes[4]
    it.memory[at:end] = it.new[at:end]
    brought = await it.read()
    assert it.is_whole()
    assert it.session.overwritten == [[4]]
    assert it.session.read_spans == [[TABLE.at[number] for number in range(ROWS) if number != 4]]
    assert [(each.how, each.wire_bytes) for each in brought.encoded] == [("delta", 0)]


async def test_a_loss_is_told_when_both_ways_have_ended() -> None:
    it = scene(without=(1,))
    it.session.fails = True
    with pytest.raises(TransportLost):
        await it.read()
    assert it.session.read_spans == [[TABLE.at[1]]]


def slow(*, without: tuple[int, ...]) -> Scene:
    """A scene of weights, which shrink, over a line of which 10 MB/s came."""
    it = scene(without=without, rate_bytes=10**7)
    chance = np.random.default_rng(3)
    values = (chance.standard_normal(len(it.new), dtype=np.float32) * 0.02).view(np.uint16)[1::2]
    new = values.tobytes()[: len(it.new)]
    it.session.new = it.new = new
    it.reader.digests = b"".join(digest(it.bytes_of(number)) for number in range(ROWS))
    return it


async def test_over_a_slow_line_pieces_come_packed_and_those_that_do_not_shrink_as_they_are() -> None:
    it = slow(without=tuple(range(ROWS)))
    it.session.stiff = {TABLE.at[2]}
    brought = await it.read()
    assert it.is_whole()
    assert it.session.unpacked == [list(TABLE.at)]
    assert it.session.read_spans == [[TABLE.at[2]]]
    (encoded,) = brought.encoded
    assert (encoded.how, encoded.nbytes) == ("zstd", (ROWS - 1) * 10_000)
    assert encoded.wire_bytes < 0.8 * encoded.nbytes


async def test_a_line_that_seemed_slow_is_measured_again_and_then_pieces_come_as_they_are() -> None:
    """It was slow because the machine paused, and the session gives its bytes at the speed of memory."""
    it = slow(without=tuple(range(ROWS)))
    ways = []
    for _ in range(LOOK_AFTER_MIN + 3):
        brought = await it.read()
        ways.append(tuple(each.how for each in brought.encoded))
    assert ways == [("zstd",)] * LOOK_AFTER_MIN + [()] * 3


@pytest.mark.parametrize(("rate_bytes", "told_bytes"), [(10**7, 8_000), (0, 4_000)], ids=["this read", "earlier ones"])
async def test_patches_that_only_a_slow_line_makes_worth_it_are_measured_against_now_and_then(
    rate_bytes: int, told_bytes: int
) -> None:
    """They met a machine that paused. If patches came of every piece no read would ever see how fast the line is."""
    it = scene(rate_bytes=rate_bytes)
    if not rate_bytes:
        it.reader.line = LineEstimate(known=1e8)
    it.patch_all(told_bytes)
    for _ in range(LOOK_AFTER_MIN + 3):
        brought = await it.read()
    assert len(it.session.overwritten) == LOOK_AFTER_MIN
    assert brought.encoded == ()


async def test_a_line_that_is_as_slow_as_earlier_reads_found_it_is_looked_at_once() -> None:
    it = scene()
    it.session.rate = 1e8
    it.reader.line = LineEstimate(known=1e8)
    it.patch_all(4_000)
    for _ in range(50):
        await it.read()
    assert (len(it.session.overwritten), len(it.session.read_spans)) == (49, 1)


async def test_what_comes_otherwise_says_by_which_rate() -> None:
    guessed, known = scene(), scene()
    known.reader.line = LineEstimate(known=5e7)
    for it, why in (
        (slow(without=tuple(range(ROWS))), "10 MB/s in this read"),
        (guessed, "1000 MB/s guessed"),
        (known, "50 MB/s in earlier reads"),
    ):
        assert [each.why for each in (await it.read()).encoded] == [why]


async def test_what_does_not_shrink_is_not_asked_for_packed_again() -> None:
    it = slow(without=tuple(range(ROWS)))
    it.session.stiff = set(TABLE.at)
    for _ in range(3):
        brought = await it.read()
        assert brought.encoded == ()
    assert len(it.session.unpacked) == 1


async def test_a_line_that_is_not_known_yet_is_measured_first() -> None:
    it = scene(without=tuple(range(ROWS)))
    await it.read()
    assert (it.session.unpacked, len(it.session.read_spans)) == ([], 1)
    assert it.reader.line.rate is not None


async def test_patches_that_are_being_made_are_waited_for() -> None:
    """The third piece's is made while the batch waits, and the fourth has none in the end."""
    it = scene()
    sizes = it.reader.sizes
    it.reader.sizes = sizes[: 2 * SIZE.size] + SIZE.pack(COMING) * 2 + sizes[4 * SIZE.size :]
    later = sizes[: 3 * SIZE.size] + SIZE.pack(COMING) + sizes[4 * SIZE.size :]
    answers = [(it.reader.sizes, True), (later, True), (later.replace(SIZE.pack(COMING), SIZE.pack(NO_PATCH)), False)]
    asked: list[int] = []

    async def more(first: int) -> tuple[bytes, bool]:
        asked.append(first)
        return answers[len(asked) - 1]

    it.reader.more = more
    await it.read()
    assert it.is_whole()
    assert asked == [0, 0, 0]
    assert it.session.overwritten == [[0, 1, 2, 4, 5, 6, 7]]
    assert it.reader.more is None


async def test_what_is_not_made_within_the_bound_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reader, "PATCHES_S", 0.0)
    it = scene()
    it.reader.sizes = SIZE.pack(COMING) * ROWS

    async def more(_: int) -> tuple[bytes, bool]:
        return SIZE.pack(COMING) * ROWS, True

    it.reader.more = more
    await it.read()
    assert it.is_whole()
    assert it.session.overwritten == []


async def test_who_has_waited_in_vain_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that is busy with other readers makes nothing, and each batch of a long read would wait again."""
    monkeypatch.setattr(batch_reader, "PATCHES_S", 0.0)
    it = scene()
    half = ROWS // 2
    told = it.reader.sizes
    it.reader.sizes = SIZE.pack(COMING) * ROWS
    answers = [told[: SIZE.size] + SIZE.pack(COMING) * (ROWS - 1), told[: SIZE.size] + SIZE.pack(COMING) * (ROWS - 1)]
    asked: list[int] = []

    async def more(first: int) -> tuple[bytes, bool]:
        asked.append(first)
        return answers[len(asked) - 1], True

    it.reader.more = more
    await it.read((0, half))
    assert it.reader.more is not None, "something was made meanwhile"
    for piece in range(half, ROWS):
        await it.read((piece, 1))
    assert it.is_whole()
    assert asked == [0, 0]
