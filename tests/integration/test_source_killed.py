"""A source's agent is killed in mid-read: the rest comes from another holder, and without one the call says so."""

import contextlib
import random
from pathlib import Path

import pytest
from tests.chaos import only_holder
from tests.chaos.content import MIB
from tests.chaos.two_holders import HOLDERS, Missed, Read, Stage, kill, two_holders
from tests.integration.transports import UCXX, UCXX_AND_SLOWLY_LOCAL

from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_common.layout.layout import PIECE_BYTES_MAX

pytestmark = pytest.mark.long

NBYTES = 128 * MIB
WINDOW_BYTES = 16 * MIB
IN_FLIGHT_BYTES_MAX = max(WINDOW_BYTES, 2 * BatchLimits().local_bytes) + 2 * PIECE_BYTES_MAX
"""Of one source: its part of the window, or two batches, each with a piece that made it full."""

ATTEMPTS_MAX = 20
"""On a busy machine a read may be over before the test is given the processor."""


async def struck(stage: Stage, chance: random.Random) -> Read:
    for _ in range(ATTEMPTS_MAX):
        with contextlib.suppress(Missed):
            async with stage.reader() as reader:
                return await stage.struck(reader, chance.choice(HOLDERS), chance.uniform(0, stage.calm_s), kill)
    pytest.fail("no kill met the middle of a read")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", UCXX_AND_SLOWLY_LOCAL)
async def test_with_another_holder_only_what_is_missing_is_read_again(tmp_path: Path, hosts: int) -> None:
    """The reader ends with equal bytes, and has asked for no more than all of them and what was under way."""
    chance = random.Random(3)
    async with two_holders(tmp_path, NBYTES, hosts=hosts, TENSORHUB_WINDOW_BYTES=str(WINDOW_BYTES)) as stage:
        read = await struck(stage, chance)
    report = read.report
    assert (report.got_bytes, report.kept) == (report.nbytes, 0)
    assert sum(source.nbytes for source in report.sources) == report.nbytes
    assert report.wasted_bytes <= IN_FLIGHT_BYTES_MAX, report


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [UCXX])
async def test_without_another_holder_the_call_says_so(tmp_path: Path, hosts: int) -> None:
    """`VersionUnavailable` soon after the log has lost its agent; test_kills.py shows it on one host."""
    for attempt in range(ATTEMPTS_MAX):
        with contextlib.suppress(only_holder.TooLate):
            outcome = await only_holder.run(tmp_path / str(attempt), NBYTES, comes_back=False, hosts=hosts)
            assert outcome.wrong(comes_back=False) is None, outcome
            return
    pytest.fail("no kill met the middle of the transfer")
