"""The documentation's table of settings says what the code says."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tools.docs.settings_page import table_markdown, with_table

from tensorhub_common.config.settings import VARIABLES, Settings

PAGE = Path(__file__).parents[4] / "docs" / "operate" / "settings.md"


def test_the_documentation_holds_the_table_of_the_code() -> None:
    """If this fails, run `make docs`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


def test_the_table_has_one_row_for_each_variable() -> None:
    named = re.findall(r"^\| `(TENSORHUB_\w+)` \|", table_markdown(), flags=re.MULTILINE)
    assert named == list(VARIABLES)
    assert len(named) == len(fields(Settings))


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        with_table("# Settings\n")
