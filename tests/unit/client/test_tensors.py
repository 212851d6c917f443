"""`describe` and `bind` with mappings: what is accepted, what is refused by name, and bytes that arrive unchanged."""

import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tensorhub import mapping
from tensorhub._tensors.description import bind, box_of, describe
from tensorhub.mapping import AS_IT_IS, LEFT_OUT, Mapping, Padded, Padding, Rule, concat, share
from tensorhub.specs import DTYPES, TensorSpec
from tensorhub_common.errors import LayoutMismatch, NotInThisVersion
from tensorhub_common.layout.layout import layout_digest, segment_bytes
from tensorhub_common.layout.parts import Part, padding

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def stand(given: Any) -> dict[str, torch.Tensor]:
    described = describe(given)
    return bind(described, bytearray(segment_bytes(described.layout)))


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def sample(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits as values: every NaN and infinity of a dtype comes along."""
    count = int(np.prod(shape)) * DTYPES[dtype]
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return bits.view(getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_byte_for_byte(dtype: str) -> None:
    whole = sample(dtype, (4, 6, 8))
    given = {
        "whole": whole,
        "turned": whole.permute(2, 0, 1),
        "stepped": whole[::2, 1:, ::3],
        "spread": whole[:1].expand(5, 6, 8),
        "scalar": whole[0, 0, 0],
        "none": whole[:, :0],
    }
    standing = stand(given)
    assert list(standing) == list(given)
    for name, tensor in given.items():
        assert (standing[name].dtype, standing[name].shape) == (tensor.dtype, tensor.shape)
        assert standing[name].is_contiguous()
        if tensor.numel():
            assert raw(standing[name]) == raw(tensor), name


@pytest.mark.parametrize(
    "dtype",
    "bool u1 u2 u4 u8 i1 i2 i4 i8 f2 f4 f8 c8 c16 >f4 >i8".split(),  # noqa: SIM905 (reads as the list it is)
)
def test_numpy_arrays_are_copied(dtype: str) -> None:
    whole = np.arange(24).astype(dtype).reshape(2, 3, 4)
    frozen = whole[:, ::2].transpose(2, 0, 1)
    frozen.flags.writeable = False
    standing = stand({"a": whole, "b": frozen, "c": whole[1, 1, 1:2].reshape(()), "d": whole[:0]})
    np.testing.assert_array_equal(standing["a"].numpy(), whole)
    np.testing.assert_array_equal(standing["b"].numpy(), frozen)
    assert standing["c"].item() == whole[1, 1, 1]
    assert standing["d"].shape == (0, 3, 4)


def test_values_are_copied_and_not_aliased() -> None:
    tensor, array = torch.ones(3, requires_grad=True), np.ones(3)
    standing = stand({"tensor": tensor, "array": array})
    for name in standing:
        standing[name].zero_()
    assert tensor.tolist() == [1, 1, 1]
    assert array.tolist() == [1, 1, 1]
    assert not standing["tensor"].requires_grad


def test_lazy_conjugates_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    standing = stand({"a": value, "b": value.imag})
    assert standing["a"].tolist() == [1 - 2j, 3 + 4j]
    assert standing["b"].tolist() == [-2, 4]
    assert not standing["a"].is_conj()


def test_any_name_stands() -> None:
    names = ["a.b.c", "a/b", " ", "Gewicht größer", "重み", "\n", "a" * 4096]
    assert list(stand({name: torch.zeros(1) for name in names})) == names


def test_order_does_not_change_the_layout() -> None:
    one, two = TensorSpec((2,), "int8"), TensorSpec((3,), torch.float16)
    assert layout_digest(describe({"a": one, "b": two}).layout) == layout_digest(describe({"b": two, "a": one}).layout)


def test_specs_and_meta_tensors_bring_no_values() -> None:
    described = describe(
        {
            "spec": TensorSpec([2, 3], torch.bfloat16, global_shape=[4, 3], offset=(2, 0)),
            "meta": torch.empty(3, device="meta"),
            "value": torch.ones(1),
        }
    )
    assert set(described.values) == {"value"}
    entries = {entry.name: entry for entry in described.layout.tensors}
    assert entries["spec"].dtype == "bfloat16"
    assert (entries["spec"].shape, entries["spec"].global_shape, entries["spec"].offset) == ((2, 3), (4, 3), (2, 0))
    memory = bytearray(b"\x00\x40" * (segment_bytes(described.layout) // 2))
    standing = bind(described, memory)
    assert standing["spec"].unique().tolist() == [2.0]
    assert not standing["meta"].is_meta
    assert standing["value"].item() == 1


def test_memory_wins_when_asked() -> None:
    described = describe({"a": torch.ones(4)})
    memory = bytearray(segment_bytes(described.layout))
    assert bind(described, memory, memory_wins=True)["a"].tolist() == [0] * 4
    assert bind(described, memory)["a"].tolist() == [1] * 4


def test_numpy_dtypes_from_outside_go_by_torch_s_name() -> None:
    outside = pytest.importorskip("ml_dtypes")
    value = np.array([1.5, -2], dtype=outside.bfloat16)
    assert stand({"a": value})["a"].tolist() == [1.5, -2]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*quantiz")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "not dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "not dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.nn.parameter.UninitializedParameter, "not initialised"),
        (lambda: torch.empty(3, dtype=torch.bits8), "dtype 'bits8'"),
        (lambda: np.array(["text"]), "numpy dtype <U4"),
        (lambda: np.zeros(2, dtype=np.longdouble), "numpy dtype float128"),
        (lambda: np.zeros(2, dtype="datetime64[s]"), "numpy dtype datetime64"),
        (lambda: np.zeros(2, dtype=object), "numpy dtype object"),
        (lambda: np.zeros(2, dtype=[("a", "f4")]), "numpy dtype"),
        (lambda: np.float32(1), "a numpy.float32; give a torch.Tensor, DTensor, numpy.ndarray or tensorhub.TensorSpec"),
        (lambda: [1.0], "a list"),
        (lambda: None, "a NoneType"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        describe({"fine": torch.ones(1), "odd one": value()})
    assert "'odd one'" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("given", [None, [torch.ones(1)], torch.ones(1), "policy", torch.nn.Linear, iter([])])
def test_wrong_argument_says_what_is_accepted(given: Any) -> None:
    with pytest.raises(LayoutMismatch, match=r"an nn\.Module or a mapping of name to"):
        describe(given)


@pytest.mark.parametrize("name", ["", 3, None, "\ud800", "a" * 4097])
def test_wrong_names_are_refused(name: Any) -> None:
    with pytest.raises(LayoutMismatch):
        describe({name: torch.ones(1)})


@pytest.mark.parametrize(
    "parts",
    [
        ((-1,), "int8"),
        (3, "int8"),
        ((1.5,), "int8"),
        ("23", "int8"),
        ((True,), "int8"),
        ((2,), "float31"),
        ((2,), None),
        ((2,), torch.qint8),
        ((2,), "int8", (2, 2)),
        ((2,), "int8", (2,), (0, 0)),
    ],
)
def test_wrong_specs_are_refused_at_once(parts: Any) -> None:
    with pytest.raises(LayoutMismatch):
        TensorSpec(*parts)


def test_box_must_fit_its_global_tensor() -> None:
    with pytest.raises(LayoutMismatch, match="'a'"):
        describe({"a": TensorSpec((2,), "int8", (3,), (2,))})


def test_thousands_of_tiny_tensors_are_quick() -> None:
    given = {f"layer.{number}.scale": torch.ones(4) for number in range(5000)}
    before = time.process_time()
    standing = stand(given)
    assert time.process_time() - before < 1
    assert all(tensor.sum() == 4 for tensor in standing.values())


def test_module_elsewhere_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other device stands in the test machine, so one is pretended."""
    module = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda:1")))
    with pytest.raises(NotInThisVersion, match=r"'weight' is on cuda:1.*move the module to the CPU"):
        describe(module)


# ---------------------------------------------------------------------------------------------------- mapped by names

NAMES = Mapping(
    "mine",
    (
        Rule("qk", concat(mapping.tensor("q", share(4, 1, 2)), mapping.tensor("k", share(2, 0, 2)))),
        Rule("vocabulary", mapping.tensor("{name}", Padded(5, 1, 2))),
        Rule("{*path}.table", LEFT_OUT),
        Rule("norm", AS_IT_IS),
        Rule("{name:weight|alias}", mapping.tensor("w")),
    ),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mapping_tells_the_layout_of_parts_and_padding_is_zero(dtype: str) -> None:
    given = {"qk": sample(dtype, (3, 2)), "vocabulary": sample(dtype, (4, 2)), "norm": sample(dtype, (2,))}
    described = describe(given | {"a.table": sample(dtype, (8,))}, NAMES)
    assert set(described.names) == set(described.values) == {"qk", "vocabulary", "norm"}
    entries = {entry.name: entry for entry in described.layout.tensors}
    assert [part.name for part in entries["qk"].parts] == ["q", "k"]
    assert not entries["norm"].parts
    standing = bind(described, bytearray(segment_bytes(described.layout)))
    assert set(standing) == set(given)
    assert raw(standing["qk"]) == raw(given["qk"])
    assert raw(standing["vocabulary"][:1]) == raw(given["vocabulary"][:1])
    assert set(raw(standing["vocabulary"][1:])) == {0}
    key = entries["qk"].parts[1]
    assert raw(box_of(key, standing["qk"])) == raw(given["qk"][2:])


def test_memory_that_wins_keeps_its_padding() -> None:
    described = describe({"vocabulary": torch.ones(4, 2)}, NAMES)
    memory = bytearray(b"\1" * segment_bytes(described.layout))
    bind(described, memory, memory_wins=True)
    assert set(memory) == {1}


def test_what_a_module_leaves_out_stays_where_it_is() -> None:
    weight, table = nn.Parameter(torch.ones(2, 2)), torch.full((3,), 7.0)
    module, inner = nn.Module(), nn.Module()
    module.weight = module.alias = weight
    module.inner = inner
    inner.register_buffer("table", table)
    before = table.data_ptr()
    described = describe(module, NAMES)
    standing = bind(described, bytearray(segment_bytes(described.layout)))
    assert set(standing) == {"weight", "alias"}
    assert standing["alias"].data_ptr() == weight.data_ptr() == standing["weight"].data_ptr()
    assert inner.table is table
    assert table.data_ptr() == before
    assert described.layout.tensors[0].parts == (Part("w", (2, 2), (0, 0), (2, 2), (0, 0), (2, 2)),)


def test_a_tensor_without_a_rule_is_refused_by_name_and_nothing_changes() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.data_ptr()
    with pytest.raises(LayoutMismatch, match=r"'bias' .* mine has no rule for it"):
        describe(module, NAMES)
    assert module.weight.data_ptr() == before


def test_parts_may_come_with_a_spec_and_are_checked() -> None:
    halves = (Part("q", (4, 2), (2, 0), (2, 2), (0, 0), (2, 2)), padding((2, 0), (1, 2)))
    spec = TensorSpec((3, 2), "int8", parts=halves)
    assert describe({"qk": spec}).layout.tensors[0].parts == halves
    # A mapping leaves them as they are.
    assert describe({"unknown": spec}, NAMES).layout.tensors[0].parts == halves
    with pytest.raises(LayoutMismatch, match=r"'qk' of shape \(3, 2\): no part has its elements from \(2, 0\)"):
        describe({"qk": TensorSpec((3, 2), "int8", parts=halves[:1])})
    with pytest.raises(LayoutMismatch, match="the parts of a TensorSpec are"):
        TensorSpec((3, 2), "int8", parts=[(0, 1)])  # type: ignore[list-item]


def test_parts_are_of_whole_numbers_whosever_they_are() -> None:
    numbers = np.array([4]), [np.int64(0)], torch.Size((2,)), (0,), (2,)
    given = TensorSpec((2,), "int8", parts=[Part("q", *numbers)])  # type: ignore[arg-type]
    assert given.parts == (Part("q", (4,), (0,), (2,), (0,), (2,)),)
    assert {type(size) for size in (*given.parts[0].global_shape, *given.parts[0].offset)} == {int}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"global_shape": "4"}, "the global_shape of part 0 ('q') of a TensorSpec is '4'"),
        ({"offset": (0.0,)}, "the offset of part 0 ('q') of a TensorSpec is (0.0,)"),
        ({"extent": (-2,)}, "the extent of part 0 ('q') of a TensorSpec is (-2,)"),
        ({"start": None}, "the start of part 0 ('q') of a TensorSpec is None"),
        ({"shape": 2}, "the shape of part 0 ('q') of a TensorSpec is 2"),
        ({"name": 7}, "the name of part 0 (7) of a TensorSpec is 7"),
        ({"cast": None}, "the cast of part 0 ('q') of a TensorSpec is None"),
    ],
)
def test_a_part_that_is_none_is_told_by_its_name(wrong: dict[str, Any], said: str) -> None:
    part = msgspec.structs.replace(Part("q", (4,), (0,), (2,), (0,), (2,)), **wrong)
    with pytest.raises(LayoutMismatch, match=re.escape(said)):
        TensorSpec((2,), "int8", parts=[part])


def test_a_tensor_may_be_all_padding() -> None:
    names = Mapping("mine", (Rule("w", Padding()),))
    standing = bind(describe({"w": torch.ones(3)}, names), bytearray(256))
    assert standing["w"].tolist() == [0, 0, 0]
