"""Responses of a job come from vLLM servers that are killed, started again and updated: each once, of one version."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import aiohttp
import numpy as np
import pytest
import torch
from tests.integrations.servers import runner_beside
from tests.integrations.trainers import Trainer
from tests.integrations.vllm.processes import START_S, VllmProcess
from tests.kit.hubs import RunningHub, new_job
from tests.kit.waiting import until

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub_common.protocol.rollout.messages import OnUpdate

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(6 * START_S)]

RESPONSES = 100
TOKENS = 200
KILLS = 5
INTERRUPTED = 24
"""Responses that run when a version comes: all at once, in the slots of two runners."""
VERSIONS = 4
EPSILON = 1e-3
"""Greedy tokens may differ where the two likeliest are closer than this, in logits."""
LOGPROB_ERROR_MAX = 1e-3


def prompts(count: int, first: int = 0) -> list[Prompt]:
    drawn = random.Random(5)
    return [
        Prompt([drawn.randrange(512) for _ in range(drawn.randrange(3, 40))], id=f"p{first + each}")
        for each in range(count)
    ]


@asynccontextmanager
async def two_instances(
    servers: Sequence[VllmProcess], hub: RunningHub, job: str, folder: Path
) -> AsyncIterator[Trainer]:
    async with (
        await hub.connect(job) as here,
        runner_beside(servers[0], hub, job, "one", 0),
        runner_beside(servers[1], hub, job, "other", 1),
    ):
        yield await Trainer.at(here, folder)


def check(trainer: Trainer, response: tensorhub.Response) -> str:
    """Return whether greedy tokens are what the model says: "equal", or "tie" where two were as likely at a place."""
    ids, tokens = response.prompt_ids.tolist(), response.token_ids.tolist()
    logits = trainer.logits([*ids, *tokens])[len(ids) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
    assert np.abs(logprobs - response.logprobs).max() < LOGPROB_ERROR_MAX
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    places = [place for place, token in enumerate(tokens) if token != int(logits[place].argmax())]
    assert all(gaps[place] < EPSILON for place in places)
    return "tie" if places else "equal"


async def test_a_hundred_responses_come_once_while_a_server_is_killed_five_times(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path
) -> None:
    job, victim = new_job(), servers[0]
    async with two_instances(servers, hub, job, model_folder) as trainer:
        version = await trainer.publish(1)
        for server in servers:
            await server.holds(version)
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
        rollouts = await trainer.hub.rollouts("policy", sampling=sampling)
        came: dict[str, tensorhub.Response] = {}

        async def consume() -> None:
            async for batch in rollouts.batches(min_responses=1, wait_s=START_S):
                for each in batch.responses:
                    assert each.group not in came
                    came[each.group] = each
                await batch.done()

        for kill in range(KILLS):
            share = prompts(RESPONSES)[kill * RESPONSES // KILLS : (kill + 1) * RESPONSES // KILLS]
            await rollouts.submit(share)
            consumer = asyncio.ensure_future(consume())
            # It is killed while it generates.
            await until(lambda: running(victim), "the server has requests", START_S)
            victim.kill()
            await consumer
            victim.start()
            await victim.ready()
            await victim.holds(version)
        await rollouts.close()
        assert len(came) == RESPONSES
        assert all(each.finish_reason == "length" and len(each.token_ids) == TOKENS for each in came.values())
        assert {int(each) for one in came.values() for each in one.versions} == {version}
        kinds = [check(trainer, each) for each in came.values()]
        moved = sum(len({run.instance for run in each.runs}) > 1 for each in came.values())
        print(f"{kinds.count('equal')} equal, {kinds.count('tie')} differ behind a tie, {moved} moved")
        assert moved


async def running(server: VllmProcess) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(each.split()[-1]) for each in lines if each.startswith("vllm:num_requests_running")))


@pytest.mark.parametrize("on_update", get_args(OnUpdate))
async def test_what_runs_during_an_update_ends_or_goes_on_as_it_is_said(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path, on_update: OnUpdate
) -> None:
    job = new_job()
    async with two_instances(servers, hub, job, model_folder) as trainer:
        first = await trainer.publish(1)
        for server in servers:
            await server.holds(first)
        sampling = Sampling(max_tokens=400, temperature=1.0, seed=3)
        rollouts = await trainer.hub.rollouts("policy", sampling=sampling, staleness=1, on_update=on_update)
        await rollouts.submit(prompts(INTERRUPTED))

        async def are_running() -> bool:
            return sum([await running(each) for each in servers]) >= INTERRUPTED // 3

        await until(are_running, "the servers have requests", START_S)
        second, submitted = await trainer.publish(2), INTERRUPTED
        if on_update in ("continue", "keep"):
            # However long it takes until the version is there, something runs then.
            coming = asyncio.gather(*(server.holds(second) for server in servers))
            while not coming.done():
                if not await are_running():
                    await rollouts.submit(prompts(INTERRUPTED, submitted))
                    submitted += INTERRUPTED
                await asyncio.wait({coming}, timeout=0.1)
            await coming
        came = [
            each
            async for batch in rollouts.batches(min_responses=submitted, wait_s=START_S)
            for each in batch.responses
        ]
        await rollouts.close()
    assert len(came) == submitted
    for each in came:
        assert (each.finish_reason, len(each.token_ids)) == ("length", 400)
        assert set(each.versions.tolist()) <= {first, second}
        assert list(each.versions) == sorted(each.versions)
    through = [each for each in came if len(set(each.versions.tolist())) > 1]
    match on_update:
        case "finish" | "restart":
            assert not through
        case _:
            assert through
            assert {each.runs[-1].kv for each in through} == {"recomputed"}


async def test_a_hundred_sampled_responses_are_what_their_versions_make(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path, tmp_path: Path
) -> None:
    """Versions come meanwhile; then each token is scored again with the weights that its run names."""
    job, saved = new_job(), tmp_path / "responses.jsonl"
    async with two_instances(servers, hub, job, model_folder) as trainer:
        await trainer.hub.retain("policy", last=VERSIONS)
        first = await trainer.publish(1)
        for server in servers:
            await server.holds(first)
        sampling = Sampling(max_tokens=TOKENS, temperature=0.8, top_p=0.9, seed=11)
        rollouts = await trainer.hub.rollouts("policy", sampling=sampling, staleness=VERSIONS, on_update="continue")
        await rollouts.submit(prompts(RESPONSES))
        done = 0
        async for batch in rollouts.batches(min_responses=RESPONSES // VERSIONS, wait_s=START_S):
            await batch.save(saved)
            await batch.done()
            done += len(batch.responses)
            if done < RESPONSES:
                await trainer.publish(1 + done)
        await rollouts.close()
        code, out, err = await hub.command("replay", saved, "--model", model_folder, "--job", job, "--json")
    verdicts = [json.loads(line) for line in out.splitlines()]
    wrong = [each for each in verdicts if each["verdict"] != "confirmed"]
    assert not wrong, json.dumps(wrong[:2])
    assert code == 0, err
    runs = [run for verdict in verdicts for run in verdict["runs"]]
    assert len(verdicts) == RESPONSES
    assert {run["verdict"] for run in runs} == {"confirmed"}
    assert len({run["version"] for run in runs}) > 1
    worst = np.array([run["logprob_diff_max"] for run in runs])
    told = ", ".join(f"p{share} {np.percentile(worst, share):.1e}" for share in (50, 90, 99, 100))
    print(f"{len(runs)} runs of {RESPONSES} responses; the largest difference of each, in nats: {told}")
