"""A model's Hugging Face configuration, read from a dict, an object with attributes, or a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tensorhub.mapping.sizes import Lookup

CONFIG_BYTES_MAX: Final = 16 * 1024 * 1024
"""No configuration is longer, and a caller that names the weights' file instead must not wait until it is read."""

Config = Mapping[str, Any] | str | os.PathLike[str] | object
"""A dict as config.json has it, the path of that file or of its folder, or a transformers configuration."""


def lookup_of(config: Config) -> Lookup:
    """Return a function that looks a configuration's values up. Raises `ValueError` for a file that is none."""
    if isinstance(config, str | os.PathLike):
        config = _read(Path(config))
    if isinstance(config, Mapping):
        return config.get
    return lambda name: getattr(config, name, None)


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            # What is cut off there is no JSON any more.
            return msgspec.json.decode(file.read(CONFIG_BYTES_MAX), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is no model configuration ({error}); give the path of a config.json, a dict, or a "
            "transformers configuration"
        ) from error
