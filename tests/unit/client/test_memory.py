"""The mapped segment: placed by the layout, shared with whoever else maps it, alive as long as a tensor is."""

import gc
import mmap
import os
import subprocess
import sys
import weakref

import pytest
import torch

from tensorhub._tensors.segment_mapping import map_segment, tensors_at
from tensorhub.specs import DTYPES, TensorSpec
from tensorhub_common.errors import AgentUnavailable, LayoutMismatch
from tensorhub_common.layout.layout import Layout, layout_of, placements, segment_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def layout(**specs: TensorSpec) -> Layout:
    return layout_of(spec.entry(name) for name, spec in specs.items())


def segment(wanted: Layout) -> int:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, segment_bytes(wanted))
    return fd


def test_every_dtype_stands_at_its_placement() -> None:
    wanted = layout(**{name: TensorSpec((3, 5), name) for name in DTYPES})
    fd = segment(wanted)
    standing = tensors_at(wanted, map_segment(fd, wanted))
    for entry, start in zip(wanted.tensors, placements(wanted), strict=True):
        tensor = standing[entry.name]
        assert (tensor.dtype, tensor.shape) == (getattr(torch, entry.name), (3, 5))
        raw = bytes(number % 2 for number in range(entry.nbytes))
        os.pwrite(fd, raw, start)
        assert tensor.view(-1).view(torch.uint8).tolist() == list(raw)
    os.close(fd)


def test_scalars_and_empty_tensors() -> None:
    wanted = layout(a=TensorSpec((), "float32"), b=TensorSpec((0, 3), "int8"), c=TensorSpec((2,), "bool"))
    fd = segment(wanted)
    standing = tensors_at(wanted, map_segment(fd, wanted))
    standing["a"].fill_(2.5)
    assert standing["b"].shape == (0, 3)
    assert standing["b"].device.type == "cpu"
    assert torch.frombuffer(bytearray(os.pread(fd, 4, 0)), dtype=torch.float32).item() == 2.5
    os.close(fd)


def test_layout_without_a_byte_needs_no_mapping() -> None:
    wanted = layout(a=TensorSpec((0,), "float32"))
    with torch.device("meta"):
        standing = tensors_at(wanted, map_segment(-1, wanted))
    assert standing["a"].shape == (0,)
    assert not standing["a"].is_meta


def test_mapping_lives_as_long_as_a_tensor_of_it() -> None:
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
    wanted = layout(a=TensorSpec((4,), "float32"), b=TensorSpec((4,), "float32"))
    standing = tensors_at(wanted, bytearray(segment_bytes(wanted)))
    leaf = standing["a"].requires_grad_()
    loss = (leaf * leaf).sum()
    standing["b"].add_(1)
    loss.backward()
    assert standing["a"].untyped_storage().nbytes() == 16


def test_short_segment_is_refused() -> None:
    wanted = layout(a=TensorSpec((1000,), "float32"))
    fd = os.memfd_create("short")
    with pytest.raises(AgentUnavailable, match="register again"):
        map_segment(fd, wanted)
    os.close(fd)
    with pytest.raises(LayoutMismatch, match="another shard"):
        tensors_at(wanted, bytearray(100))


@pytest.mark.long
def test_process_ends_well_with_tensors_alive() -> None:
    program = """
import os, torch
from tensorhub._tensors.segment_mapping import map_segment, tensors_at
from tensorhub.specs import TensorSpec
from tensorhub_common.layout.layout import layout_of
wanted = layout_of([TensorSpec((64,), "float32").entry("a")])
fd = os.memfd_create("x"); os.ftruncate(fd, 256)
kept = tensors_at(wanted, map_segment(fd, wanted))["a"]
torch.nothing = kept
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
