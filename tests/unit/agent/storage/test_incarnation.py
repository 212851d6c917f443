"""The number of an agent's runs rises, also where the disk takes nothing."""

from pathlib import Path

import pytest

from tensorhub_agent.runtime.troubles import TROUBLES
from tensorhub_agent.storage.incarnation import IncarnationCounter


def test_a_full_disk_keeps_no_agent_from_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incarnation = IncarnationCounter(tmp_path)
    first = incarnation.next()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        second = incarnation.next()
        (trouble,) = TROUBLES.told()
    assert second > first
    assert (trouble.kind, "make room there" in trouble.why) == ("no-room-for-state", True)
    assert incarnation.next() > second
    assert TROUBLES.told() == ()
