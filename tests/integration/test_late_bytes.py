"""A source that was stopped in mid-read and wakes up later changes no byte; `make late-bytes` plays 50 rounds."""

from pathlib import Path

import pytest
from tests.chaos import late_bytes
from tests.chaos.content import MIB
from tests.chaos.two_holders import two_holders
from tests.integration.transports import UCXX_AND_SLOWLY_LOCAL

NBYTES = 128 * MIB
ROUNDS = 1


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", UCXX_AND_SLOWLY_LOCAL)
async def test_a_woken_source_changes_nothing(tmp_path: Path, hosts: int) -> None:
    """The stop meets the read, the replica is committed without the source, and its memory stays as it is."""
    async with two_holders(tmp_path, NBYTES, hosts=hosts, **late_bytes.SETTINGS) as stage:
        found = await late_bytes.play(stage, ROUNDS, seed=1)
    assert len(found.reads) == ROUNDS
    assert found.looks > ROUNDS
    assert not found.changed, found.table
