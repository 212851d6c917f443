"""The trainer's own engine as an instance: real manager and runners, with fake engines, one of them in this process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import SEED, STOP, expected
from tests.kit.fake_engine import WEIGHT, FakeEngine
from tests.kit.waiting import until, until_answer

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub.aio.seeding import Seeding
from tensorhub_common.protocol.rollout.entries import PolicyName

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]
TOKENS = 200
TRAIN_S = 5.0
SAMPLING = Sampling(max_tokens=TOKENS, seed=SEED, stop_token_ids=(STOP,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutJob]:
    directory = tmp_path_factory.mktemp("seeding")
    async with rollout_job(directory, runners=1, managers=1, tokens_max=TOKENS, step_s=0.005) as running:
        yield running


@pytest.fixture
def engine(job: RolloutJob, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine over the trainer's own weights."""
    monkeypatch.setenv("FAKE_STEP_S", "0.005")
    return over_weights(job)


def over_weights(job: RolloutJob) -> FakeEngine:
    module = torch.nn.Module()
    module.register_parameter(WEIGHT, torch.nn.Parameter(job.weights.tensors[WEIGHT], requires_grad=False))
    return FakeEngine(8, module, "trainer")


async def attach(
    job: RolloutJob, name: str, trainer: tensorhub.AsyncHub | None = None, policy: PolicyName = "arrival"
) -> tensorhub.AsyncRollouts:
    hub = trainer or job.trainer
    return await hub.rollouts(MODEL, name=name, sampling=SAMPLING, group_size=2, policy=policy)


async def taken(rollouts: tensorhub.AsyncRollouts) -> list[tensorhub.Response]:
    found: list[tensorhub.Response] = []
    async for batch in rollouts.batches(1, wait_s=WAIT_S):
        found += batch.responses
        await batch.done()
    return found


def check(responses: list[tensorhub.Response], groups: list[str]) -> set[str]:
    """Compare each response token for token, and return which instances made them."""
    assert sorted((each.group, each.index) for each in responses) == sorted((g, i) for g in groups for i in range(2))
    for each in responses:
        assert each.token_ids.tolist() == expected(each.group, each.index, TOKENS)
        assert all(run.root for run in each.runs)
    return {run.instance for each in responses for run in each.runs}


async def submit_once_known(rollouts: tensorhub.AsyncRollouts, letter: str) -> list[str]:
    await until_answer(
        rollouts.status,
        lambda found: any(each.runner == "trainer" and each.state == "serving" for each in found.instances),
        "the trainer's engine is known",
    )
    return await rollouts.submit([Prompt([number + 1], id=f"{letter}{number}") for number in range(16)])


async def submit_to_both(rollouts: tensorhub.AsyncRollouts, seeding: Seeding, letter: str) -> list[str]:
    """Submit more than the other instance has room for, and return once the trainer's engine has made a token of it.

    Submitted earlier, all could be done elsewhere before the engine is known.
    """
    groups = await submit_once_known(rollouts, letter)
    await until(lambda: seeding.tokens > 0, "the trainer's engine makes tokens")
    return groups


async def test_what_the_trainers_engine_has_begun_goes_on_elsewhere(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "moves")
    await job.until_serving(rollouts, 1)
    async with rollouts.seeding(engine, seconds=0.0) as seeding:
        groups = await submit_to_both(rollouts, seeding, "m")
    assert not engine.has_work
    assert seeding.tokens
    responses = await taken(rollouts)
    assert check(responses, groups) == {"trainer", "runner-0"}
    assert any(len({run.instance for run in each.runs}) == 2 for each in responses), "one was moved in the middle"
    await rollouts.close()


async def test_it_ends_once_there_is_nothing_to_do(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "idle")
    groups = await rollouts.submit([Prompt([number + 1], id=f"i{number}") for number in range(4)])
    async with asyncio.timeout(WAIT_S), rollouts.seeding(engine, initial_s=10 * WAIT_S) as seeding:
        pass
    assert seeding.seconds == 10 * WAIT_S
    check(await taken(rollouts), groups)
    await rollouts.close()


async def test_without_another_instance_the_trainers_engine_makes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short it was to seed: nothing else would go on, and the trainer would wait for ever."""
    async with rollout_job(tmp_path, runners=0, managers=1, tokens_max=TOKENS, step_s=0.005) as alone:
        rollouts = await attach(alone, "alone")
        groups = await rollouts.submit([Prompt([number + 1], id=f"a{number}") for number in range(4)])
        monkeypatch.setenv("FAKE_STEP_S", "0.005")
        module = torch.nn.Module()
        module.register_parameter(WEIGHT, torch.nn.Parameter(alone.weights.tensors[WEIGHT], requires_grad=False))
        own = FakeEngine(8, module, "trainer")
        async with asyncio.timeout(WAIT_S), rollouts.seeding(own, initial_s=0.0) as seeding:
            assert seeding.seconds is None, "it has no time, whatever is learnt"
        assert check(await taken(rollouts), groups) == {"trainer"}
        await rollouts.close()


async def test_after_an_error_in_the_block_all_is_given_back_at_once(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "error")
    groups = list[str]()

    async def fails() -> None:
        async with rollouts.seeding(engine, seconds=10 * WAIT_S) as seeding:
            groups.extend(await submit_to_both(rollouts, seeding, "e"))
            raise ZeroDivisionError

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ZeroDivisionError):
            await fails()
    assert not engine.has_work
    check(await taken(rollouts), groups)
    await rollouts.close()


async def test_an_error_of_the_engine_reaches_the_trainer_and_others_go_on(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "broken")
    groups, step = list[str](), engine.step

    def breaks() -> Any:
        if step():
            raise ZeroDivisionError("of the engine")
        return ()

    engine.step = breaks  # type: ignore[method-assign]

    async def fails() -> None:
        async with rollouts.seeding(engine, seconds=10 * WAIT_S):
            groups.extend(await submit_once_known(rollouts, "b"))

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ZeroDivisionError, match="of the engine"):
            await fails()
    check(await taken(rollouts), groups)
    await rollouts.close()


async def test_each_publication_is_learnt_from_once(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "learns", policy="rlboost")
    for step in range(3):
        groups = await rollouts.submit([Prompt([number + 1], id=f"l{step}.{number}") for number in range(2)])
        async with rollouts.seeding(engine, initial_s=0.2, gain=1000.0) as seeding:
            pass
        check(await taken(rollouts), groups)
        assert seeding.seconds is not None
        # Steps are shorter than a minute, so that a thousandth of the difference moves it by less than this.
        assert abs(seeding.seconds - 0.2) < 0.1
        assert seeding.remote_max is not None
        assert seeding.remote_max >= 1
        if step:
            wanted = seeding.remote_max
            await until_answer(
                rollouts.status,
                lambda found: found.wished is not None and 1 <= found.wished <= wanted,  # noqa: B023
                "as many are wished for as have work, and no more than the trainer keeps up with",
            )
        await job.publish()
    await rollouts.close()


async def test_the_manager_ends_a_seeding_once_the_others_are_in_time(
    job: RolloutJob, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = await attach(job, "watched")
    for step in range(2):
        groups = await rollouts.submit([Prompt([number + 1], id=f"w{step}.{number}") for number in range(16)])
        async with rollouts.seeding(engine, seconds=0.0):
            pass
        check(await taken(rollouts), groups)
        # So long the trainer trains: it is not waited for anything.
        await asyncio.sleep(TRAIN_S)
        await job.publish()
    monkeypatch.setenv("FAKE_STEP_S", "1.0")
    slow = over_weights(job)
    async with asyncio.timeout(WAIT_S), rollouts.seeding(slow) as seeding:
        groups = await submit_to_both(rollouts, seeding, "w2.")
    # To the end of its responses it would have taken minutes.
    assert not slow.has_work
    assert seeding.seconds is None, "the manager has said when it was enough"
    instances = check(await taken(rollouts), groups)
    assert len(instances) == 2
    await rollouts.close()


async def test_a_manager_that_is_killed_meanwhile_costs_nothing(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "killed")
    async with rollouts.seeding(engine, seconds=1.0) as seeding:
        groups = await submit_to_both(rollouts, seeding, "k")
        pid = job.hub.pid("rollout-0")
        job.hub.kill("rollout-0")
        await job.hub.until_back("rollout-0", pid)
    check(await taken(rollouts), groups)
    await rollouts.close()


async def test_what_can_not_seed_is_told_so(job: RolloutJob, engine: FakeEngine) -> None:
    rollouts = await attach(job, "wrong")
    with pytest.raises(tensorhub.BadCommand, match=r"seeding needs an engine, .* and object has no 'begin', 'stop'"):
        rollouts.seeding(object())
    with pytest.raises(tensorhub.BadCommand, match="gain=0 is not possible: take a positive number"):
        rollouts.seeding(engine, gain=0)
    with pytest.raises(ValueError, match="seconds is -1; give a number of seconds from 0"):
        rollouts.seeding(engine, seconds=-1)
    async with rollouts.seeding(engine, seconds=0):
        with pytest.raises(tensorhub.BadCommand, match="these rollouts seed already"):
            await rollouts.seeding(engine).__aenter__()
    async with await job.hub.connect("default") as other:
        with pytest.raises(
            tensorhub.NotPublished, match=f"a shard of model '{MODEL}' that this process has registered"
        ):
            await (await attach(job, "elsewhere", other)).seeding(engine).__aenter__()
    again = await attach(job, "wrong")
    with pytest.raises(tensorhub.RolloutUnavailable, match="another trainer has attached"):
        await rollouts.seeding(engine).__aenter__()
    await again.close()


async def test_from_a_program_without_an_event_loop(job: RolloutJob) -> None:
    def train() -> list[tensorhub.Response]:
        with tensorhub.connect("default", agent=job.hub.file.agents[0].socket) as hub:
            weights = hub.register(MODEL, {WEIGHT: torch.full((16,), float(job.version))}, replica="sync")
            weights.replicate(job.version)
            module = torch.nn.Module()
            module.register_parameter(WEIGHT, torch.nn.Parameter(weights.tensors[WEIGHT], requires_grad=False))
            rollouts = hub.rollouts(MODEL, name="sync", group_size=2, sampling=SAMPLING)
            rollouts.submit([Prompt([4], id="s")])
            with rollouts.seeding(FakeEngine(8, module, "trainer"), seconds=0.5) as seeding:
                pass
            assert seeding.seconds == 0.5
            found = list[tensorhub.Response]()
            for batch in rollouts.batches(wait_s=WAIT_S):
                found += batch.responses
                batch.done()
            rollouts.close()
            weights.release()
            return found

    check(await asyncio.to_thread(train), ["s"])
