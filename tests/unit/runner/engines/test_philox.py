"""Philox4x32-10 against the known answers of its authors' library (Random123, kat_vectors)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_runner.engines.philox import philox, uniform

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint32]]":
    return np.array([[int(each, 16) for each in text.split()]], np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert (philox(words(counter), words(key)) == words(answer)).all()


def test_rows_are_computed_side_by_side() -> None:
    counters, keys, answers = (np.concatenate([words(each) for each in column]) for column in zip(*KNOWN, strict=True))
    assert (philox(counters, keys) == answers).all()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=6))
def test_a_number_depends_on_its_seed_and_position_alone(asked: list[tuple[int, int]]) -> None:
    together = uniform([seed for seed, _ in asked], [position for _, position in asked]).tolist()
    assert together == [uniform([seed], [position])[0] for seed, position in asked]
    assert all(0.0 <= each < 1.0 for each in together)


def test_seeds_are_64_bits_and_positions_differ() -> None:
    assert uniform([-1], [3]) == uniform([2**64 - 1], [3])
    many = uniform([*range(100)] * 100, range(10_000))
    assert len(set(many.tolist())) == 10_000
    assert abs(many.mean() - 0.5) < 0.01
    # Seeds that differ only above 32 bits, and positions too.
    assert len({*uniform([1, 1 + 2**32], [5, 5]).tolist(), *uniform([1, 1], [5 + 2**32, 6]).tolist()}) == 4
