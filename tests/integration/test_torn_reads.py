"""A trainer overwrites all the time while readers fetch: with the drain and without it, no commit is torn.

`make torn-reads` does the same for minutes.
"""

from pathlib import Path

import pytest
from tests.chaos.content import MIB
from tests.chaos.torn_reads import Hunt

pytestmark = pytest.mark.slow

NBYTES = 32 * MIB


async def test_with_the_drain_no_commit_is_torn(tmp_path: Path) -> None:
    hunt = Hunt(4.0, NBYTES, tmp_path)
    await hunt.go()
    assert hunt.findings.wrongs == []
    assert all(hunt.commits[transport] for transport in ("local", "ucxx"))


async def test_without_the_drain_torn_pieces_are_met_and_none_is_committed(tmp_path: Path) -> None:
    hunt = Hunt(15.0, NBYTES, tmp_path, drains=False)
    await hunt.go()
    assert hunt.findings.wrongs == []
    assert hunt.torn > 0
    assert hunt.findings.unequal == 0
