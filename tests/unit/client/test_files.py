"""`.safetensors` files in and out: whole, atomic, and one clear line when something is wrong."""

from pathlib import Path

import pytest
import torch

from tensorhub._tensors import safetensors_files
from tensorhub._tensors.safetensors_files import load_files, save_file
from tensorhub.specs import DTYPES
from tensorhub_common.errors import TensorHubError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    given = {
        f"layer/{name}.é": torch.randint(0, 2, (4, 2 * size), dtype=torch.uint8).view(getattr(torch, name))
        for name, size in DTYPES.items()
        if name not in ("complex32", "complex128")
    }
    given |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 7), "turned": torch.arange(6).view(2, 3).T}
    save_file(tmp_path / "a.safetensors", given, {"version": "12"})
    loaded = load_files([tmp_path / "a.safetensors"])
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        if tensor.numel():
            assert torch.equal(
                loaded[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            ), name


def test_tied_and_overlapping_tensors_are_written_under_every_name(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save_file(tmp_path / "a", {"a": whole, "b": whole, "c": whole[2:4], "d": whole.requires_grad_()})
    loaded = load_files([tmp_path / "a"])
    assert loaded["b"].tolist() == whole.tolist()
    assert loaded["c"].tolist() == [2, 3]


def test_several_files_are_one_mapping(tmp_path: Path) -> None:
    save_file(tmp_path / "1", {"a": torch.ones(1)})
    save_file(tmp_path / "2", {"b": torch.ones(2)})
    assert set(load_files([str(tmp_path / "1"), tmp_path / "2"])) == {"a", "b"}
    save_file(tmp_path / "3", {"a": torch.ones(3)})
    with pytest.raises(TensorHubError, match=r"'a' stands in .*/1 and in .*/3"):
        load_files([tmp_path / "1", tmp_path / "2", tmp_path / "3"])


def test_a_wrong_file_is_named_in_one_line(tmp_path: Path) -> None:
    save_file(tmp_path / "whole", {"a": torch.ones(1000)})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10])
    (tmp_path / "text").write_text("these are no weights")
    (tmp_path / "empty").touch()
    for name, said in [("cut", "not a whole"), ("text", "not a whole"), ("empty", "not a whole")]:
        expect_line(tmp_path / name, said)
    expect_line(tmp_path / "missing", "does not exist")
    expect_line(tmp_path, "is not a file")


def expect_line(path: Path, said: str) -> None:
    with pytest.raises(TensorHubError) as caught:
        load_files([path])
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
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


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(TensorHubError, match=f"'a' is {dtype}"):
        save_file(tmp_path / "a", {"a": torch.empty(1, dtype=dtype)})
