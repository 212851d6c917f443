"""Sessions of many clients while what generates below them is killed: no token is lost, told twice or made up.

The engines are fake: a token follows from its request's seed and its place, so each is known.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.kit.chat_models import save_chat_model
from tests.kit.fake_engine import VOCABULARY, token_of
from tests.kit.waiting import until_answer

import tensorhub

pytestmark = pytest.mark.long

HI: Final = {"role": "user", "content": "the thing"}
BUSY: Final = 5
IDS: Final = {"return_token_ids": True}


@asynccontextmanager
async def serving(job: RolloutJob, directory: Path, tokens_max: int) -> AsyncIterator[tuple[Any, Any]]:
    save_chat_model(directory / "model", size=VOCABULARY)
    sampling = tensorhub.Sampling(max_tokens=tokens_max, seed=3)
    rollouts = await job.trainer.rollouts(MODEL, name="agents", staleness=1 << 20, sampling=sampling)
    await job.until_serving(rollouts, 3)
    async with (
        rollouts.gateway(directory / "model", call_s=WAIT_S) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield rollouts, client


async def stream(client: openai.AsyncOpenAI, session: str, messages: list[Any]) -> AsyncIterator[tuple[str, list[int]]]:
    parts = await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, extra_headers={"X-TensorHub-Session": session}, extra_body=IDS
    )
    async for part in parts:
        for choice in part.choices:
            yield choice.delta.content or "", getattr(choice, "token_ids", None) or []


async def reward(client: openai.AsyncOpenAI, session: str, value: float) -> None:
    await client.post(f"/sessions/{session}/reward", cast_to=object, body={"reward": value})


def check(found: tensorhub.Response) -> None:
    """Compare what came of a session with what its engines make."""
    assert found.loss_mask.sum() == sum(len(each.response.token_ids) for each in found.turns)
    for turn in found.turns:
        made = found.token_ids[turn.start : turn.end].tolist()
        assert made == [token_of(turn.response.seed, place) for place in range(len(made))]
        assert (found.versions[turn.start : turn.end] == 1).all()


@pytest.mark.parametrize("killed", [("runner",), ("rollout-0",), ("rollout-0", "runner")], ids="+".join)
async def test_a_stream_goes_on_where_what_is_below_is_killed(tmp_path: Path, killed: tuple[str, ...]) -> None:
    async with rollout_job(tmp_path / "hub") as job, serving(job, tmp_path, 300) as (rollouts, client):
        ids, has_killed = list[int](), False
        async for _, new in stream(client, "a", [HI]):
            ids += new
            if len(ids) > 20 and not has_killed:
                (runner,) = [each.runner for each in (await rollouts.status()).instances if each.executing]
                for each in killed:
                    job.hub.kill(runner if each == "runner" else each)
                has_killed = True
        await reward(client, "a", 1.0)
        (found,) = (await anext(rollouts.batches(wait_s=WAIT_S))).responses
    assert has_killed
    assert found.token_ids.tolist() == ids
    assert (found.runs[-1].attempt == (1, 1)) == ("runner" not in killed)
    check(found)


@pytest.mark.timeout(300)
async def test_sessions_of_200_clients_at_once_while_engines_are_killed(tmp_path: Path) -> None:
    count, calls, kills = 200, 3, 3
    told: dict[str, list[list[int]]] = {}
    chance = random.Random(5)

    async def agent(client: openai.AsyncOpenAI, number: int) -> None:
        session, messages = f"s{number}", [HI]
        told[session] = []
        for turn in range(calls):
            if (number + turn) % 2:
                text, ids = "", list[int]()
                async for part, new in stream(client, session, messages):
                    text, ids = text + part, ids + new
                message: Any = {"role": "assistant", "content": text}
            else:
                answer: Any = await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,  # type: ignore[arg-type]  # They are plain.
                    extra_headers={"X-TensorHub-Session": session},
                    extra_body=IDS,
                )
                message, ids = answer.choices[0].message, answer.choices[0].token_ids
            told[session].append(ids)
            messages = [*messages, message, {"role": "user", "content": f"on {turn}"}]
        await reward(client, session, float(number))

    async def kill(job: RolloutJob, rollouts: tensorhub.AsyncRollouts) -> None:
        """Kill runners that have made tokens of several responses."""
        for _ in range(kills):
            found = await until_answer(
                rollouts.status,
                lambda found: any(each.executing > BUSY for each in found.instances),
                "engines are busy",
            )
            job.hub.kill(chance.choice([each.runner for each in found.instances if each.executing > BUSY]))

    async with rollout_job(tmp_path / "hub", step_s=0.002) as job, serving(job, tmp_path, 60) as (rollouts, client):
        working = asyncio.gather(*(agent(client, number) for number in range(count)), kill(job, rollouts))
        found = list[tensorhub.Response]()
        async for batch in rollouts.batches(20, wait_s=WAIT_S):
            found += batch.responses
            await batch.done()
            if len(found) >= count:
                break
        await working
        status = await rollouts.status()
    assert sorted(each.session or "" for each in found) == sorted(told)
    assert [(each.open, each.ended) for each in status.consumers if each.name == "agents"] == [(0, 0)]
    for each in found:
        assert each.reward == float((each.session or "")[1:])
        assert [turn.forked for turn in each.turns] == [None] * calls
        made = [each.token_ids[turn.start : turn.end].tolist() for turn in each.turns]
        assert made == told[each.session or ""]
        check(each)
    assert any(len({run.attempt for run in turn.response.runs}) > 1 for each in found for turn in each.turns)
