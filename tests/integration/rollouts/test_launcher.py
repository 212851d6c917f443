"""Runners that come and go with the work, as real processes: no response is lost or made twice for it."""

from pathlib import Path

import pytest
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import delivered_of
from tests.kit.waiting import until, until_answer

from tensorhub_common.protocol.rollout.questions import RolloutStatus

pytestmark = pytest.mark.long
SLOTS = 8
WINDOW_S = 2
LONG, STEP_S = 2000, 0.005
"""Tokens of a response that is still generated after the window."""


def serving(found: RolloutStatus) -> set[str]:
    return {each.runner for each in found.instances if each.state == "serving"}


async def test_runners_come_with_work_and_go_when_others_can_do_it(tmp_path: Path) -> None:
    """Three are started for three times what one has room for; what is left then moves to the one that stays."""
    async with rollout_job(
        tmp_path,
        runners=1,
        runners_max=3,
        managers=1,
        tokens_max=LONG,
        step_s=STEP_S,
        TENSORHUB_RUNNER_SLOTS=str(SLOTS),
        TENSORHUB_ROLLOUT_SCALE_WINDOW_S=str(WINDOW_S),
    ) as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 1)
        groups = await job.submit(rollouts, 12)
        await until_answer(rollouts.status, lambda found: len(serving(found)) == 3, "three serve")
        assert set(job.hub.file.pids) >= {"runner-0", "runner-1", "runner-2"}
        await until_answer(
            rollouts.status, lambda found: all(each.executing for each in found.instances), "each makes tokens"
        )
        await rollouts.cancel(groups[1:])
        await until_answer(rollouts.status, lambda found: len(found.instances) == 1, "one is left")
        await until(lambda: len([name for name in job.hub.file.pids if name.startswith("runner-")]) == 1)
        # Those that go give back what their agents held for them: after they are off the hub's file.
        (stays,) = [name for name in job.hub.file.pids if name.startswith("runner-")]
        await until_answer(
            lambda: job.trainer.replicas(MODEL),
            lambda found: {each.replica for each in found} == {"trainer", stays},
            "those that went have given back their weights",
        )
        async for batch in rollouts.batches(1, wait_s=WAIT_S):
            job.verdict.take(delivered_of(each) for each in batch.responses if each.finish_reason != "cancelled")
            await batch.done()
        job.check(is_all=False)
        assert {(groups[0], index) for index in range(job.group_size)} <= job.received.keys()
        await until_answer(rollouts.status, lambda found: found.wished == 0, "none is needed")
        assert len((await rollouts.status()).instances) == 1, "one stays, as was asked for"
