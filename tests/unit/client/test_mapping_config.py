"""Configurations in every form."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.mapping.model_config import lookup_of
from tensorhub.mapping.sizes import sizes_of

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}


def test_a_dict_an_object_a_file_and_its_folder_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    forms = (CONFIG, SimpleNamespace(**CONFIG), file, str(file), tmp_path)
    assert len({sizes_of(lookup_of(form)) for form in forms}) == 1


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "weights").write_bytes(bytes(10))
    for path in (tmp_path, tmp_path / "list.json", tmp_path / "weights"):
        with pytest.raises(ValueError, match="is no model configuration"):
            lookup_of(path)
