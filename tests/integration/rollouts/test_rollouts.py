"""Rollouts on a hub of real processes, with fake engines: what a trainer submits, gets, and is told when it errs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import SEED, STOP, expected
from tests.kit.fake_engine import VOCABULARY, logprob_of

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub_common.protocol.rollout.payloads import request_seed

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutJob]:
    """One hub with two runners for the module; each test attaches under a name of its own."""
    directory = tmp_path_factory.mktemp("rollouts")
    async with rollout_job(directory, runners=2, managers=1, tokens_max=40, step_s=0.001) as running:
        yield running


def sampling(tokens_max: int = 40) -> Sampling:
    return Sampling(max_tokens=tokens_max, seed=SEED, stop_token_ids=(STOP,))


async def attach(job: RolloutJob, name: str, **more: Any) -> tensorhub.AsyncRollouts:
    given: dict[str, Any] = {"group_size": 3, "sampling": sampling(), **more}
    return await job.trainer.rollouts(MODEL, name=name, **given)


async def all_of(rollouts: tensorhub.AsyncRollouts, **more: Any) -> list[tensorhub.Response]:
    found: list[tensorhub.Response] = []
    async for batch in rollouts.batches(1, wait_s=WAIT_S, **more):
        found += batch.responses
        await batch.done()
    return found


async def test_each_response_has_its_tokens_their_versions_and_what_its_prompt_had(job: RolloutJob) -> None:
    rollouts = await attach(job, "whole")
    groups = await rollouts.submit([Prompt([5, 9], id="a", metadata={"answer": 42}), Prompt(np.array([7], np.int64))])
    responses = await all_of(rollouts)
    assert sorted((each.group, each.index) for each in responses) == sorted((g, i) for g in groups for i in range(3))
    for each in responses:
        count = len(each.token_ids)
        assert each.token_ids.tolist() == expected(each.group, each.index, 40)
        assert each.finish_reason == ("stop" if each.token_ids[-1] == STOP else "length")
        assert [str(of.dtype) for of in (each.token_ids, each.logprobs, each.versions)] == ["int32", "float32", "int64"]
        assert each.versions.tolist() == [1] * count
        assert np.array_equal(each.logprobs, np.array([logprob_of(1, at) for at in range(count)], np.float32))
        # On a busy machine an instance may be silent for so long that its requests go on elsewhere.
        assert [run.start for run in each.runs] == [0, *(run.end for run in each.runs[:-1])]
        assert (each.runs[0].kv, each.runs[-1].end, {run.version for run in each.runs}) == ("fresh", count, {1})
        assert all(run.root for run in each.runs)
        assert (each.seed, each.error, each.age) == (request_seed(SEED, each.group, each.index), None, 0)
    mine = [each for each in responses if each.group == "a"]
    assert [each.prompt_ids.tolist() for each in mine] == [[5, 9]] * 3
    assert [each.metadata for each in mine] == [{"answer": 42}] * 3
    assert {each.metadata for each in responses if each.group != "a"} == {None}
    await rollouts.close()


async def test_a_batch_has_whole_groups_and_as_many_as_asked_and_the_last_one_the_rest(job: RolloutJob) -> None:
    rollouts = await attach(job, "batches")
    await rollouts.submit([Prompt([number], id=str(number)) for number in range(1, 6)])
    sizes = []
    async for batch in rollouts.batches(6, wait_s=WAIT_S):
        by_group: dict[str, int] = {}
        for each in batch.responses:
            by_group[each.group] = by_group.get(each.group, 0) + 1
        assert set(by_group.values()) == {3}
        sizes.append(len(batch.responses))
        await batch.done()
    assert sizes == [6, 6, 3]
    await rollouts.close()


async def test_what_is_not_done_comes_again_to_the_next_trainer_and_what_is_done_does_not(job: RolloutJob) -> None:
    first = await attach(job, "again")
    await first.submit([Prompt([1], id="kept"), Prompt([2], id="done")])
    batches = first.batches(6, wait_s=WAIT_S)
    (batch,) = [each async for each in batches]
    assert len(batch.responses) == 6
    # Its trainer is replaced before it says what it has.
    second = await attach(job, "again")
    with pytest.raises(tensorhub.RolloutUnavailable, match="another trainer has attached"):
        await batch.done()
    found = await all_of(second, groups=["done"])
    assert {each.group for each in found} == {"done"}
    third = await attach(job, "again")
    left = await all_of(third)
    assert {each.group for each in left} == {"kept"}
    assert [each.token_ids.tolist() for each in sorted(left, key=lambda each: each.index)] == [
        expected("kept", index, 40) for index in range(3)
    ]
    # An id that is done stands for its prompt still.
    await third.submit([Prompt([1], id="kept")])
    assert await all_of(third) == []
    with pytest.raises(tensorhub.BadPrompt, match="stands for another prompt"):
        await third.submit([Prompt([3], id="kept")])
    await third.close()


async def test_a_higher_epoch_drops_what_was_open_and_frees_its_ids(job: RolloutJob) -> None:
    old = await attach(job, "epochs", sampling=sampling(1_000_000))
    await old.submit([Prompt([1], id="x")])
    new = await attach(job, "epochs", epoch=1)
    with pytest.raises(tensorhub.RolloutUnavailable, match="another trainer has attached"):
        await old.submit([Prompt([2], id="y")])
    with pytest.raises(tensorhub.RolloutUnavailable, match="is at epoch 1, so epoch 0 is over"):
        await attach(job, "epochs")
    await new.submit([Prompt([9], id="x")])
    assert {each.prompt_ids.tolist()[0] for each in await all_of(new)} == {9}
    await new.close()


async def test_what_is_cancelled_is_delivered_as_cancelled(job: RolloutJob) -> None:
    rollouts = await attach(job, "cancels", sampling=Sampling(max_tokens=1_000_000, seed=SEED))
    groups = await rollouts.submit([Prompt([1], id="long")])
    await rollouts.cancel(groups[0])
    responses = await all_of(rollouts)
    assert [each.finish_reason for each in responses] == ["cancelled"] * 3
    with pytest.raises(tensorhub.BadCommand, match="no group 'other' to cancel"):
        await rollouts.cancel("other")
    await rollouts.close()


async def test_a_prompt_that_no_engine_can_take_fails_with_what_the_engine_says(job: RolloutJob) -> None:
    rollouts = await attach(job, "fails")
    await rollouts.submit([Prompt([VOCABULARY + 7], id="bad"), Prompt([1], id="good")])
    found = {(each.group, each.index): each for each in await all_of(rollouts)}
    assert {each.finish_reason for each in found.values() if each.group == "good"} <= {"stop", "length"}
    for index in range(3):
        failed = found["bad", index]
        assert (failed.finish_reason, len(failed.token_ids)) == ("failed", 0)
        assert f"the token id {VOCABULARY + 7}" in (failed.error or "")
    await rollouts.close()


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (Prompt([]), "is empty: give at least one token id"),
        (Prompt([1, -2]), "has the token id -2"),
        (Prompt([2**31]), "has the token id 2147483648"),
        (Prompt([1.5]), "are of float64: give integers"),  # type: ignore[list-item]
        (Prompt(np.zeros((2, 2), np.int32)), "have 2 dimensions"),
        (Prompt(["a"]), "give integers"),  # type: ignore[list-item]
        (Prompt([1], metadata=object()), "is not what JSON has"),
        (Prompt([1], metadata="x" * 70_000), "take at most 65536"),
        (Prompt([1], id=""), "can't be used: take 1 to 128 printable characters"),
        (Prompt([1], id="x" * 200), "can't be used: take 1 to 128 printable characters"),
        ([1, 2], "is no prompt: give tensorhub.Prompt"),
    ],
    ids=range(11),
)
async def test_a_prompt_that_can_not_be_is_refused_with_the_reason(job: RolloutJob, prompt: Any, why: str) -> None:
    rollouts = await attach(job, "bad-prompts")
    with pytest.raises(tensorhub.BadPrompt, match=re.escape(why)):
        await rollouts.submit([prompt])
    await rollouts.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not possible"),
        ({"temperature": -0.1}, "temperature=-0.1 is not possible"),
        ({"temperature": float("nan")}, "temperature=nan is not possible"),
        ({"top_p": 0}, "top_p=0 is not possible"),
        ({"top_k": -1}, "top_k=-1 is not possible"),
        ({"stop_token_ids": (-1,)}, "a stop token id=-1 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"logprobs": "all"}, "logprobs='all' is not possible"),
    ],
    ids=str,
)
async def test_a_sampling_out_of_range_is_refused(job: RolloutJob, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(tensorhub.BadPrompt, match=re.escape(why)):
        await attach(job, "bad-sampling", sampling=Sampling(**wrong))


async def test_a_gibibyte_of_prompts_is_refused_before_it_travels(job: RolloutJob) -> None:
    rollouts = await attach(job, "too-much")
    row = np.ones(190_000, np.int32)
    with pytest.raises(tensorhub.BadPrompt, match="more than 268435456 bytes: submit them in several calls"):
        await rollouts.submit([Prompt(row) for _ in range(400)])
    await rollouts.close()


async def test_where_no_instance_generates_a_trainer_is_told_so(job: RolloutJob) -> None:
    rollouts = await job.trainer.rollouts("nobody-has-it", name="none")
    await rollouts.submit([Prompt([1])])
    with pytest.raises(tensorhub.NoInstance, match="no instance generates with model 'nobody-has-it'"):
        await anext(rollouts.batches(1, wait_s=0.2))
    await rollouts.close()


async def test_a_version_that_is_gone_fails_what_was_for_it_alone(job: RolloutJob) -> None:
    rollouts = await attach(job, "pinned")
    await rollouts.submit([Prompt([1], id="gone")], version=0)
    await rollouts.submit([Prompt([1], id="there")], version=1)
    found = {each.group: each for each in await all_of(rollouts)}
    assert found["there"].finish_reason in {"stop", "length"}
    assert found["gone"].error == (
        "it was for version 0 alone, which no instance holds: the newest is 1, and the hub does not have it "
        "(`retain` or `pin` keeps a version)"
    )
    await rollouts.close()


@pytest.mark.long
async def test_the_command_shows_consumers_and_instances(job: RolloutJob) -> None:
    rollouts = await attach(job, "looking")
    await job.until_serving(rollouts, 2)
    await rollouts.close()
    _, said, _ = await job.hub.command("rollouts", "--json")
    states = {each["runner"]: each["state"] for each in json.loads(said)["instances"]}
    assert states == {"runner-0": "serving", "runner-1": "serving"}
    _, said, _ = await job.hub.command("rollouts")
    assert "runner-1" in said
    assert "serving" in said
    code, _, error = await job.hub.command("rollouts", "now")
    assert (code, "leave it out, or say watch" in error) == (2, True)


async def test_from_a_program_without_an_event_loop(job: RolloutJob) -> None:
    def train() -> list[int]:
        with tensorhub.connect("default", agent=job.hub.file.agents[0].socket) as hub:
            rollouts = hub.rollouts(MODEL, name="sync", group_size=2, sampling=sampling())
            rollouts.submit([Prompt([4], id="s")])
            sizes = []
            for batch in rollouts.batches(min_responses=2, wait_s=WAIT_S):
                sizes.append(len(batch.responses))
                batch.done()
            rollouts.close()
            return sizes

    assert await asyncio.to_thread(train) == [2]


async def test_prompts_may_come_from_an_iterator(job: RolloutJob) -> None:
    rollouts = await attach(job, "iterator")
    groups = await rollouts.submit(Prompt([number], id=f"i{number}") for number in range(1, 5))
    found = {each.group: each.prompt_ids.tolist() for each in await all_of(rollouts)}
    assert found == {f"i{number}": [number] for number in range(1, 5)}
    assert sorted(found) == groups
    await rollouts.close()


async def test_ids_as_long_as_they_may_be_are_submitted_and_cancelled_in_as_many_entries_as_they_take(
    job: RolloutJob,
) -> None:
    rollouts = await attach(job, "long-ids", group_size=1)
    ids = [f"{number:04}" + "\N{SNOWMAN}" * 124 for number in range(1100)]
    assert await rollouts.submit([Prompt([1], id=each) for each in ids]) == ids
    await rollouts.cancel(ids)
    assert sorted(each.group for each in await all_of(rollouts)) == ids
    await rollouts.close()


async def test_what_is_no_sampling_is_not_taken_for_the_default(job: RolloutJob) -> None:
    rollouts = await attach(job, "no-sampling")
    wrong: Any
    for wrong in ({}, {"max_tokens": 3}, 0):
        with pytest.raises(tensorhub.BadPrompt, match="is no sampling"):
            await rollouts.submit([Prompt([1])], sampling=wrong)
        with pytest.raises(tensorhub.BadPrompt, match="is no sampling"):
            await attach(job, "bad-sampling", sampling=wrong)
    await rollouts.close()


async def test_tasks_that_take_batches_together_get_each_response_once(job: RolloutJob) -> None:
    rollouts = await attach(job, "tasks")
    await rollouts.submit([Prompt([number], id=str(number)) for number in range(1, 17)])
    found = await asyncio.gather(*(all_of(rollouts) for _ in range(3)))
    keys = [(each.group, each.index) for part in found for each in part]
    assert (len(keys), len(set(keys))) == (48, 48)
    await rollouts.close()


async def test_a_batch_that_was_broken_off_while_it_was_read_comes_again(
    job: RolloutJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = await attach(job, "broken-off")
    await rollouts.submit([Prompt([1], id="a")])
    is_read = asyncio.Event()

    async def endless(*_: object) -> bytes:
        is_read.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_common.jetstream.payload_store.PayloadStore.get", endless)
        taking = asyncio.create_task(all_of(rollouts))
        await asyncio.wait_for(is_read.wait(), WAIT_S)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    assert {each.group for each in await all_of(rollouts)} == {"a"}
    await rollouts.close()


async def test_batches_of_some_groups_end_though_others_are_open(job: RolloutJob) -> None:
    rollouts = await attach(job, "some")
    await rollouts.submit([Prompt([1], id="short")])
    await rollouts.submit([Prompt([1], id="later")], version=10_000)
    assert {each.group for each in await all_of(rollouts, groups="short")} == {"short"}
    assert await all_of(rollouts, groups=["short", "none"]) == []
    assert await all_of(rollouts, groups=()) == []
    await rollouts.cancel("later")
    assert {each.finish_reason for each in await all_of(rollouts, groups=["later"])} == {"cancelled"}
    await rollouts.close()


async def test_who_does_not_wait_gets_what_is_ready(job: RolloutJob) -> None:
    rollouts = await attach(job, "poll")
    (endless,) = await rollouts.submit([Prompt([1])], version=10_000)
    with pytest.raises(tensorhub.RolloutUnavailable, match="nothing was ready after 0 s"):
        await anext(rollouts.batches(wait_s=0))
    await rollouts.cancel(endless)
    batch = await anext(rollouts.batches(64, wait_s=0))
    assert {each.finish_reason for each in batch.responses} == {"cancelled"}
    await rollouts.close()


@pytest.mark.parametrize("groups", [5, [5], [None], [["a"]], b"abc", ["\ud800"], ["x" * 200]], ids=range(7))
async def test_what_is_the_id_of_no_group_is_refused(job: RolloutJob, groups: Any) -> None:
    rollouts = await attach(job, "no-ids")
    said = "is not possible: give an id" if groups == 5 else "is the id of no group"
    with pytest.raises(tensorhub.BadCommand, match=said):
        await rollouts.cancel(groups)
    with pytest.raises(tensorhub.BadCommand, match=said):
        await anext(rollouts.batches(groups=groups))
    if groups != 5:
        with pytest.raises(tensorhub.BadCommand, match=said):
            await rollouts.why(next(iter(groups)))
    await rollouts.close()


async def test_closed_rollouts_say_so_and_what_waits_with_them_ends(job: RolloutJob) -> None:
    rollouts = await attach(job, "closed")
    (endless,) = await rollouts.submit([Prompt([1])], version=10_000)
    batches = rollouts.batches(wait_s=WAIT_S)
    waiting = asyncio.create_task(anext(batches))
    await asyncio.sleep(0)
    await rollouts.close()
    await rollouts.close()
    with pytest.raises(tensorhub.AgentUnavailable, match=r"these rollouts are closed: call hub.rollouts\(\) again"):
        await waiting
    with pytest.raises(tensorhub.AgentUnavailable, match="these rollouts are closed"):
        await rollouts.submit([Prompt([1])])
    again = await attach(job, "closed")
    await again.cancel(endless)
    await all_of(again)
    await again.close()


async def test_a_hub_that_is_closed_ends_what_its_rollouts_wait_for(job: RolloutJob) -> None:
    hub = await job.hub.connect(job.name)
    rollouts = await hub.rollouts(MODEL, name="hub-closed")
    (endless,) = await rollouts.submit([Prompt([1])], version=10_000)
    waiting = asyncio.create_task(anext(rollouts.batches(wait_s=10 * WAIT_S)))
    await asyncio.sleep(0)
    await hub.close()
    with pytest.raises(tensorhub.AgentUnavailable, match="this hub is closed"):
        await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(tensorhub.AgentUnavailable, match="this hub is closed"):
        await rollouts.submit([Prompt([1])])
    again = await attach(job, "hub-closed")
    await again.cancel(endless)
    await all_of(again)
    await again.close()
