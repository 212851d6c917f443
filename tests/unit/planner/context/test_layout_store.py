"""The sizes of layouts' pieces: read once, kept within bounds, and safe from a layout of absurd size."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.bus.errors import BlobMissing
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_digest, layout_of, pieces
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.context import layout_store
from tensorhub_planner.context.layout_store import LayoutStore, most_pieces

MIB = 1024 * 1024


class FakeBlobs:
    """Blobs in a dict; counts how often it was asked."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.asked = 0

    def put(self, layout: Any) -> str:
        data = encoded(layout) if isinstance(layout, Layout) else msgspec.msgpack.encode(layout)
        self.stored[blob_digest(data)] = data
        return blob_digest(data)

    async def get(self, job: str, digest: str) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        if digest not in self.stored:
            raise BlobMissing("it is not there")
        return self.stored[digest]


def entry(name: str, *shape: int, itemsize: int = 2) -> TensorEntry:
    return TensorEntry(name, "bfloat16", itemsize, shape, shape, (0,) * len(shape))


@pytest.fixture
def blobs() -> FakeBlobs:
    return FakeBlobs()


@pytest.fixture
def known(blobs: FakeBlobs) -> LayoutStore:
    return LayoutStore(cast("BlobStore", blobs), Supervisor("the planner of a test"))


async def test_sizes_are_those_of_the_pieces(blobs: FakeBlobs, known: LayoutStore) -> None:
    layout = layout_of([entry("w", 5 * MIB, 1), entry("b", 3)])
    digest = blobs.put(layout)
    assert digest == layout_digest(layout), "a layout's name in the catalog is its name in the store"
    sizes = await known.sizes("run-7", digest)
    assert [sizes.of(((piece, 1),)) for piece in range(len(sizes))] == [6, 4 * MIB, 4 * MIB, 2 * MIB]
    assert await known.layout("run-7", digest) == layout


async def test_many_who_ask_read_once(blobs: FakeBlobs, known: LayoutStore) -> None:
    digest = blobs.put(layout_of([entry("w", 4)]))
    found = await asyncio.gather(*(known.sizes("run-7", digest) for _ in range(20)))
    assert blobs.asked == 1
    assert all(each is found[0] for each in found)
    assert await known.sizes("run-7", digest) is known.known(digest)
    assert blobs.asked == 1


@pytest.mark.parametrize("limit", ["LAYOUTS_MAX", "PIECES_KEPT_MAX"])
async def test_the_cache_is_bounded(
    blobs: FakeBlobs, known: LayoutStore, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(layout_store, limit, 3)
    digests = [blobs.put(layout_of([entry(f"w{n}", 4)])) for n in range(5)]
    for digest in digests:
        await known.sizes("run-7", digest)
    assert [known.known(digest) is not None for digest in digests] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2],
        Layout((entry("w", 4), entry("w", 4))),
        Layout((TensorEntry("w", "bfloat16", 2, (-4,), (4,), (0,)),)),
        Layout((entry("w", 2**60),)),
        Layout((entry("w", 2**62, 2**62),)),
    ],
)
async def test_a_bad_layout_is_refused(blobs: FakeBlobs, known: LayoutStore, bad: object) -> None:
    """At once: nothing of it is counted out."""
    with pytest.raises(LayoutMismatch):
        await known.sizes("run-7", blobs.put(bad))


shapes = st.lists(st.integers(0, 4000), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=3), st.sampled_from([1, 2, 8, 16]))
def test_the_bound_on_pieces_is_one(some: list[tuple[int, ...]], itemsize: int) -> None:
    """No layout has more pieces than the bound that is checked before they are counted out."""
    layout = layout_of(entry(f"t{n}", *shape, itemsize=itemsize) for n, shape in enumerate(some))
    if most_pieces(layout) < 20_000:
        assert len(pieces(layout)) <= most_pieces(layout)
