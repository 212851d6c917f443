"""What the holders lack of a reader is found before a byte moves, and named: each kind of gap and mix-up."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch, VersionUnavailable
from tensorhub_common.layout.layout import PIECE_BYTES_MAX, Layout, TensorEntry, layout_of
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.programs.regions import DIMS_MAX
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal
from tensorhub_planner.compiler import tiling
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver
from tensorhub_simulator.drivers.planner import Layouts, PlannerDriver

SHAPES: Final[dict[str, Shape]] = {
    "embedding": (8, 6),
    "layers.0.experts": (4, 3, 5),
    "layers.0.proj": (6, 4),
    "layers.1.proj": (6, 4),
    "layers.1.wide": (4, 8),
    "scale": (),
}
Shard = list[TensorEntry]


def box(name: str, start: Shape, stop: Shape, dtype: str = "uint8") -> TensorEntry:
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return TensorEntry(name, dtype, 1, shape, SHAPES[name], start)


def whole(name: str) -> TensorEntry:
    return box(name, (0,) * len(SHAPES[name]), SHAPES[name])


def halves(name: str, dim: int, gap: tuple[int, int]) -> tuple[Shard, Shard]:
    start, stop = list((0,) * len(SHAPES[name])), list(SHAPES[name])
    before, behind = [*stop], [*start]
    before[dim], behind[dim] = gap
    found = box(name, tuple(start), tuple(before)), box(name, tuple(behind), tuple(stop))
    first, second = ([each] if 0 not in each.shape else [] for each in found)
    return first, second


def but(name: str, *shards: Sequence[TensorEntry]) -> list[Layout]:
    others = [whole(each) for each in SHAPES if each != name]
    parts = [list(shard) for shard in (*shards, (), ())][:2]
    return [layout_of([*parts[0], *others[::2]]), layout_of([*parts[1], *others[1::2]])]


class Cluster:
    """A trainer whose shards have these layouts has published, and a reader on `me` wants the version."""

    def __init__(self, published: Iterable[Layout], reader: Layout) -> None:
        self.log, self.layouts = CatalogDriver(), Layouts()
        digests = list(map(self.layouts.add, published))
        self.agents = [f"agent-{number}" for number, _ in enumerate(digests)]
        for number, (agent, digest) in enumerate(zip(self.agents, digests, strict=True)):
            self.log.join(agent)
            self.log.register(agent, "trainer", number, len(digests), layout=digest)
        for number, _ in enumerate(digests):
            self.log.ready("trainer", 1, number)
        self.log.join("me")
        self.log.register("me", "engine", layout=self.layouts.add(reader))

    def answer(self) -> PlanAnswer:
        demand = PlanRequest(model=MODEL, version=1, replica="engine", shard=0, agent="me", root=None, at_seq=0)
        return PlannerDriver("job", self.log.catalog, self.layouts).answer(demand)


ALL: Final = layout_of(map(whole, SHAPES))


def reason(answer: PlanAnswer, error: type[Exception] = LayoutMismatch) -> str:
    assert isinstance(answer, Refusal), answer
    assert answer.error == error.__name__, answer
    return answer.reason


def refused(published: Iterable[Layout], reader: Layout = ALL) -> str:
    return reason(Cluster(published, reader).answer())


def test_what_lacks_nothing_is_planned() -> None:
    """So that the refusals below come of what they plant, and of nothing else."""
    first, second = halves("embedding", 0, (3, 3))
    answer = Cluster(but("embedding", first, second), ALL).answer()
    assert isinstance(answer, Plan)
    assert sum(share.nbytes for share in answer.shares) == sum(entry.nbytes for entry in ALL.tensors)


@given(st.sampled_from([name for name, shape in SHAPES.items() if shape]), st.data())
def test_a_missing_row_column_or_expert_is_named(name: str, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(SHAPES[name]) - 1))
    at = data.draw(st.integers(0, SHAPES[name][dim] - 1))
    spans = [f"{at}:{at + 1}" if each == dim else f"0:{size}" for each, size in enumerate(SHAPES[name])]
    assert f"no holder has [{', '.join(spans)}] of {name!r}" in refused(but(name, *halves(name, dim, (at, at + 1))))


@pytest.mark.parametrize("name", ["layers.1.proj", "scale"])
def test_a_missing_layer_or_scalar_is_named(name: str) -> None:
    shape = list(SHAPES[name])
    wanted = f"{name!r} is uint8 of global shape {shape} here, and with the holders there is nothing of that name"
    assert wanted in refused(but(name))


SWAPPED: Final = {"layers.1.proj": "layers.1.wide", "layers.1.wide": "layers.1.proj"}


@pytest.mark.parametrize("what", ["name", "global_shape", "dtype"])
def test_what_is_another_tensor_under_its_name_is_named_with_both(what: str) -> None:
    """It says what is there and what is wanted."""

    def changed(entry: TensorEntry) -> TensorEntry:
        if entry.name not in SWAPPED:
            return entry
        larger = (entry.global_shape[0] + 1, *entry.global_shape[1:])
        others = {"name": SWAPPED[entry.name], "global_shape": larger, "dtype": "int8"}
        return msgspec.structs.replace(entry, **{what: others[what]})

    published = layout_of(map(changed, ALL.tensors))
    told_of = refused([published])
    for name in SWAPPED:
        there = next(entry for entry in published.tensors if entry.name == name)
        told = f"{there.dtype} of global shape {list(there.global_shape)}"
        wanted = f"{name!r} is uint8 of global shape {list(SHAPES[name])} here, and with the holders there is {told}"
        assert wanted in told_of


@given(st.integers(1, 5))
def test_a_hole_in_fused_parts_is_named(rows: int) -> None:
    """A fused tensor whose part stands for fewer rows than the reader wants of it."""
    shape = (rows + 4, 4)
    parts = (
        Part("layers.0.proj", (6, 4), (0, 0), (rows, 4), (0, 0), (rows, 4)),
        Part("layers.1.proj", (6, 4), (0, 0), (4, 4), (rows, 0), (4, 4)),
    )
    fused = layout_of([TensorEntry("fused", "uint8", 1, shape, shape, (0, 0), parts)])
    reader = layout_of([whole("layers.0.proj")])
    assert f"no holder has [{rows}:6, 0:4] of 'layers.0.proj'" in refused([fused], reader=reader)


@given(st.sampled_from([name for name, shape in SHAPES.items() if shape]))
def test_what_is_lost_just_now_is_waited_for(name: str) -> None:
    """The same gap, where a registered shard has it: its agent is lost, so the version may be had again."""
    cluster = Cluster(but(name, *halves(name, 0, (1, 1))), ALL)
    assert isinstance(cluster.answer(), Plan)
    cluster.log.expire(cluster.agents[1])
    told = reason(cluster.answer(), VersionUnavailable)
    assert f"no holder has [1:{SHAPES[name][0]}" in told
    assert "trainer/1 on agent-1 is lost" in told


def test_what_was_emptied_just_now_is_waited_for_and_what_was_released_is_not() -> None:
    cluster = Cluster(but("embedding", *halves("embedding", 0, (1, 1))), ALL)
    cluster.log.unpublish("trainer", 1)
    cluster.log.drained("trainer", 1)
    assert "trainer/1 on agent-1 is empty" in reason(cluster.answer(), VersionUnavailable)
    cluster.log.release("trainer", 1)
    assert "no holder has [1:8, 0:6] of 'embedding'" in reason(cluster.answer())


def test_boxes_of_more_dimensions_than_anybody_carries_are_refused_by_the_tensor_s_name() -> None:
    """The half of a tensor that lies apart in each of its dimensions."""
    for rank in (DIMS_MAX, DIMS_MAX + 1):
        source = layout_of([TensorEntry("deep", "uint8", 1, (3,) * rank, (3,) * rank, (0,) * rank)])
        reader = layout_of([TensorEntry("deep", "uint8", 1, (2,) * rank, (3,) * rank, (1,) * rank)])
        answer = Cluster([source], reader).answer()
        assert isinstance(answer, Plan) == (rank == DIMS_MAX)
    assert f"tensor 'deep' lies in boxes of {rank} dimensions that can't be joined" in reason(answer)
    # Whole, it is one run of bytes.
    assert isinstance(Cluster([source], source).answer(), Plan)


def test_a_tensor_that_would_be_cut_too_often_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its sources' edges, or by what fits into a unit; just as many boxes as may be are planned."""
    columns = [layout_of([box("embedding", (0, at), (8, at + 1))]) for at in range(6)]
    long = layout_of([TensorEntry("long", "uint8", 1, (3, PIECE_BYTES_MAX + 1), (3, PIECE_BYTES_MAX + 1), (0, 0))])
    for sources, reader, cells, told in (
        (
            columns,
            layout_of([whole("embedding")]),
            6,
            "'embedding' would be cut into more than 5 boxes: cut it along fewer dimensions",
        ),
        ([long], long, 3, "'long' would be cut into more than 2 boxes: cut it at fewer places"),
    ):
        monkeypatch.setattr(tiling, "CELLS_MAX", cells)
        assert isinstance(Cluster(sources, reader).answer(), Plan)
        monkeypatch.setattr(tiling, "CELLS_MAX", cells - 1)
        assert f"tensor {told}" in refused(sources, reader)
