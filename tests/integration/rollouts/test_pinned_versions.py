"""Responses for one version alone, on real processes: an instance loads it, keeps it, and goes on when it may.

Trainers publish, overwrite, unpublish and rewind meanwhile, and wait for no response.
"""

from pathlib import Path

import pytest
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import SEED, STOP
from tests.kit.hubs import copies_of
from tests.kit.waiting import until, until_answer

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub_common.protocol.rollout.questions import RolloutStatus

pytestmark = pytest.mark.long

ENDLESS = 1_000_000
SHORT = Sampling(max_tokens=30, seed=SEED, stop_token_ids=(STOP,))


def versions_of(status: RolloutStatus) -> list[int]:
    """Return what the instances that serve have."""
    return sorted(each.version for each in status.instances if each.version is not None)


async def until_versions(rollouts: tensorhub.AsyncRollouts, *versions: int) -> None:
    await until_answer(
        rollouts.status, lambda found: versions_of(found) == sorted(versions), f"the instances have {versions}"
    )


async def pin(job: RolloutJob, version: int) -> None:
    """Have the hub keep a version, and wait until it has a copy of it."""
    await job.trainer.pin(MODEL, version)

    async def has_copy() -> bool:
        return bool(await copies_of(job.trainer, MODEL, version))

    await until(has_copy, f"version {version} has a copy")


async def taken(rollouts: tensorhub.AsyncRollouts, count: int) -> dict[str, list[tensorhub.Response]]:
    """Return as many responses, by group."""
    found: dict[str, list[tensorhub.Response]] = {}
    async for batch in rollouts.batches(1, wait_s=WAIT_S):
        for each in batch.responses:
            found.setdefault(each.group, []).append(each)
        await batch.done()
        if sum(len(each) for each in found.values()) == count:
            break
    return found


@pytest.mark.parametrize("struck", [(), ("rollout-0",), ("runner-0",)], ids=["", "leader-killed", "runner-killed"])
async def test_the_one_instance_loads_an_older_version_for_what_is_for_that_alone_and_comes_back(
    tmp_path: Path, struck: tuple[str, ...]
) -> None:
    async with rollout_job(tmp_path, runners=1, managers=1, tokens_max=30) as job:
        await pin(job, 1)
        await job.publish()
        rollouts = await job.attach(staleness=0)
        await until_versions(rollouts, 2)
        await rollouts.submit([Prompt([1, 5], id="old"), Prompt([1, 6], id="older")], version=1)
        await rollouts.submit([Prompt([1, 7], id="new")])
        for name in struck:
            job.hub.kill(name)
        found = await taken(rollouts, 3 * job.group_size)
        made_by = {group: {v for each in responses for v in each.versions} for group, responses in found.items()}
        assert made_by == {"old": {1}, "older": {1}, "new": {2}}
        assert {each.finish_reason for group in found.values() for each in group} <= {"stop", "length"}
        await until_versions(rollouts, 2)


async def test_an_instance_keeps_a_version_that_its_trainer_has_overwritten_until_what_is_for_it_has_ended(
    tmp_path: Path,
) -> None:
    """Its `unpublish` waits for no response, and the other instance goes on to each newer version."""
    # Else the other instance would stay as well, for its cache.
    async with rollout_job(
        tmp_path, runners=2, managers=1, step_s=0.01, TENSORHUB_ROLLOUT_TERMS_OFF="activation"
    ) as job:
        rollouts = await job.attach(sampling=Sampling(max_tokens=ENDLESS, seed=SEED))
        await job.until_serving(rollouts, 2)
        (endless,) = await rollouts.submit([Prompt([1, 5], id="endless")], version=1, group_size=1)
        (later,) = await rollouts.submit([Prompt([1, 6], id="any")], group_size=1)
        await until_answer(
            rollouts.status, lambda found: sum(each.executing for each in found.instances) == 2, "both are generated"
        )
        for _ in range(3):
            # It raises `DrainTimeout` where it would have to wait.
            newest = await job.publish()
        await until_versions(rollouts, 1, newest)
        await rollouts.submit([Prompt([1, 8], id="short")], version=1, group_size=3, sampling=SHORT)
        short = (await taken(rollouts, 3))["short"]
        assert {version for each in short for version in each.versions} == {1}, (
            "no other replica has version 1 any more"
        )
        await rollouts.cancel([endless, later])
        await until_versions(rollouts, newest, newest)
        await taken(rollouts, 2)

        async def is_let_go() -> bool:
            return not await copies_of(job.trainer, MODEL, 1)

        await until(is_let_go, "nothing holds version 1 any more")
        await rollouts.submit([Prompt([1, 9], id="late")], version=1, group_size=1)
        (late,) = (await taken(rollouts, 1))["late"]
        assert late.finish_reason == "failed"
        gone = "it was for version 1 alone, which no instance holds: the newest is {}, and the hub does not have it"
        assert str(late.error).startswith(gone.format(newest))


@pytest.mark.parametrize("struck", [(), ("rollout-0",)], ids=["", "leader-killed"])
async def test_a_rewind_waits_for_no_instance_that_keeps_a_version_and_ends_what_was_for_it(
    tmp_path: Path, struck: tuple[str, ...]
) -> None:
    async with rollout_job(tmp_path, runners=2, managers=1, step_s=0.01) as job:
        await pin(job, 1)
        await job.publish()
        rollouts = await job.attach(sampling=Sampling(max_tokens=ENDLESS, seed=SEED))
        await until_versions(rollouts, 2, 2)
        await rollouts.submit([Prompt([1, 5], id="retired")], version=2, group_size=2)
        (kept,) = await rollouts.submit([Prompt([1, 6], id="kept")], version=1, group_size=1)
        await until_versions(rollouts, 1, 2)
        await until_answer(
            rollouts.status, lambda found: sum(each.executing for each in found.instances) == 3, "all are generated"
        )
        for name in struck:
            job.hub.kill(name)
        assert await job.trainer.rewind(MODEL, to=1) == [2]
        retired = (await taken(rollouts, 2))["retired"]
        assert [each.error for each in retired] == [
            "it was for version 2 alone, which the trainer has gone back behind"
        ] * 2
        assert await job.publish() == 3
        await until_versions(rollouts, 1, 3)
        await rollouts.cancel([kept])
        await until_versions(rollouts, 3, 3)


@pytest.mark.parametrize(
    ("terms_off", "struck"),
    [("", ()), ("", ("rollout-0",)), ("retention", ())],
    ids=["", "leader-killed", "without-holds"],
)
async def test_what_is_for_a_version_goes_on_from_the_hubs_copy_once_its_trainer_and_all_instances_have_left_it(
    tmp_path: Path, terms_off: str, struck: tuple[str, ...]
) -> None:
    """Its trainer waits for nothing, and the copy goes with the last response. Without a hold they fail."""
    async with rollout_job(tmp_path, runners=1, managers=1, step_s=0.01, TENSORHUB_ROLLOUT_TERMS_OFF=terms_off) as job:
        rollouts = await job.attach(sampling=Sampling(max_tokens=100, seed=SEED, logprobs="processed"))
        await job.until_serving(rollouts, 1)
        await rollouts.submit([Prompt([1, 5], id="old")], version=1, group_size=3)
        await job.until_tokens(rollouts)

        async def has_copy() -> bool:
            return bool(await copies_of(job.trainer, MODEL, 1))

        if not terms_off:
            await until(has_copy, "version 1 has a copy")
        await job.hub.up.end_runner("runner-0")
        for name in struck:
            job.hub.kill(name)
        newest = await job.publish()
        await job.hub.up.start_runner("runner-0")
        found = (await taken(rollouts, 3))["old"]
        if terms_off:
            assert {each.finish_reason for each in found} == {"failed"}
            assert all("the hub does not have it" in str(each.error) for each in found)
            return
        assert {each.finish_reason for each in found} <= {"stop", "length"}, [each.error for each in found]
        assert {version for each in found for version in each.versions} == {1}
        await until_versions(rollouts, newest)

        async def has_none() -> bool:
            return not await has_copy()

        await until(has_none, "the copy of version 1 is gone")
