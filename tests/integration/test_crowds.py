"""Many of one thing at once at one hub, an agent killed or stopped; `make crowds` plays a thousand of each."""

from pathlib import Path

import pytest
from tests.chaos import crowds

from tensorhub.arguments import INSTALLS
from tensorhub_agent.core.command_sequencer import SHARDS_MAX
from tensorhub_agent.leases.table import LEASES_OF_ONE_MAX
from tensorhub_common.protocol.worker import REGISTERING_MAX

COUNT = REGISTERING_MAX + 36
"""More than come in at a time."""


@pytest.mark.timeout(120)
async def test_every_call_ends_and_every_shard_serves_after_a_kill(tmp_path: Path) -> None:
    found = await crowds.calls(tmp_path, COUNT)
    assert not found.wrong, found.table


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("install", INSTALLS)
async def test_every_reader_of_a_crowd_gets_the_version_though_its_source_is_stopped(
    tmp_path: Path, install: str
) -> None:
    """More readers than a source gives leases to one agent at a time; each holds the trainer's bytes, twice."""
    found = await crowds.readers(tmp_path, LEASES_OF_ONE_MAX + 16, install, kib=4, stopped_s=0.5)
    assert not found.wrong, found.table
    assert not found.raised, found.table


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_many_jobs_begin_at_once(tmp_path: Path) -> None:
    found = await crowds.jobs(tmp_path, 12)
    assert not found.wrong, found.table


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_agent_with_all_the_shards_that_it_may_have_is_killed(tmp_path: Path) -> None:
    """Every shard and version is found again, and of what was refused nothing is left."""
    found = await crowds.shards(tmp_path, SHARDS_MAX, refused=3)
    assert not found.wrong, found.table
    assert found.raised == {"MemoryExhausted": 3}
