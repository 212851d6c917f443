"""Which rank of a tensor-, pipeline- and expert-parallel engine or trainer a process is, and what falls to it. Pure.

Always true: every layer falls to one pipeline stage, and every expert to one expert-parallel rank.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from tensorhub.mapping.cuts import check_rank

PLACEMENTS: Final = ("linear", "round_robin")
"""How vLLM places experts: neighbours on one rank, or in turn."""


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one process. Each is counted from zero."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int | None = None
    """Where experts are divided by rows and columns otherwise than the rest: vLLM's dp × tp without expert parallelism,
    a trainer's expert tensor parallelism. None: like the rest with one expert-parallel rank, with more not at all."""
    expert_tp_size: int | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a rank that its group hasn't."""
        check_rank("tp_rank", self.tp_rank, self.tp_size)
        check_rank("pp_rank", self.pp_rank, self.pp_size)
        check_rank("ep_rank", self.ep_rank, self.ep_size)
        check_rank("expert_tp_rank", *self.expert_tp)

    @property
    def tp(self) -> tuple[int, int]:
        """The rank among those that a layer is divided among, and how many these are."""
        return self.tp_rank, self.tp_size

    @property
    def expert_tp(self) -> tuple[int, int]:
        """The rank among those that an expert is divided among, and how many these are."""
        if self.expert_tp_size is not None:
            return self.expert_tp_rank or 0, self.expert_tp_size
        return self.tp if self.ep_size == 1 else (0, 1)

    @property
    def told(self) -> str:
        """The ranks in a few words: "tp 1 of 2, ep 0 of 8"."""
        groups = (("tp", self.tp), ("pp", (self.pp_rank, self.pp_size)), ("ep", (self.ep_rank, self.ep_size)))
        return ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in groups if size > 1) or "one rank"


def stage(layers: int, rank: int, ranks: int) -> range:
    """Return the layers of a pipeline stage as vLLM gives them out: what is left over, to the stages before the last.

    Raises `ValueError` when there are more stages than layers.
    """
    check_rank("pp_rank", rank, ranks)
    if ranks > layers:
        raise ValueError(f"{layers} layers can't be divided among {ranks} pipeline stages")
    each, left = divmod(layers, ranks)
    sizes = [each] * ranks
    for place in range(left):
        sizes[-2 - place] += 1
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def experts_of(experts: int, rank: int, ranks: int, placement: str = "linear") -> tuple[int, ...]:
    """Return the experts of an expert-parallel rank, in the order of its stack.

    "linear": neighbours, the first ranks have what is left over; "round_robin": every `ranks`-th. Raises `ValueError`.
    """
    check_rank("ep_rank", rank, ranks)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is {placement!r}; possible are {', '.join(map(repr, PLACEMENTS))}")
    if placement == "round_robin":
        return tuple(range(rank, experts, ranks))
    each, left = divmod(experts, ranks)
    first = rank * each + min(rank, left)
    return tuple(range(first, first + each + (rank < left)))


def chosen_experts(chosen: Iterable[int], experts: int) -> tuple[int, ...]:
    """Return the experts that somebody has placed himself, in their order. Raises `ValueError` for one there is not."""
    found = tuple(chosen)
    unknown = [number for number in found if not 0 <= number < experts]
    if unknown:
        raise ValueError(f"there is no expert {unknown[0]}: the model has {experts}")
    return found
