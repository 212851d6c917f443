"""Real processes are killed under a running job; `make chaos` does the same two hundred times."""

import contextlib
from pathlib import Path

import pytest
from tests.chaos import only_holder
from tests.chaos.content import MIB
from tests.chaos.kills import Run

SECONDS_MAX = 100.0
NBYTES = 512 * MIB
ATTEMPTS_MAX = 5
"""On a busy machine a transfer may be over before the test is given the processor."""


@pytest.mark.long
@pytest.mark.timeout(150)
async def test_three_kills(tmp_path: Path) -> None:
    """Each command has one outcome, every commit equal bytes, every caller an answer; and the work goes on."""
    run = Run(kills=3, seed=1, nbytes=8 * MIB, directory=tmp_path, seconds_max=SECONDS_MAX)
    await run.go()
    assert not run.findings.wrongs, "\n".join([run.table(), *run.findings.wrongs])
    assert len(run.done) == run.kills
    assert run.findings.compared["commit"] > run.kills
    assert run.log.roots


# The default suite has one that stays away over ucxx (test_source_killed.py).
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("comes_back", [pytest.param(False, id="stays-away"), pytest.param(True, id="comes-back")])
async def test_the_only_holder_is_killed_in_mid_transfer(tmp_path: Path, comes_back: bool) -> None:  # noqa: FBT001
    for attempt in range(ATTEMPTS_MAX):
        with contextlib.suppress(only_holder.TooLate):
            outcome = await only_holder.run(tmp_path / str(attempt), NBYTES, comes_back=comes_back)
            assert outcome.wrong(comes_back=comes_back) is None, outcome
            return
    pytest.fail("no kill met the middle of the transfer")
