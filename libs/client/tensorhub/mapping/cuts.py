"""Which part of one dimension of a global tensor a rank has. Pure.

Always true: a cut lies within its dimension, and the cuts of all ranks of `share`, `chunk` and `Padded` cover the
dimension once, in the order of the ranks.
"""

from operator import index

import msgspec


class Cut(msgspec.Struct, frozen=True):
    """The elements `start` to `stop` of a dimension that has `size` of them in the global tensor."""

    size: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        """Raise `ValueError` when it does not lie within the dimension, or is not of whole numbers."""
        to_whole_numbers(self)
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(f"elements {self.start} to {self.stop} are no cut of a dimension of {self.size}")

    @property
    def length(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


class Padded(msgspec.Struct, frozen=True):
    """A rank's share of a dimension of `size` elements that was padded at its end before it was divided equally.

    How far it was padded is read off the registered tensor: with n elements on each rank this one has those from
    rank × n on, as far as there are any; the rest of it is padding. So vocabularies are cut, by any multiple.
    """

    size: int
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise `ValueError` when the rank is none of `ranks`, or it is not of whole numbers."""
        to_whole_numbers(self)
        check_rank("rank", self.rank, self.ranks)


def share(size: int, rank: int, ranks: int, what: str = "the dimension") -> Cut:
    """Return the cut of one of `ranks` equal shares. Raises `ValueError`, naming `what`, when they can't be equal."""
    check_rank("rank", rank, ranks)
    if size % ranks:
        raise ValueError(f"{what} of {size} can't be divided equally among {ranks} ranks")
    each = size // ranks
    return Cut(size, rank * each, (rank + 1) * each)


def chunk(size: int, rank: int, ranks: int) -> Cut:
    """Return the cut that `torch.chunk` and DTensor's `Shard` give a rank: the last ones may have less, or nothing."""
    check_rank("rank", rank, ranks)
    each = -(-size // ranks)
    return Cut(size, min(size, rank * each), min(size, (rank + 1) * each))


def check_rank(what: str, rank: int, ranks: int) -> None:
    """Raise `ValueError` when there is no such rank."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{what} is {rank} of {ranks}; ranks count from 0")


def to_whole_numbers(struct: msgspec.Struct) -> None:
    """Make whole numbers of a new struct's fields, which may be numpy's. Raises `ValueError` for anything else."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        try:
            msgspec.structs.force_setattr(struct, name, index(value))
        except TypeError:
            raise ValueError(f"{name} of a {type(struct).__name__} is {value!r:.80}; it is a whole number") from None
