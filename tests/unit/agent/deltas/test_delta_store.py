"""What is kept of deltas, what a chain offers, and what goes first when there is too much."""

import pytest

from tensorhub_agent.leases.delta_store import COMING, NO_PATCH, SIZE, Delta, DeltaStore, PatchOffer

SHARD = ("job", "shard")
NBYTES = (100, 100, 100)


def book(versions: int = 10, nbytes: int = 1000) -> DeltaStore:
    return DeltaStore(versions, nbytes)


def made(deltas: DeltaStore, base: str, root: str, *patches: bytes | None, shard: object = SHARD) -> Delta:
    delta = deltas.begin(shard, base, root, len(patches))
    for piece, patch in enumerate(patches):
        deltas.put(delta, piece, patch)
    deltas.end(delta)
    deltas.check()
    return delta


def offered(deltas: DeltaStore, base: str, root: str) -> PatchOffer:
    offer = deltas.offer(SHARD, base, root, NBYTES)
    assert offer is not None
    return offer


def sizes(offer: PatchOffer) -> list[int]:
    return [size for (size,) in SIZE.iter_unpack(offer.sizes)]


def test_one_delta_offers_its_patches_and_says_where_there_is_none() -> None:
    deltas = book()
    made(deltas, "a", "b", b"1", b"", b"")
    made(deltas, "a", "b", b"xx", b"", None)
    assert deltas.nbytes == 2, "made again, it takes the place of the first"
    offer = offered(deltas, "a", "b")
    assert list(offer.patches) == [(b"xx",), (), None]
    assert sizes(offer) == [2, 0, NO_PATCH]
    assert offer.page(1, 1) == SIZE.pack(0)
    deltas.forget(SHARD)
    deltas.check()
    assert (deltas.nbytes, deltas.offer(SHARD, "a", "b", NBYTES)) == (0, None)


def test_a_chain_has_the_patches_of_each_step_in_their_order_and_the_shorter_one_is_taken() -> None:
    deltas = book()
    made(deltas, "b", "c", b"2", b"", b"zz")
    made(deltas, "a", "b", b"11", b"", None)
    offer = offered(deltas, "a", "c")
    assert list(offer.patches) == [(b"11", b"2"), (), None]
    assert sizes(offer) == [3, 0, NO_PATCH]
    made(deltas, "a", "c", b"3", b"", b"")
    assert offered(deltas, "a", "c").patches[0] == (b"3",)
    made(deltas, "b", "a", b"4", b"", b"")
    assert (deltas.offer(SHARD, "a", "x", NBYTES), deltas.offer(SHARD, "x", "a", NBYTES)) == (None, None)
    assert offered(deltas, "b", "a").patches[0] == (b"4",), "a way back and forth ends"


def test_patches_that_are_longer_than_the_piece_are_not_offered() -> None:
    deltas = book()
    made(deltas, "a", "b", b"x" * 60, b"x" * 60, b"")
    made(deltas, "b", "c", b"x" * 39, b"x" * 40, b"")
    assert sizes(offered(deltas, "a", "c")) == [99, NO_PATCH, 0]


def test_nothing_is_offered_from_the_version_itself_or_of_another_shard_or_of_other_pieces() -> None:
    deltas = book()
    made(deltas, "a", "b", b"1", b"", b"")
    assert deltas.offer(SHARD, "b", "b", NBYTES) is None
    assert deltas.offer("other", "a", "b", NBYTES) is None
    assert deltas.offer(SHARD, "a", "b", NBYTES[:2]) is None


def test_of_a_shard_the_last_versions_are_kept() -> None:
    deltas = book(versions=2)
    for base, root in ("ab", "bc", "cd"):
        made(deltas, base, root, b"1", b"", b"")
    made(deltas, "a", "b", b"1", shard="other")
    assert deltas.offer(SHARD, "a", "b", NBYTES) is None
    assert offered(deltas, "b", "d").patches[0] == (b"1", b"1")
    assert deltas.offer("other", "a", "b", (9,)) is not None


def test_the_oldest_goes_when_there_is_too_much_and_what_was_offered_stays() -> None:
    deltas = book(nbytes=100)
    made(deltas, "a", "b", b"x" * 60, b"", b"")
    before = offered(deltas, "a", "b")
    made(deltas, "b", "c", b"y" * 60, b"", b"")
    assert deltas.nbytes == 60
    assert deltas.offer(SHARD, "a", "b", NBYTES) is None
    assert before.patches[0] == (b"x" * 60,)


def test_a_delta_that_is_too_large_by_itself_is_dropped_and_what_comes_of_it_later_too() -> None:
    deltas = book(nbytes=100)
    delta = made(deltas, "a", "b", b"x" * 99, b"xx", b"")
    assert deltas.nbytes == 0
    deltas.put(delta, 2, b"yy")
    deltas.check()
    assert deltas.offer(SHARD, "a", "b", NBYTES) is None


def test_what_is_being_made_is_coming_until_it_is_made() -> None:
    deltas = book()
    made(deltas, "a", "b", b"1", b"", b"")
    delta = deltas.begin(SHARD, "b", "c", 3)
    assert deltas.is_coming(SHARD, "b", "c")
    assert deltas.is_coming(SHARD, "a", "c")
    assert not deltas.is_coming(SHARD, "a", "b")
    assert not deltas.is_coming(SHARD, "x", "c")
    deltas.end(delta)
    assert not deltas.is_coming(SHARD, "b", "c")


@pytest.mark.parametrize("patch", [b"longer", b"", None])
def test_a_patch_that_is_put_again_counts_once(patch: bytes | None) -> None:
    deltas = book()
    delta = made(deltas, "a", "b", b"1234", b"", b"")
    deltas.put(delta, 0, patch)
    deltas.check()


def test_of_a_delta_that_is_being_made_it_is_said_what_is_not_known_yet_and_the_offer_grows() -> None:
    deltas = book()
    delta = deltas.begin(SHARD, "a", "b", 3)
    deltas.put(delta, 0, None)
    before = offered(deltas, "a", "b")
    assert sizes(before) == [NO_PATCH, COMING, COMING]
    deltas.put(delta, 1, b"xx")
    deltas.put(delta, 2, None)
    deltas.end(delta)
    patches = before.patches
    before.grow(offered(deltas, "a", "b"))
    assert sizes(before) == [NO_PATCH, 2, NO_PATCH]
    assert before.patches is patches, "whoever serves the lease has this list"
    assert list(patches) == [None, (b"xx",), None]
