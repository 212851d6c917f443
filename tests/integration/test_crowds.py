"""Many shards and calls at once at one agent, killed in the middle; `make crowds` plays them with a thousand."""

from pathlib import Path

import pytest
from tests.chaos import crowds

from tensorhub_agent.speech import SHARDS_MAX
from tensorhub_common.wire.worker import REGISTERING_MAX

COUNT = REGISTERING_MAX + 36
"""More than come in at a time."""


@pytest.mark.timeout(120)
async def test_every_call_ends_and_every_shard_serves_after_a_kill(tmp_path: Path) -> None:
    found = await crowds.calls(tmp_path, COUNT)
    assert not found.wrong, found.table


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_agent_with_all_the_shards_that_it_may_have_is_killed(tmp_path: Path) -> None:
    """Every shard and version is found again, and of what was refused nothing is left."""
    found = await crowds.shards(tmp_path, SHARDS_MAX, refused=3)
    assert not found.wrong, found.table
    assert found.raised == {"MemoryExhausted": 3}
