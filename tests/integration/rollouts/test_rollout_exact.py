"""The torch engine on real processes, killed and given new versions: `make rollout-exact` does the same for longer."""

from pathlib import Path

import pytest
from tests.chaos import rollout_exact


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_is_killed_and_moved_is_bit_for_bit_what_one_engine_makes(tmp_path: Path) -> None:
    found = await rollout_exact.run(tmp_path, responses=24, kills=2, publishes=3)
    assert not found.wrongs, found.wrongs[:5]
    assert len(found.responses) == 24
    assert found.kills
