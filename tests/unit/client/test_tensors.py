"""Tensors in hub memory and in files: what is accepted, what is refused by name, and bytes that arrive unchanged."""

import gc
import mmap
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tensorhub import mapping
from tensorhub._tensors import safetensors_files
from tensorhub._tensors.description import bind, box_of, describe
from tensorhub._tensors.safetensors_files import load_files, save_file
from tensorhub._tensors.segment_mapping import map_segment, tensors_at
from tensorhub.mapping import AS_IT_IS, LEFT_OUT, Mapping, Padded, Padding, Rule, concat, share
from tensorhub.specs import DTYPES, TensorSpec
from tensorhub_common.errors import AgentUnavailable, LayoutMismatch, NotInThisVersion, TensorHubError
from tensorhub_common.layout.layout import Layout, layout_digest, layout_of, placements, segment_bytes
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


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_byte_for_byte(dtype: str, tmp_path: Path) -> None:
    whole = sample(dtype, (4, 6, 8))
    given = {
        "whole": whole,
        "turned": whole.permute(2, 0, 1),
        "stepped": whole[::2, 1:, ::3],
        "spread": whole[:1].expand(5, 6, 8),
        "scalar": whole[0, 0, 0],
        "none": whole[:, :0],
        "a/é": whole[0],
    }
    standing = stand(given)
    assert list(standing) == list(given)
    assert all(tensor.is_contiguous() for tensor in standing.values())
    both = [(given, standing)]
    # A file's half of a byte has no shape.
    filed = given | {"scalar": torch.tensor(3.5)}
    if dtype in ("complex32", "complex128"):
        with pytest.raises(TensorHubError, match=f"is torch.{dtype}"):
            save_file(tmp_path / "file", filed)
    else:
        save_file(tmp_path / "file", filed, {"version": "12"})
        both.append((filed, load_files([tmp_path / "file"])))
    for wanted, found in both:
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert not tensor.numel() or raw(found[name]) == raw(tensor), name


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


def test_values_are_copied_and_not_aliased_and_lazy_conjugates_are_resolved() -> None:
    outside = pytest.importorskip("ml_dtypes")
    tensor, array, lazy = torch.ones(3, requires_grad=True), np.ones(3), torch.tensor([1 + 2j, 3 - 4j]).conj()
    odd = np.array([1.5, -2], dtype=outside.bfloat16)
    standing = stand({"tensor": tensor, "array": array, "lazy": lazy, "imag": lazy.imag, "outside": odd})
    assert (standing["lazy"].tolist(), standing["imag"].tolist()) == ([1 - 2j, 3 + 4j], [-2, 4])
    assert standing["outside"].tolist() == [1.5, -2]
    assert not standing["lazy"].is_conj()
    assert not standing["tensor"].requires_grad
    for name in standing:
        standing[name].zero_()
    assert (tensor.tolist(), array.tolist()) == ([1, 1, 1], [1, 1, 1])


def test_any_name_stands_order_changes_no_layout_and_thousands_are_quick() -> None:
    names = ["a.b.c", "a/b", " ", "Gewicht größer", "重み", "\n", "a" * 4096]
    assert list(stand({name: torch.zeros(1) for name in names})) == names
    one, two = TensorSpec((2,), "int8"), TensorSpec((3,), torch.float16)
    assert layout_digest(describe({"a": one, "b": two}).layout) == layout_digest(describe({"b": two, "a": one}).layout)
    given = {f"layer.{number}.scale": torch.ones(4) for number in range(5000)}
    before = time.process_time()
    standing = stand(given)
    assert time.process_time() - before < 1
    assert all(tensor.sum() == 4 for tensor in standing.values())


def test_specs_and_meta_tensors_bring_no_values_and_memory_wins_when_asked() -> None:
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
    assert bind(described, memory, memory_wins=True)["value"].item() != 1
    standing = bind(described, memory)
    assert standing["spec"].unique().tolist() == [2.0]
    assert not standing["meta"].is_meta
    assert standing["value"].item() == 1


# ------------------------------------------------------------------------------------------------------------ refused

HALVES = (Part("q", (4, 2), (2, 0), (2, 2), (0, 0), (2, 2)), padding((2, 0), (1, 2)))


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
        # A box must fit its global tensor, and parts their tensor.
        (lambda: TensorSpec((2,), "int8", (3,), (2,)), ""),
        (lambda: TensorSpec((3, 2), "int8", parts=HALVES[:1]), "(3, 2): no part has its elements from (2, 0)"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        describe({"fine": torch.ones(1), "odd one": value()})
    assert "'odd one'" in str(caught.value)
    assert said in str(caught.value)


def test_wrong_arguments_and_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: tuple[Any, ...] = (None, [torch.ones(1)], torch.ones(1), "policy", torch.nn.Linear, iter([]))
    for given in arguments:
        with pytest.raises(LayoutMismatch, match=r"an nn\.Module or a mapping of name to"):
            describe(given)
    names: tuple[Any, ...] = ("", 3, None, "\ud800", "a" * 4097)
    for name in names:
        with pytest.raises(LayoutMismatch):
            describe({name: torch.ones(1)})
    # No other device stands in the test machine, so one is pretended.
    module = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("xpu:1")))
    with pytest.raises(NotInThisVersion, match=r"'weight' is on xpu:1.*move the module to the CPU"):
        describe(module)


@pytest.mark.parametrize(
    "parts",
    [
        *((shape, "int8") for shape in ((-1,), 3, (1.5,), "23", (True,))),
        *(((2,), dtype) for dtype in ("float31", None, torch.qint8)),
        ((2,), "int8", (2, 2)),
        ((2,), "int8", (2,), (0, 0)),
    ],
)
def test_wrong_specs_are_refused_at_once(parts: Any) -> None:
    with pytest.raises(LayoutMismatch):
        TensorSpec(*parts)


@pytest.mark.parametrize(
    ("field", "value"),
    {
        "global_shape": "4",
        "offset": (0.0,),
        "extent": (-2,),
        "start": None,
        "shape": 2,
        "name": 7,
        "cast": None,
    }.items(),
)
def test_a_part_is_of_whole_numbers_whosever_they_are_or_told_by_its_name(field: str, value: object) -> None:
    part = msgspec.structs.replace(Part("q", (4,), (0,), (2,), (0,), (2,)), **{field: value})
    said = f"the {field} of part 0 ({part.name!r}) of a TensorSpec is {value!r}"
    with pytest.raises(LayoutMismatch, match=re.escape(said)):
        TensorSpec((2,), "int8", parts=[part])
    with pytest.raises(LayoutMismatch, match="the parts of a TensorSpec are"):
        TensorSpec((2,), "int8", parts=[(0, 1)])  # type: ignore[list-item]
    numbers = np.array([4]), [np.int64(0)], torch.Size((2,)), (0,), (2,)
    given = TensorSpec((2,), "int8", parts=[Part("q", *numbers)])  # type: ignore[arg-type]
    assert given.parts == (Part("q", (4,), (0,), (2,), (0,), (2,)),)
    assert {type(size) for size in (*given.parts[0].global_shape, *given.parts[0].offset)} == {int}


# ---------------------------------------------------------------------------------------------------- mapped by names

NAMES = Mapping(
    "mine",
    (
        Rule("qk", concat(mapping.tensor("q", share(4, 1, 2)), mapping.tensor("k", share(2, 0, 2)))),
        Rule("vocabulary", mapping.tensor("{name}", Padded(5, 1, 2))),
        Rule("{*path}.table", LEFT_OUT),
        Rule("norm", AS_IT_IS),
        Rule("all", Padding()),
        Rule("{name:weight|alias}", mapping.tensor("w")),
    ),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mapping_tells_the_layout_of_parts_and_padding_is_zero(dtype: str) -> None:
    given = {"qk": sample(dtype, (3, 2)), "vocabulary": sample(dtype, (4, 2)), "norm": sample(dtype, (2,))}
    given["all"] = sample(dtype, (3,))
    described = describe(given | {"a.table": sample(dtype, (8,))}, NAMES)
    assert set(described.names) == set(described.values) == set(given)
    entries = {entry.name: entry for entry in described.layout.tensors}
    assert [part.name for part in entries["qk"].parts] == ["q", "k"]
    assert not entries["norm"].parts
    memory = bytearray(segment_bytes(described.layout))
    standing = bind(described, memory)
    assert set(standing) == set(given)
    assert raw(standing["qk"]) == raw(given["qk"])
    assert raw(standing["vocabulary"][:1]) == raw(given["vocabulary"][:1])
    assert set(raw(standing["vocabulary"][1:])) == set(raw(standing["all"])) == {0}
    assert raw(box_of(entries["qk"].parts[1], standing["qk"])) == raw(given["qk"][2:])
    memory[:] = b"\1" * len(memory)
    bind(described, memory, memory_wins=True)
    assert set(memory) == {1}, "memory that wins keeps its padding"


def test_what_a_module_leaves_out_stays_and_a_tensor_without_a_rule_changes_nothing() -> None:
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
    other = nn.Linear(2, 2)
    before = other.weight.data_ptr()
    with pytest.raises(LayoutMismatch, match=r"'bias' .* mine has no rule for it"):
        describe(other, NAMES)
    assert other.weight.data_ptr() == before
    spec = TensorSpec((3, 2), "int8", parts=HALVES)
    for name, names in (("qk", None), ("unknown", NAMES)):
        assert describe({name: spec}, names).layout.tensors[0].parts == HALVES, "parts that were given stay"


# ---------------------------------------------------------------------------------------------------- a mapped segment


def layout(**specs: TensorSpec) -> Layout:
    return layout_of(spec.entry(name) for name, spec in specs.items())


def segment(wanted: Layout) -> int:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, segment_bytes(wanted))
    return fd


def test_every_dtype_stands_at_its_placement_in_a_segment() -> None:
    wanted = layout(**{name: TensorSpec((3, 5), name) for name in DTYPES}, z=TensorSpec((), "float32"))
    fd = segment(wanted)
    standing = tensors_at(wanted, map_segment(fd, wanted))
    for entry, start in zip(wanted.tensors, placements(wanted), strict=True):
        bits = bytes(number % 2 for number in range(entry.nbytes))
        os.pwrite(fd, bits, start)
        assert standing[entry.name].shape == entry.shape
        assert raw(standing[entry.name]) == list(bits)
    standing["z"].fill_(2.5)
    assert os.pread(fd, 4, placements(wanted)[-1]) == b"\x00\x00\x20\x40"
    os.close(fd)


def test_a_layout_without_a_byte_needs_no_mapping_and_a_short_segment_is_refused() -> None:
    empty = layout(a=TensorSpec((0, 3), "float32"))
    with torch.device("meta"):
        standing = tensors_at(empty, map_segment(-1, empty))
    assert (standing["a"].shape, standing["a"].device.type) == ((0, 3), "cpu")
    wanted = layout(a=TensorSpec((1000,), "float32"))
    fd = os.memfd_create("short")
    with pytest.raises(AgentUnavailable, match="register again"):
        map_segment(fd, wanted)
    os.close(fd)
    with pytest.raises(LayoutMismatch, match="another shard"):
        tensors_at(wanted, bytearray(100))


def test_a_mapping_lives_as_long_as_a_tensor_of_it() -> None:
    wanted = layout(a=TensorSpec((4,), "float32"), b=TensorSpec((4,), "float32"))
    fd = segment(wanted)
    memory = map_segment(fd, wanted)
    assert isinstance(memory, mmap.mmap)
    gone = weakref.ref(memory)
    standing = tensors_at(wanted, memory)
    part = standing["b"][1:]
    os.close(fd)
    del memory, standing
    gc.collect()
    assert gone() is not None
    part.fill_(7)
    assert part.tolist() == [7.0] * 3
    del part
    gc.collect()
    assert gone() is None


def test_tensors_have_version_counters_of_their_own() -> None:
    """Writing one tensor between forward and backward of another is no error."""
    standing = stand({"a": TensorSpec((4,), "float32"), "b": TensorSpec((4,), "float32")})
    leaf = standing["a"].requires_grad_()
    loss = (leaf * leaf).sum()
    standing["b"].add_(1)
    loss.backward()
    assert standing["a"].untyped_storage().nbytes() == 16


# -------------------------------------------------------------------------------------------------------------- files


def test_several_files_are_one_mapping_and_tied_tensors_are_written_under_every_name(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save_file(tmp_path / "1", {"a": whole, "b": whole, "c": whole[2:4], "d": whole.requires_grad_()})
    save_file(tmp_path / "2", {"e": torch.ones(2)})
    loaded = load_files([str(tmp_path / "1"), tmp_path / "2"])
    assert set(loaded) == set("abcde")
    assert (loaded["b"].tolist(), loaded["c"].tolist()) == (whole.tolist(), [2, 3])
    save_file(tmp_path / "3", {"a": torch.ones(3)})
    with pytest.raises(TensorHubError, match=r"'a' stands in .*/1 and in .*/3"):
        load_files([tmp_path / "1", tmp_path / "2", tmp_path / "3"])


def test_a_wrong_file_is_named_in_one_line(tmp_path: Path) -> None:
    save_file(tmp_path / "whole", {"a": torch.ones(1000)})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10])
    (tmp_path / "text").write_text("these are no weights")
    (tmp_path / "empty").touch()
    said = {"cut": "not a whole", "text": "not a whole", "empty": "not a whole", "missing": "does not exist"}
    for name, why in (said | {"": "is not a file"}).items():
        with pytest.raises(TensorHubError) as caught:
            load_files([tmp_path / name])
        assert str(tmp_path / name) in str(caught.value)
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    save_file(target, {"a": torch.ones(1)})
    before = target.read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "_flush", full)
    with pytest.raises(TensorHubError, match="No space left"):
        save_file(target, {"a": torch.zeros(1)})
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(TensorHubError, match="can't be written"):
        save_file(tmp_path / "no" / "folder", {"a": torch.ones(1)})
