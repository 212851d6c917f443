"""verl's own servers, agent loops and checkpoint manager, with runners that generate: docs/guides/verl.md."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tests.bounds import WAIT_S
from tests.integrations.verl.clusters import group_of, ray_of
from tests.integrations.verl.workers import ModelActor, model_at
from tests.kit.chat_models import save_chat_model
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import until_answer
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

from tensorhub import BadPrompt, NotInThisVersion, Sampling, TensorHubError
from tensorhub.integrations.verl import TensorHubReplica
from tensorhub.integrations.verl.rollout_server import RolloutServer, ServerSettings
from tensorhub.local.hub import LocalRollouts

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
PAGE: Final = (Path(__file__).parents[3] / "docs" / "guides" / "verl.md").read_text()
TOKENS: Final = 96
"""Tokens of a response."""
GAP_MIN: Final = 1e-4
"""Two tokens that are likelier to each other than this may change places where rows are computed together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny chat model's directory."""
    directory = tmp_path_factory.mktemp("models") / "chat"
    save_chat_model(directory, architectures=["LlamaForCausalLM"])
    return str(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    rollouts = LocalRollouts(2, model=Path(model))
    async with running_hub(tmp_path_factory.mktemp("hub"), 1, rollouts=rollouts) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(hub: RunningHub) -> Iterator[None]:
    with ray_of(hub.directory, "default"):
        yield


def config_of(model: str, *more: str) -> Any:
    """Return verl's configuration of a job with the guide's settings."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                "actor_rollout_ref.rollout.prompt_length=64",
                f"actor_rollout_ref.rollout.response_length={TOKENS}",
                "actor_rollout_ref.rollout.agent.num_workers=2",
            ],
        )
    # The page adds what verl's files don't name.
    OmegaConf.set_struct(config, False)  # noqa: FBT003 (it takes no name)
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return OmegaConf.merge(config, yaml.safe_load(settings), OmegaConf.from_dotlist(list(more)))


class Job:
    """An actor, servers and agent loops, as verl's trainers make them."""

    def __init__(self, config: Any, model: str) -> None:
        self.config, self.model = config, model

    async def begin(self) -> None:
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.actors = group_of(1, ModelActor, config=engine, directory=self.model)
        self.servers = await LLMServerManager.create(config=self.config)
        self.replicas = self.servers.get_replicas()
        self.weights = CheckpointEngineManager(engine, self.actors, self.replicas)
        self.loops = await AgentLoopManager.create(config=self.config, llm_client=self.servers.get_client())

    async def generate(self, count: int, *, greedy: bool = True) -> list[dict[str, Any]]:
        """Have an answer to each of some questions, and return them."""
        asked = [[{"role": "user", "content": f"question {number}"}] for number in range(count)]
        batch = DataProto.from_dict(
            non_tensors={
                "raw_prompt": np.array(asked, dtype=object),
                "data_source": np.array(["test"] * count, dtype=object),
                "reward_model": np.array([{"ground_truth": ""}] * count, dtype=object),
            },
            meta_info={"validate": greedy},
        )
        done = await self.loops.generate_sequences(batch)
        found = []
        for row in range(count):
            mask = done.batch["response_mask"][row].bool()
            prompt = done.batch["attention_mask"][row][: done.batch["prompts"].shape[1]].bool()
            given = {name: values[row] for name, values in done.non_tensor_batch.items()}
            given["prompt"] = done.batch["prompts"][row][prompt].tolist()
            given["ids"] = done.batch["responses"][row][mask].tolist()
            given["logprobs"] = done.batch["rollout_log_probs"][row][mask].tolist()
            found.append(given)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(model: str, cluster: None) -> AsyncIterator[Job]:
    made = Job(config_of(model), model)
    await made.begin()
    yield made


def assert_made_by(answers: list[dict[str, Any]], model: str, *, steps: set[int]) -> int:
    """Check each token of greedy answers against the step that it says to be of; return how many were too near."""
    near = 0
    for answer in answers:
        prompt, ids = answer["prompt"], answer["ids"]
        assert 0 < len(ids) == len(answer["token_global_steps"]) == len(answer["logprobs"])
        assert answer["min_global_steps"] == answer["token_global_steps"][0]
        assert answer["max_global_steps"] == answer["token_global_steps"][-1]
        assert {*answer["token_global_steps"]} <= steps
        for step in {*answer["token_global_steps"]}:
            with torch.no_grad():
                logits = model_at(model, step)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            first, second = logits.topk(2).values.T
            for at, of in enumerate(answer["token_global_steps"]):
                if of == step and ids[at] != int(logits[at].argmax()):
                    assert first[at] - second[at] < GAP_MIN, (at, step)
                    near += 1
                if of == step:
                    assert abs(float(logits[at].log_softmax(-1)[ids[at]]) - answer["logprobs"][at]) < 1e-3
    return near


def test_verl_knows_it_by_its_plugins_alone() -> None:
    assert get_rollout_replica_class("tensorhub") is TensorHubReplica


async def test_verls_agent_loops_get_each_update_and_survive_runners(hub: RunningHub, job: Job, model: str) -> None:
    await job.weights.update_weights(global_steps=0)
    assert_made_by(await job.generate(6), model, steps={0})
    for step in (1, 2):
        await job.weights.update_weights(global_steps=step)
        assert_made_by(await job.generate(6), model, steps={step})
    async with hub.connected("default", 1) as (trainer,):
        watching = await trainer.rollouts("policy", name="watching")
        generating = asyncio.create_task(job.generate(24))
        await until_answer(watching.status, lambda said: sum(each.executing for each in said.instances) > 4, "some run")
        killed = hub.kill("runner-0")
        assert_made_by(await asyncio.wait_for(generating, WAIT_S * 3), model, steps={2})
        await hub.until_back("runner-0", killed)


async def test_an_update_takes_what_is_under_way_along(hub: RunningHub, job: Job, model: str) -> None:
    await job.weights.update_weights(global_steps=10)
    async with hub.connected("default", 1) as (trainer,):
        watching = await trainer.rollouts("policy", name="watching")
        generating = asyncio.create_task(job.generate(24))
        await until_answer(watching.status, lambda said: sum(each.executing for each in said.instances) > 4, "some run")
        await job.weights.update_weights(global_steps=11)
        answers = await asyncio.wait_for(generating, WAIT_S * 3)
    assert_made_by(answers, model, steps={10, 11})
    spans = {(answer["min_global_steps"], answer["max_global_steps"]) for answer in answers}
    assert (10, 11) in spans, "what was under way went on, on the new weights"
    assert_made_by(await job.generate(4), model, steps={11})


async def test_sampled_answers_differ_and_have_the_probabilities_of_what_was_drawn(job: Job, model: str) -> None:
    await job.weights.update_weights(global_steps=20)
    answers = await job.generate(4, greedy=False)
    again = await job.generate(4, greedy=False)
    assert all(mine["ids"] != other["ids"] for mine, other in zip(answers, again, strict=True))
    for answer in answers:
        prompt, ids = answer["prompt"], answer["ids"]
        with torch.no_grad():
            logits = model_at(model, 20)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1)[range(len(ids)), ids]
        assert np.abs(found.numpy() - np.array(answer["logprobs"])).max() < 1e-3


# ------------------------------------------------------------------------------------------------- one server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(hub: RunningHub, job: Job) -> AsyncIterator[RolloutServer]:
    """A server in this process. The job's actor has published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORHUB_DIR", str(hub.directory))
        settings = ServerSettings("policy", None, None, "alone", Sampling(max_tokens=40), prompt_tokens=8, update_s=1)
        made = RolloutServer(settings)
        await made.start()
        yield made
        await made.close()


async def generated(server: RolloutServer, ids: list[int], **params: Any) -> Any:
    return await asyncio.wait_for(server.generate(ids, {"temperature": 0, **params}, "r"), WAIT_S)


async def test_lengths_are_read_as_verls_own_servers_read_them(server: RolloutServer, job: Job) -> None:
    await job.weights.update_weights(global_steps=30)
    ids = [1, 2, 3]
    for params, count in (
        ({}, 40),
        ({"max_tokens": 5}, 5),
        ({"max_new_tokens": 6, "logprobs": True, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}, 6),
    ):
        made = await generated(server, ids, **params)
        assert (len(made.token_ids), made.stop_reason) == (count, "completed")
        assert (made.log_probs is None) == (not params.get("logprobs"))
    # A prompt that is longer than its room takes from the response.
    assert len((await generated(server, [1] * 18)).token_ids) == 30
    ended = await generated(server, ids, max_tokens=5)
    assert (await generated(server, ids, stop_token_ids=[ended.token_ids[2]])).token_ids == ended.token_ids[:3]


async def test_many_short_requests_beside_a_long_one_all_come(server: RolloutServer) -> None:
    """A response may be here before its submission has said that it is one of its own."""
    long = asyncio.create_task(generated(server, [9], max_tokens=1500))
    for _ in range(20):
        made = await asyncio.gather(*(generated(server, [1, 2 + each], max_tokens=1) for each in range(24)))
        assert [len(each.token_ids) for each in made] == [1] * 24
    assert len((await long).token_ids) == 1500


async def test_a_prompt_that_cannot_be_fails_alone(server: RolloutServer) -> None:
    asked = [generated(server, ids, max_tokens=1) for ids in ([1], [-5], [2])]
    first, wrong, last = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(wrong, BadPrompt)
    for each in (first, last):
        assert not isinstance(each, BaseException)
        assert len(each.token_ids) == 1


async def test_what_runners_cannot_follow_is_refused_by_its_name(server: RolloutServer) -> None:
    for params, said in (
        ({"min_p": 0.1}, "min_p=0.1 can't be followed"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 can't be followed"),
        ({"guided": "x"}, "guided='x' can't be followed"),
    ):
        with pytest.raises(NotInThisVersion, match=said):
            await generated(server, [1], **params)
    with pytest.raises(NotInThisVersion, match="image_data can't be followed"):
        await server.generate([1], {}, "r", image_data=["image"])
    for ids, params, said in (
        ([], {}, "token"),
        ([1] * 48, {}, "max_tokens"),
        ([1], {"top_p": 2.0}, "top_p"),
    ):
        with pytest.raises(BadPrompt, match=said):
            await generated(server, ids, **params)
    # None of these has stopped the others.
    assert len((await generated(server, [1], max_tokens=2)).token_ids) == 2


async def test_between_abort_and_resume_requests_wait_or_are_told_to_go_elsewhere(server: RolloutServer) -> None:
    await server.abort_all_requests()
    waiting = asyncio.create_task(generated(server, [1], max_tokens=2))
    await asyncio.sleep(0)
    await server.abort_all_requests(reject_request=True)
    told = await asyncio.wait_for(waiting, WAIT_S)
    assert (told.stop_reason, told.token_ids) == ("aborted", [])
    await server.abort_all_requests()
    waiting = asyncio.create_task(generated(server, [1], max_tokens=2))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await server.resume_generation()
    assert len((await waiting).token_ids) == 2


async def test_a_request_does_not_wait_for_ever_for_an_update_that_never_ends(server: RolloutServer) -> None:
    await server.abort_all_requests()
    try:
        with pytest.raises(TensorHubError, match="verl has let no request begin for 1 s"):
            await generated(server, [1], max_tokens=2)
    finally:
        await server.resume_generation()


async def test_an_update_without_a_version_ends_at_its_bound(server: RolloutServer) -> None:
    with pytest.raises(TensorHubError, match="no update was begun"):
        await server.update_weights(global_steps=1)
    assert (await server.execute_checkpoint_engine("prepare")) == {"after": None, "job": "default"}
    await server.execute_checkpoint_engine("init_process_group", after=1_000_000)
    with pytest.raises(TensorHubError, match="no version after 1000000 of policy came within 1 s"):
        await server.update_weights(global_steps=1)


async def test_a_second_server_of_a_name_ends_the_requests_of_the_first(server: RolloutServer, hub: RunningHub) -> None:
    settings = ServerSettings("policy", None, None, "twice", Sampling(max_tokens=3000), prompt_tokens=8)
    first, second = RolloutServer(settings), RolloutServer(settings)
    await first.start()
    try:
        asking = asyncio.create_task(generated(first, [1]))
        async with hub.connected("default", 1) as (trainer,):
            watching = await trainer.rollouts("policy", name="watching")
            await until_answer(watching.status, lambda said: any(each.executing for each in said.instances), "it runs")
        await second.start()
        try:
            with pytest.raises(TensorHubError, match=r"another trainer has attached|was cancelled"):
                await asking
        finally:
            await second.close()
    finally:
        await first.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "without checkpoint_engine.backend=tensorhub"),
        ("actor_rollout_ref.rollout.full_determinism=true", "with full_determinism"),
        ("actor_rollout_ref.rollout.ignore_eos=true", "with ignore_eos"),
        ("actor_rollout_ref.model.lora_rank=8", "with LoRA"),
        ("actor_rollout_ref.rollout.engine_kwargs.tensorhub.stale=1", "has no 'stale': take name, staleness"),
    ],
)
async def test_a_configuration_that_cannot_be_is_refused(model: str, more: str, said: str) -> None:
    config = config_of(model, more)
    replica = TensorHubReplica(0, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, 1)
    with pytest.raises(TensorHubError, match=said):
        await replica.init_standalone()
