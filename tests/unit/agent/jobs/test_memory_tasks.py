"""Work on a shard's memory: which bytes are blanked, hashed, copied or probed, and what is told of each."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import Digested, DigestMemory, Duplicated, Probed, ProbeMapping
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.jobs.early_digests import CopyName, EarlyDigests
from tensorhub_agent.jobs.memory_tasks import MemoryTasks, blank
from tensorhub_agent.primitives.digests import piece_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, pieces, placements, segment_bytes
from tensorhub_common.layout.parts import Part, padding
from tensorhub_common.runtime.supervision import Supervisor

KEY, GONE = ShardKey("policy", "engine", 0), ShardKey("policy", "engine", 1)
UPPER = Part("v", (3, 3), (0, 0), (3, 3), (0, 0), (3, 3))
LOWER = Part("u", (1, 4), (0, 0), (1, 4), (4, 0), (1, 4))
FUSED = TensorEntry(
    "e", "int16", 2, (5, 4), (5, 4), (0, 0), (UPPER, padding((0, 3), (3, 1)), padding((3, 0), (1, 4)), LOWER)
)
LAYOUT = layout_of([FUSED, *(TensorEntry(name, "int16", 2, (7,), (7,), (0,)) for name in ("w", "x"))])
TABLE = pieces(LAYOUT)
AT = dict(zip((entry.name for entry in LAYOUT.tensors), placements(LAYOUT), strict=True))


def test_padding_becomes_zero_and_nothing_else_does() -> None:
    """Right of one part, and between it and another one."""
    memory = bytearray(b"\xff" * segment_bytes(LAYOUT))
    blank(memoryview(memory), LAYOUT)
    expected = np.full(segment_bytes(LAYOUT), 255, np.uint8)
    for first, last in ((6, 8), (14, 16), (22, 24), (24, 32)):
        expected[AT["e"] + first : AT["e"] + last] = 0
    np.testing.assert_array_equal(np.frombuffer(memory, np.uint8), expected)


class Filling:
    """A device whose one stream fills the memory of this process when it is waited for, as late as a GPU may."""

    def __init__(self, memory: bytearray) -> None:
        self.memory, self.fills = memory, list[tuple[int, int]]()
        self.is_waited = self.is_closed = False

    def stream(self) -> Any:
        return SimpleNamespace(fill=self._fill, record=self._record, close=self._close)

    def _fill(self, address: int, nbytes: int) -> None:
        self.fills.append((address - BASE, nbytes))

    def _record(self) -> Any:
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        assert not self.is_closed
        self.is_waited = True
        for at, nbytes in self.fills:
            self.memory[at : at + nbytes] = bytes(nbytes)

    def _close(self) -> None:
        self.is_closed = True


BASE = 1 << 40


ENDS = TensorEntry(
    "x",
    "int16",
    2,
    (5,),
    (5,),
    (0,),
    (padding((0,), (1,)), Part("v", (3,), (0,), (3,), (1,), (3,)), padding((4,), (1,))),
)
BEHIND = layout_of([TensorEntry("w", "int16", 2, (7,), (7,), (0,)), ENDS])
"""A tensor that begins and ends with padding, behind one that has none."""


@pytest.mark.parametrize(
    ("layout", "name", "runs"), [(LAYOUT, "e", [(6, 2), (14, 2), (22, 10)]), (BEHIND, "x", [(0, 2), (8, 2)])]
)
def test_padding_in_the_memory_of_a_gpu_becomes_zero_run_by_run(
    layout: Layout, name: str, runs: list[tuple[int, int]]
) -> None:
    """What touches is one run."""
    on_host, on_device = (bytearray(b"\xff" * (64 + segment_bytes(layout))) for _ in range(2))
    device: Any = Filling(on_device)
    memory: Any = SimpleNamespace(address=BASE, readonly=False)
    blank(memoryview(on_host)[64:], layout)
    blank(DeviceRegion(device, memory, 64, segment_bytes(layout)), layout)
    assert (device.is_waited, device.is_closed) == (True, True)
    assert on_device == on_host
    at = dict(zip((entry.name for entry in layout.tensors), placements(layout), strict=True))[name]
    assert device.fills == [(64 + at + begin, nbytes) for begin, nbytes in runs]


class Job:
    def __init__(self, digests: bytes) -> None:
        self._digests = digests

    async def result(self) -> bytes:
        return self._digests


class InlinePool:
    """A `CopyPool` that works at once."""

    def digest(self, view: memoryview, spans: Spans) -> Job:
        each = zip(spans.to, spans.nbytes, strict=True)
        return Job(b"".join(piece_digest(view[at : at + nbytes]) for at, nbytes in each))

    def copy_and_digest(self, to: memoryview, origin: memoryview, spans: Spans, *, digests: bool) -> Job:
        assert not digests, "nobody asks what a copy hashes to"
        for at, nbytes in zip(spans.to, spans.nbytes, strict=True):
            to[at : at + nbytes] = origin[at : at + nbytes]
        return Job(b"")


def segment(value: int, *, lent: bool | OSError = False) -> Any:
    def is_lent() -> bool:
        if isinstance(lent, OSError):
            raise lent
        return lent

    asked = list[bool]()
    view = memoryview(bytearray([value] * segment_bytes(LAYOUT)))
    return SimpleNamespace(
        view=view, is_lent=is_lent, asked=asked, ask_back=lambda *, is_wanted: asked.append(is_wanted)
    )


class Tasks:
    """The tasks of a job with one shard, and what came of them."""

    def __init__(self, live: Any, spare: Any = None, *, digests: bool = True) -> None:
        shard = SimpleNamespace(segment=live, spare=spare, target=spare or live, layout=LAYOUT, table=TABLE)
        self.told: list[Any] = []
        self.published: list[tuple[ShardKey, bytes]] = []
        deltas: Any = SimpleNamespace(digested=lambda *each: self.published.append(each))
        store: Any = SimpleNamespace(shards={KEY: shard})
        pool: Any = InlinePool()
        self.early = EarlyDigests(store, pool, Supervisor("test"))
        self.tasks = MemoryTasks(store, pool, deltas, self.told.append, self.early, digests=digests)


def hashed(view: memoryview) -> bytes:
    return InlinePool().digest(view, Spans.of(TABLE))._digests


async def test_what_is_published_is_hashed_as_it_stands_and_what_was_filled_without_its_padding() -> None:
    """What was filled is no base of a delta: it is hashed where reads write, in the spare memory if there is one."""
    for live, spare in ((segment(1), segment(2)), (segment(1), None)):
        scene = Tasks(live, spare)
        target = bytearray(spare.view if spare else live.view)
        blank(memoryview(target), LAYOUT)
        stands, filled = hashed(live.view), hashed(memoryview(target))
        assert stands != filled
        await scene.tasks.digest(DigestMemory(KEY, 7))
        await scene.tasks.digest(DigestMemory(KEY, 8, filled=True))
        await scene.tasks.digest(DigestMemory(GONE, 9))
        assert scene.told == [Digested(KEY, 7, stands), Digested(KEY, 8, filled)]
        assert scene.published == [(KEY, stands)]


async def test_what_was_hashed_while_it_came_is_not_hashed_again() -> None:
    """Seen by bytes that change behind the hash, which a worker may not do: they are not in the digests."""
    live = segment(1)
    scene, before = Tasks(live), hashed(live.view)
    copy = CopyName(session=1, copy=5)
    scene.early.came(KEY, copy, segment_bytes(LAYOUT))
    scene.early.called(KEY, copy)
    await scene.early._copies[KEY].hashing  # type: ignore[misc]
    live.view[0] = 77
    await scene.tasks.digest(DigestMemory(KEY, 7))
    await scene.tasks.digest(DigestMemory(KEY, 8))
    assert scene.told == [Digested(KEY, 7, before), Digested(KEY, 8, hashed(live.view))]


async def test_where_nothing_is_hashed_whoever_asks_is_told_so() -> None:
    scene = Tasks(segment(1), digests=False)
    await scene.tasks.digest(DigestMemory(KEY, 7, filled=True))
    assert (scene.told, scene.published) == ([Digested(KEY, 7, b"")], [])


async def test_the_tensors_that_were_overwritten_are_named_once_each() -> None:
    live = segment(1)
    scene, digests = Tasks(live), hashed(live.view)
    assert await scene.tasks.overwritten(KEY, digests) == ()
    live.view[AT["w"]] = 9
    assert await scene.tasks.overwritten(KEY, digests) == ("w",)
    live.view[AT["e"]] = 9
    assert await scene.tasks.overwritten(KEY, digests) == ("e", "w")
    assert await scene.tasks.overwritten(GONE, digests) == ()


async def test_the_memory_that_is_meant_is_probed_and_one_that_can_not_be_looked_at_counts_as_lent() -> None:
    """Where there is no spare memory, the live one is meant."""
    for live, spare, is_spare, lent in (
        (True, False, False, True),
        (False, True, False, False),
        (True, False, True, False),
        (False, True, True, True),
        (True, None, True, True),
        (OSError("no descriptor"), None, False, True),
    ):
        scene = Tasks(segment(1, lent=live), None if spare is None else segment(2, lent=spare))
        for key in (KEY, GONE):
            scene.tasks.probe(ProbeMapping(key, is_spare))
        assert scene.told == [Probed(KEY, is_spare, lent)]


@pytest.mark.parametrize("asks_back", [False, True])
@pytest.mark.parametrize("lent", [False, True])
async def test_who_maps_memory_is_asked_for_it_until_it_is_found_free(*, asks_back: bool, lent: bool) -> None:
    live = segment(1, lent=lent)
    Tasks(live).tasks.probe(ProbeMapping(KEY, spare=False, asks_back=asks_back))
    assert live.asked == ([lent] if asks_back or not lent else [])


async def test_the_spare_memory_becomes_what_stands() -> None:
    live, spare = segment(1), segment(2)
    scene = Tasks(live, spare)
    await scene.tasks.duplicate(KEY)
    await scene.tasks.duplicate(GONE)
    assert scene.told == [Duplicated(KEY)]
    assert hashed(spare.view) == hashed(live.view)
