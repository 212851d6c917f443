"""What was worked out of lists: so much is remembered, and never anything else is returned."""

import pytest

from tensorhub_planner.compiler import memo
from tensorhub_planner.compiler.memo import BoundedMemo


def test_so_many_places_are_remembered_or_one_longer_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "PLACES_MAX", 4)
    known = BoundedMemo[str, str]()
    kept: list[list[str]] = []
    for key in ("a", "bbb", "cc", "dd", "eeeee", "f"):
        assert known.get(key) is None
        assert known.keep(key, len(key), key.upper()) == key.upper()
        kept.append([each for each in ("a", "bbb", "cc", "dd", "eeeee", "f") if known.get(each) == each.upper()])
        assert known.places == len("".join(kept[-1]))
    assert kept == [["a"], ["a", "bbb"], ["cc"], ["cc", "dd"], ["eeeee"], ["f"]]
