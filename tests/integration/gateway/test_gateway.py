"""The gateway, called with OpenAI's own client: engines on real processes, and what the trainer gets of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from tests.bounds import WAIT_S
from tests.kit.chat_models import save_chat_model
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import until, until_answer
from transformers import AutoConfig, AutoModelForCausalLM

import tensorhub
from tensorhub.local.hub import LocalRollouts

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

MODEL: Final = "policy"
NEVER: Final = 1 << 20
"""No token of the model: each answer is as long as it may be."""
HI: Final = [{"role": "user", "content": "the thing"}]
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@dataclass
class Trainer:
    hub: RunningHub
    here: tensorhub.AsyncHub
    model: Path
    policy: tensorhub.AsyncShard

    @asynccontextmanager
    async def serving(self, name: str, max_tokens: int = 24, **more: Any) -> AsyncIterator["Serving"]:
        sampling = tensorhub.Sampling(max_tokens=max_tokens, seed=1, stop_token_ids=(NEVER,))
        rollouts = await self.here.rollouts(MODEL, name=name, sampling=sampling)
        async with (
            rollouts.gateway(self.model, **more) as gateway,
            httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
        ):
            yield Serving(rollouts, gateway, http)


@dataclass
class Serving:
    rollouts: tensorhub.AsyncRollouts
    gateway: Any
    http: httpx2.AsyncClient

    @asynccontextmanager
    async def client(self, session: str, **more: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        headers = {"X-TensorHub-Session": session}
        given = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, **more}
        async with openai.AsyncOpenAI(base_url=self.gateway.url, default_headers=headers, **given) as client:
            yield client

    async def reward(self, session: str, reward: float, **more: Any) -> httpx2.Response:
        return await self.http.post(f"sessions/{session}/reward", json={"reward": reward, **more})

    async def take(self, count: int = 1) -> tuple[tensorhub.Response, ...]:
        async for batch in self.rollouts.batches(count, wait_s=WAIT_S):
            await batch.done()
            return batch.responses
        raise AssertionError("nothing came")

    async def asked(self, session: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"sessions/{session}")).json()
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    directory = tmp_path_factory.mktemp("gateway")
    model = directory / "model"
    save_chat_model(model)
    async with (
        running_hub(directory / "hub", 1, rollouts=LocalRollouts(2, model=model)) as hub,
        await hub.connect("default") as here,
    ):
        torch.manual_seed(0)
        policy = await here.register(
            MODEL, AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), replica="trainer"
        )
        await policy.publish()
        yield Trainer(hub, here, model, policy)


async def call(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"return_token_ids": True, **more.pop("extra", {})}, **more
    )


async def streamed(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> tuple[str, list[int], str]:
    """Return text, token ids and why it ended."""
    text, ids, finish = "", list[int](), ""
    async for part in await call(client, messages, stream=True, **more):
        for choice in part.choices:
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
    return text, ids, finish


async def test_a_session_comes_as_one_trajectory_of_the_tokens_that_were_made(trainer: Trainer) -> None:
    async with trainer.serving("whole") as serving:
        async with serving.client("a") as client:
            first = await call(client, HI, logprobs=True)
            messages = [*HI, first.choices[0].message, {"role": "user", "content": "in there"}]
            text, ids, finish = await streamed(client, messages)
            assert [each.id async for each in client.models.list()] == [MODEL]
        assert (await serving.reward("a", 0.5)).json()["reward"] == 0.5
        await serving.reward("a", 0.5)
        (found,) = await serving.take()
        with pytest.raises(tensorhub.RolloutUnavailable, match="0 sessions of the gateway are open"):
            await anext(serving.rollouts.batches(wait_s=0))
    made = first.choices[0].token_ids
    assert (found.session, found.reward, found.session_end, finish) == ("a", 0.5, "reward", "length")
    assert found.prompt_ids.tolist() == first.prompt_token_ids
    assert found.token_ids.tolist()[: len(made)] == made
    assert found.token_ids.tolist()[-len(ids) :] == ids
    assert found.token_ids[found.loss_mask == 1].tolist() == [*made, *ids]
    assert [(each.number, each.forked) for each in found.turns] == [(0, None), (1, None)]
    told = [each.logprob for each in first.choices[0].logprobs.content]
    assert found.logprobs[: len(made)].tolist() == pytest.approx(told)
    assert set(found.versions[found.loss_mask == 1].tolist()) == {1}
    assert set(found.versions[found.loss_mask == 0].tolist()) == {-1}
    assert len(text)


async def test_the_tokens_of_a_trajectory_are_those_that_the_weights_make(trainer: Trainer, tmp_path: Path) -> None:
    """Replay scores each call with the version that made it, and draws each token again."""
    async with trainer.serving("replay") as serving:
        async with serving.client("a") as client:
            messages: list[Any] = list(HI)
            for _ in range(3):
                answer = await call(client, messages, temperature=0.7, seed=5)
                messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
        await serving.reward("a", 1)
        async for batch in serving.rollouts.batches(wait_s=WAIT_S):
            await batch.save(tmp_path / "saved.jsonl")
            await batch.done()
            break
    code, out, err = await trainer.hub.command("replay", tmp_path / "saved.jsonl", "--model", trainer.model)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2] == "3 responses (72 tokens in 3 runs): 3 confirmed"


async def test_calls_at_once_are_branches_and_what_they_share_is_trained_once(trainer: Trainer) -> None:
    async with trainer.serving("branches") as serving:
        async with serving.client("a") as client:
            first = await call(client, HI)
            messages = [*HI, first.choices[0].message, {"role": "user", "content": "on"}]
            both = await asyncio.gather(*(call(client, messages) for _ in range(2)))
        await serving.reward("a", 1)
        found = await serving.take(2)
    assert [each.index for each in found] == [0, 1]
    made = [each.choices[0].token_ids for each in both]
    assert sorted(each.token_ids.tolist()[-len(ids) :] for each, ids in zip(found, made, strict=True)) == sorted(made)
    assert [int(each.loss_mask.sum()) for each in found] == [48, 24]
    assert found[0].token_ids.tolist()[:24] == found[1].token_ids.tolist()[:24] == first.choices[0].token_ids


async def test_other_history_forks_and_other_parameters_are_refused(trainer: Trainer) -> None:
    async with trainer.serving("forks") as serving:
        async with serving.client("a") as client:
            await call(client, HI)
            forked = await call(client, [*HI, {"role": "assistant", "content": "no"}, *HI])
            assert "its messages are not those" in forked.tensorhub["forked"]
            for wrong, param in (
                ({"n": 2}, "n"),
                ({"stop": "x"}, "stop"),
                ({"presence_penalty": 1}, "presence_penalty"),
            ):
                with pytest.raises(openai.BadRequestError) as error:
                    await call(client, HI, **wrong)
                assert error.value.param == param
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=HI)  # type: ignore[arg-type]
        async with serving.client("a b") as client:
            with pytest.raises(openai.BadRequestError, match="session"):
                await call(client, HI)
        await serving.reward("a", 1)
        found = await serving.take(2)
    assert [len(each.turns) for each in found] == [1, 1]
    assert found[1].turns[0].forked is not None
    assert np.concatenate([each.loss_mask for each in found]).sum() == 48


async def test_tools_are_told_to_the_model(trainer: Trainer) -> None:
    """A model that has learnt nothing calls none; what a call looks like is a unit test's."""
    async with trainer.serving("tools") as serving:
        async with serving.client("a") as client:
            answer = await call(client, HI, tools=[TOOL], tool_choice="auto")
            plain = await call(client, HI)
        assert len(answer.prompt_token_ids) > len(plain.prompt_token_ids)
        assert (await serving.asked("a"))["turns"][1]["after"] is None


async def test_completions_go_on_from_ids_and_from_text(trainer: Trainer) -> None:
    async with trainer.serving("completions") as serving:
        base = serving.gateway.url.replace("/v1", "/sessions/a/v1")
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            first = await client.completions.create(
                model=MODEL, prompt=[1, 2, 3], max_tokens=4, extra_body={"return_token_ids": True}, logprobs=1
            )
            ids = first.choices[0].token_ids  # type: ignore[attr-defined]
            assert len(first.choices[0].logprobs.token_logprobs) == 4  # type: ignore[union-attr, arg-type]
            await client.completions.create(model=MODEL, prompt=[1, 2, 3, *ids, 9], max_tokens=4)
            text = await client.completions.create(model=MODEL, prompt="the ", max_tokens=4)
            parts = await client.completions.create(
                model=MODEL, prompt=f"the {text.choices[0].text} it", max_tokens=4, stream=True
            )
            assert "".join([each.choices[0].text async for each in parts])
        await serving.reward("a", 1)
        found = await serving.take(2)
    assert [len(each.turns) for each in found] == [2, 2]
    assert found[0].prompt_ids.tolist() == [1, 2, 3]
    assert found[0].token_ids.tolist()[:5] == [*ids, 9]


async def test_a_client_that_goes_away_frees_its_place(trainer: Trainer) -> None:
    async with trainer.serving("gone", max_tokens=3000) as serving:
        async with serving.client("a") as client:
            stream = await call(client, HI, stream=True)
            await anext(aiter(stream))
            waiting = asyncio.ensure_future(call(client, HI))
            await until_answer(serving.rollouts.status, lambda found: _open(found, "gone") == 2, "both are open")
            await stream.close()
            waiting.cancel()
            await asyncio.wait({waiting})
            await until_answer(serving.rollouts.status, lambda found: _open(found, "gone") == 0, "none is open")
            answer = await call(client, HI, max_tokens=4)
        said = await serving.asked("a")
        assert [each["state"] for each in said["turns"]] == ["void", "void", "made"]
        await serving.reward("a", 1)
        (found,) = await serving.take()
    assert found.token_ids.tolist() == answer.choices[0].token_ids


def _open(status: tensorhub.RolloutStatus, name: str) -> int:
    return next((each.open for each in status.consumers if each.name == name), 0)


async def test_a_key_is_asked_for(trainer: Trainer) -> None:
    async with trainer.serving("key", api_key="secret") as serving:
        assert (await serving.http.get(serving.gateway.url.replace("/v1", "/health"))).json()["status"] == "ok"
        async with serving.client("a", api_key="other") as client:
            with pytest.raises(openai.AuthenticationError):
                await call(client, HI)
        async with serving.client("a", api_key="secret") as client:
            assert (await call(client, HI, max_tokens=1)).usage.completion_tokens == 1


async def test_a_session_without_a_reward_ends_by_itself_and_with_its_gateway(trainer: Trainer) -> None:
    async with trainer.serving("idle", session_idle_s=0.1) as serving:
        async with serving.client("a") as client:
            await call(client, HI, max_tokens=2)
        (found,) = await serving.take()
        assert (found.session, found.reward, found.session_end) == ("a", None, "idle")
        assert (await serving.asked("a"))["state"] == "over"
        assert (await serving.reward("a", 1)).status_code == 409
    async with trainer.serving("closed") as serving:
        await serving.http.post("sessions", json={"id": "b", "metadata": {"task": 7}})
        async with serving.client("b") as client:
            await call(client, HI, max_tokens=2)
        await serving.reward("b", 0.25, final=False)
    found_after = [each async for batch in serving.rollouts.batches(wait_s=WAIT_S) for each in batch.responses]
    assert [(each.reward, each.session_end, each.metadata) for each in found_after] == [(0.25, "closed", {"task": 7})]


async def test_a_session_ends_at_once_while_no_manager_answers_and_what_is_in_no_trajectory_is_done_later(
    trainer: Trainer,
) -> None:
    async with trainer.serving("unled", max_tokens=3000) as serving:
        async with serving.client("void") as client:
            stream = await call(client, HI, stream=True)
            await anext(aiter(stream))
            await stream.close()
            await until_answer(serving.rollouts.status, lambda found: _open(found, "unled") == 0, "none is open")
        async with serving.client("made") as client:
            answer = await call(client, HI, max_tokens=4)
        with trainer.hub.stopped("rollout-0"):
            await serving.reward("void", 0)
            await serving.reward("made", 1)

            async def is_over() -> bool:
                return bool((await serving.asked("made"))["state"] == "over")

            # To wait for the manager takes it a minute.
            await until(is_over, "the session with an answer is over", 30)
        (found,) = await serving.take()
        assert found.token_ids.tolist() == answer.choices[0].token_ids
        await until_answer(serving.rollouts.status, lambda found: _undone(found, "unled") == 0, "all is done")


async def test_a_call_that_is_being_submitted_when_the_gateway_closes_is_cancelled(trainer: Trainer) -> None:
    stack = AsyncExitStack()
    serving = await stack.enter_async_context(trainer.serving("closing", max_tokens=3000))
    async with serving.client("a") as client:
        with trainer.hub.stopped("rollout-0"):
            asking = asyncio.create_task(call(client, HI))

            async def is_begun() -> bool:
                found = await serving.http.get("sessions/a")
                return bool(found.status_code == 200)

            await until(is_begun, "the call is begun")
            closing = asyncio.create_task(stack.aclose())
            with pytest.raises(openai.APIError):
                await asking
            # It does not end before the submission has: what it gave up then would go on.
            await asyncio.wait({closing}, timeout=3)
        await closing
    status = serving.rollouts.status
    await until_answer(status, lambda found: _open(found, "closing") + _undone(found, "closing") == 0, "none is left")


def _undone(status: tensorhub.RolloutStatus, name: str) -> int:
    return next((each.ended for each in status.consumers if each.name == name), 0)


async def test_what_a_killed_trainer_had_comes_to_the_next_one_by_its_calls(trainer: Trainer) -> None:
    async with trainer.serving("again") as serving:
        async with serving.client("a") as client:
            first = await call(client, HI, max_tokens=4)
        again = await trainer.here.rollouts(MODEL, name="again")
        (found,) = [each async for batch in again.batches(wait_s=WAIT_S) for each in batch.responses]
        assert (found.session, found.turn, found.turns) == ("a", 0, ())
        assert found.token_ids.tolist() == first.choices[0].token_ids
        async with serving.client("a") as client:
            with pytest.raises(openai.InternalServerError, match="another trainer has attached"):
                await call(client, HI, max_tokens=4)
