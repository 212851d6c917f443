"""Real processes are killed or stopped under a running job; `make chaos` and its like do the same for longer."""

import random
from pathlib import Path

import pytest
from tests.chaos import crowds, late_bytes, only_holder
from tests.chaos.content import MIB
from tests.chaos.kills import Run
from tests.chaos.torn_reads import Hunt
from tests.chaos.two_holders import HOLDERS, Read, TwoHolders, two_holders
from tests.kit.transports import UCXX, UCXX_AND_SLOW_LOCAL
from tests.kit.waiting import kill, met

from tensorhub.arguments import INSTALLS, Install
from tensorhub_agent.core.command_sequencer import SHARDS_MAX
from tensorhub_agent.leases.table import LEASES_OF_ONE_MAX
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_common.layout.layout import PIECE_BYTES_MAX
from tensorhub_common.protocol.worker import REGISTERING_MAX

NBYTES = 128 * MIB
WINDOW_BYTES = 16 * MIB

IN_FLIGHT_BYTES_MAX = max(WINDOW_BYTES, 2 * BatchLimits().memory_bytes) + 2 * PIECE_BYTES_MAX
"""Of one source: its part of the window, or two batches, each with a piece that made it full."""


@pytest.mark.long
async def test_three_kills(tmp_path: Path) -> None:
    run = Run(directory=tmp_path, nbytes=8 * MIB, seed=1, kills=3, seconds_max=100.0)
    await run.go()
    assert not run.findings.wrongs, "\n".join([run.table(), *run.findings.wrongs])
    assert len(run.done) == run.kills
    assert run.findings.compared["commit"] > run.kills
    assert run.log.roots


async def struck(holders: TwoHolders, chance: random.Random) -> Read:
    async with holders.reader() as reader:
        return await holders.struck(reader, chance.choice(HOLDERS), chance.uniform(0, holders.calm_s), kill)


@pytest.mark.long
@pytest.mark.parametrize("hosts", UCXX_AND_SLOW_LOCAL)
async def test_a_source_is_killed_and_only_what_is_missing_is_read_again(tmp_path: Path, hosts: int) -> None:
    """The reader ends with equal bytes, and has asked for no more than all of them and what was under way."""
    async with two_holders(tmp_path, NBYTES, hosts=hosts, TENSORHUB_WINDOW_BYTES=str(WINDOW_BYTES)) as holders:
        chance = random.Random(3)
        report = (await met(lambda _: struck(holders, chance))).report
    assert (report.got_bytes, report.kept) == (report.nbytes, 0)
    assert sum(source.nbytes for source in report.sources) == report.nbytes
    assert report.wasted_bytes <= IN_FLIGHT_BYTES_MAX, report


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("hosts", "comes_back"),
    [
        pytest.param(2, False, id="ucxx-stays-away", marks=[*UCXX.marks, pytest.mark.long]),
        pytest.param(1, False, id="local-stays-away", marks=pytest.mark.slow),
        pytest.param(1, True, id="local-comes-back", marks=pytest.mark.slow),
    ],
)
async def test_the_only_holder_is_killed_in_mid_transfer(tmp_path: Path, hosts: int, comes_back: bool) -> None:  # noqa: FBT001
    """`VersionUnavailable` soon after the log has lost its agent, or the whole version."""
    nbytes = NBYTES if hosts == 2 else 4 * NBYTES
    outcome = await met(
        lambda number: only_holder.run(tmp_path / str(number), nbytes, comes_back=comes_back, hosts=hosts)
    )
    assert outcome.wrong(comes_back=comes_back) is None, outcome


@pytest.mark.long
@pytest.mark.parametrize("hosts", UCXX_AND_SLOW_LOCAL)
async def test_a_source_that_was_stopped_in_mid_read_and_woken_changes_nothing(tmp_path: Path, hosts: int) -> None:
    async with two_holders(tmp_path, NBYTES, hosts=hosts, **late_bytes.SETTINGS) as holders:
        found = await late_bytes.play(holders, 1, seed=1)
    assert len(found.reads) == 1
    assert found.looks > 1
    assert not found.changed, found


@pytest.mark.slow
async def test_with_the_drain_no_commit_is_torn(tmp_path: Path) -> None:
    hunt = Hunt(directory=tmp_path, nbytes=32 * MIB, seconds=4.0)
    await hunt.go()
    assert hunt.findings.wrongs == []
    assert all(hunt.commits[transport] for transport in ("local", "ucxx"))


@pytest.mark.slow
async def test_without_the_drain_torn_pieces_are_met_and_none_is_committed(tmp_path: Path) -> None:
    hunt = Hunt(directory=tmp_path, nbytes=32 * MIB, seconds=15.0, drains=False)
    await hunt.go()
    assert hunt.findings.wrongs == []
    assert hunt.torn > 0
    assert hunt.findings.unequal == 0


# Crowds: `make crowds` plays a thousand of each.


@pytest.mark.long
async def test_every_call_ends_and_every_shard_serves_after_a_kill(tmp_path: Path) -> None:
    """More calls than register at a time."""
    found = await crowds.calls(tmp_path, REGISTERING_MAX + 36)
    assert not found.wrong, found.table


@pytest.mark.long
@pytest.mark.parametrize("install", INSTALLS)
async def test_every_reader_of_a_crowd_gets_the_version_though_its_source_is_stopped(
    tmp_path: Path, install: Install
) -> None:
    """More readers than a source gives leases to one agent at a time; each holds the trainer's bytes, twice."""
    found = await crowds.readers(tmp_path, LEASES_OF_ONE_MAX + 16, install, kib=4, stopped_s=0.5)
    assert not found.wrong, found.table
    assert not found.raised, found.table


@pytest.mark.long
async def test_many_jobs_begin_at_once(tmp_path: Path) -> None:
    found = await crowds.jobs(tmp_path, 12)
    assert not found.wrong, found.table


@pytest.mark.slow
async def test_an_agent_with_all_the_shards_that_it_may_have_is_killed(tmp_path: Path) -> None:
    """Every shard and version is found again, and of what was refused nothing is left."""
    found = await crowds.shards(tmp_path, SHARDS_MAX, refused=3)
    assert not found.wrong, found.table
    assert found.raised == {"MemoryExhausted": 3}
