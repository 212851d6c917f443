"""Digests: their length, their known values, and the place of each in a list."""

import pytest

from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, digest_at, piece_digest, root_digest


def test_a_pieces_digest_is_xxh3_128_of_its_bytes() -> None:
    """Known values: agents of two versions must find the same digests."""
    assert piece_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert piece_digest(b"tensorhub").hex() == "23ce45cdc8b6a7415a47f98d54534ad2"
    assert len(piece_digest(b"x" * 1000)) == PIECE_DIGEST_BYTES


def test_it_is_taken_of_any_memory_without_a_copy() -> None:
    data = bytearray(b"tensorhub")
    assert piece_digest(memoryview(data)) == piece_digest(b"tensorhub")
    assert piece_digest(memoryview(data).cast("B")[3:]) == piece_digest(b"sorhub")


def test_a_root_is_taken_over_all_digests_in_their_order() -> None:
    one, two = piece_digest(b"1"), piece_digest(b"2")
    assert root_digest(one + two) == "0dc760cecc476072a538771d85e1d71e"
    assert root_digest(one + two) != root_digest(two + one)
    assert root_digest(one) != one.hex(), "a root of one piece is not that piece's digest"


def test_a_shard_without_bytes_has_a_root_too() -> None:
    assert root_digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_digest_is_found_by_its_pieces_number(piece: int) -> None:
    digests = [piece_digest(bytes([number])) for number in range(3)]
    assert digest_at(b"".join(digests), piece) == digests[piece]


def test_there_is_no_digest_behind_the_end() -> None:
    assert digest_at(piece_digest(b"1"), 1) == b""
