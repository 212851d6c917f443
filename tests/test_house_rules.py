"""The rules of CONTRIBUTING.md that no tool checks, and which tests begin first."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests import longest_first

ROOT: Final = Path(__file__).parents[1]
INSTALLED: Final = ("libs", "services", "simulator")


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_what_reading_foreign_bytes_raises_has_one_name() -> None:
    """Who names msgspec's own error alone forgets that texts may be no UTF-8, and lists too deep."""
    where = [name_of(path) for path in python_files(*INSTALLED) if "MsgspecError" in path.read_text()]
    assert where == ["libs/common/tensorhub_common/malformed.py"]


def test_the_files_that_begin_first_are_there() -> None:
    assert [file for file in longest_first.FILES if not (ROOT / file).is_file()] == []
    assert len(set(longest_first.FILES)) == len(longest_first.FILES)
