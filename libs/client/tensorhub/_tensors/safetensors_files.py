"""Weights in `.safetensors` files: read as a mapping that can be registered, written from one.

Always true: a file that is written appears whole or not at all, also when the disk is full; errors name the file in
one line, because they end up on somebody's terminal.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file as write_file

from tensorhub_common.errors import TensorHubError

_NO_TWIN: Final = frozenset({torch.complex32, torch.complex128})
"""The dtypes of hub memory for which the file format has no name."""


def load_files(paths: Iterable[str | os.PathLike[str]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, by name. They are read from disk when they are used first."""
    tensors: dict[str, torch.Tensor] = {}
    origin: dict[str, Path] = {}
    for path in map(Path, paths):
        for name, tensor in _load(path).items():
            if name in tensors:
                raise TensorHubError(f"tensor {name!r} stands in {origin[name]} and in {path}; give each tensor once")
            tensors[name], origin[name] = tensor, path
    return tensors


def _load(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise TensorHubError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise TensorHubError(f"{path} is not a whole .safetensors file: {error}") from error
    except OSError as error:
        raise TensorHubError(f"{path} can't be read: {error.strerror or error}") from error


def save_file(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to one file, in place of one that may be there. Tied tensors are written under every name."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write_file(_apart(tensors), beside, metadata={"format": "pt", **(metadata or {})})
        _flush(beside)
        beside.replace(target)
    except (OSError, SafetensorError) as error:
        raise TensorHubError(f"{target} can't be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors contiguous and with storages of their own, as the format's library wants them."""
    seen: set[int] = set()
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _NO_TWIN:
            raise TensorHubError(
                f"tensor {name!r} is {tensor.dtype}, which .safetensors files can't hold; convert it first"
            )
        dense = tensor.detach().contiguous()
        address = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if address in seen else dense
        seen.add(address)
    return apart


def _flush(path: Path) -> None:
    """Bring the bytes to the disk before the rename, so that a power cut can't leave a short file under the name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
