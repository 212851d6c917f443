"""TRL's own `GRPOTrainer` through hub, manager and torch engines: docs/guides/trl.md and its two examples."""

import asyncio
import difflib
import json
import re
import runpy
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch
from datasets import Dataset
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import until
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import tensorhub
from tensorhub.integrations.trl import HubRollouts
from tensorhub.local.hub import LocalRollouts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
ROOT: Final = Path(__file__).parents[3]
EXAMPLES: Final = ROOT / "examples"
PAGE: Final = (ROOT / "docs" / "guides" / "trl.md").read_text()
(CONFIG,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
REWARD: Final = re.compile(r"step (\d+): reward ([\d.]+)")
SIZE: Final = 4
EXAMPLE_S: Final = 270.0
"""Each of the two examples may take so long on a busy machine."""
LOGPROB_DIFFERENCE_MAX: Final = 1e-4
"""Between an engine's log-probabilities, of float64, and the trainer's own of the same weights in float32."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the guide's model."""
    found = tmp_path_factory.mktemp("my-model")
    (found / "config.json").write_text(CONFIG)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    """A hub with two runners of that model; a test attaches with a name of its own."""
    async with running_hub(tmp_path_factory.mktemp("hub"), 1, rollouts=LocalRollouts(2, model=model)) as running:
        yield running


@pytest.fixture
def here(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> RunningHub:
    """Programs of this process find the hub, too."""
    monkeypatch.setenv("TENSORHUB_DIR", str(hub.directory))
    return hub


ALONE: Final[Any] = runpy.run_path(str(EXAMPLES / "trl_grpo_alone.py"))
"""Its tokenizer and its reward."""


class Seen:
    """What came of each generation, as TRL got it, and as the SDK delivered it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.returned: list[dict[str, list[Any]]] = []
        self.prompts: list[list[Any]] = []
        self.delivered: dict[tuple[str, int], tensorhub.Response] = {}
        self.versions: list[int] = []
        batches = tensorhub.Rollouts.batches

        def kept(rollouts: tensorhub.Rollouts, *arguments: Any, **more: Any) -> Iterator[tensorhub.Batch]:
            for batch in batches(rollouts, *arguments, **more):
                self.delivered.update({(each.group, each.index): each for each in batch.responses})
                yield batch

        monkeypatch.setattr(tensorhub.Rollouts, "batches", kept)

    def through(self, rollouts: HubRollouts) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
        def generate(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            found = rollouts(prompts, trainer)
            self.prompts.append(prompts)
            self.returned.append(found)
            assert rollouts.version is not None
            self.versions.append(rollouts.version)
            return found

        return generate


def trainer_of(rollouts: Any, tmp_path: Path, *, model: Any = None, prompts: Any = None, **settings: Any) -> Any:
    given = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2 * SIZE,
        "per_device_eval_batch_size": 2 * SIZE,
        "num_generations": SIZE,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    if model is None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(CONFIG)))
    texts = [f"w{number} w{number + 1}" for number in range(3, 19)] if prompts is None else prompts
    dataset = Dataset.from_dict({"prompt": texts})
    return GRPOTrainer(
        model=model,
        reward_funcs=ALONE["reward"],
        args=GRPOConfig(**given),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)),
        processing_class=ALONE["build_tokenizer"](),
        rollout_func=rollouts,
    )


async def trained(trainer: Any, **more: Any) -> None:
    """Train in a thread, as the hub's own loop goes on meanwhile."""
    await asyncio.to_thread(trainer.train, **more)


def rewards_of(out: str) -> list[float]:
    return [float(reward) for _, reward in REWARD.findall(out)]


# ---------------------------------------------------------------------------------------------- the examples


def test_the_example_differs_from_trl_alone_by_few_lines() -> None:
    alone, ours = ((EXAMPLES / name).read_text() for name in ("trl_grpo_alone.py", "trl_grpo.py"))
    alone_code, our_code = (text.split('"""', 2)[2].splitlines() for text in (alone, ours))
    marked = [line for line in difflib.ndiff(alone_code, our_code) if line[:2] in ("+ ", "- ")]
    changed = [line for line in marked if line[2:].strip()]
    assert 0 < len([line for line in changed if line.startswith("+")]) <= 10
    assert len(changed) <= 10
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert [line for line in shown[0].splitlines() if line[:1] in "+-"] == [
        f"{line[0]}{line[2:]}" for line in changed
    ], "the page shows these lines"


async def test_the_reward_of_the_example_rises_as_it_does_without_tensorhub(hub: RunningHub, model: Path) -> None:
    ended = {}
    for name in ("trl_grpo.py", "trl_grpo_alone.py"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, EXAMPLES / name, model),
            env=hub.environment(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), EXAMPLE_S)
        assert process.returncode == 0, err.decode()
        ended[name] = rewards_of(out.decode())
        assert len(ended[name]) == 20
    for name, rewards in ended.items():
        print(name, rewards)
        assert np.mean(rewards[:3]) < 0.4
        assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, name


# ------------------------------------------------------------------------------------------------- one step


async def test_trl_trains_on_the_tokens_that_came(here: RunningHub, tmp_path: Path, monkeypatch: Any) -> None:
    seen, trained_on = Seen(monkeypatch), []
    with HubRollouts("policy", name="tokens") as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path)
        compute = trainer._compute_loss

        def kept(model: Any, inputs: dict[str, Any]) -> Any:
            trained_on.append({name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)})
            return compute(model, inputs)

        trainer._compute_loss = kept
        await trained(trainer)
    assert len(seen.returned) == len(trained_on) == 2
    rows = {(*each.prompt_ids, -1, *each.token_ids): each for each in seen.delivered.values()}
    assert len(seen.delivered) == 4 * SIZE
    for batch in trained_on:
        for row in range(2 * SIZE):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            count = int(batch["completion_mask"][row].sum())
            response = rows[*prompt, -1, *batch["completion_ids"][row][:count].tolist()]
            logprobs = batch["sampling_per_token_logps"][row][:count].numpy()
            assert np.array_equal(logprobs, response.logprobs)
            own = batch["old_per_token_logps"][row][:count].numpy()
            assert np.abs(own - logprobs).max() < LOGPROB_DIFFERENCE_MAX
    for found, version in zip(seen.returned, seen.versions, strict=True):
        assert {each for row in found["token_versions"] for each in row} == {version}
    assert seen.versions[1] == seen.versions[0] + 1


async def test_prompts_come_repeated_and_are_tokenised_as_trl_does(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="repeated") as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path, max_steps=1)
        await trained(trainer)
    (prompts,) = seen.prompts
    assert [prompts[at : at + SIZE] for at in range(0, len(prompts), SIZE)] == [
        [prompts[0]] * SIZE,
        [prompts[SIZE]] * SIZE,
    ]
    assert seen.returned[0]["prompt_ids"] == trainer._tokenize_prompts(prompts)[0]
    # Two groups of one prompt each: no response was submitted twice, and each of a group has noise of its own.
    assert len({group for group, _ in seen.delivered}) == 2
    assert len({tuple(each) for each in seen.returned[0]["completion_ids"]}) > SIZE


async def test_conversations_are_put_into_the_chat_template(here: RunningHub, tmp_path: Path, monkeypatch: Any) -> None:
    seen = Seen(monkeypatch)
    prompts = [[{"role": "user", "content": f"w{number} w9"}] for number in range(3, 7)]
    with HubRollouts("policy", name="chat") as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path, max_steps=1, prompts=prompts)
        trainer.reward_funcs = [lambda completions, **_: [float(len(each[0]["content"])) for each in completions]]
        trainer.chat_template = "{% for each in messages %}w5 {{ each.content }} {% endfor %}w6"
        await trained(trainer)
    for prompt, ids in zip(seen.prompts[0], seen.returned[0]["prompt_ids"], strict=True):
        assert ids == [5, int(prompt[0]["content"].split()[0][1:]), 9, 6]


async def test_a_generation_of_several_steps_is_published_once_for_each_step_that_generates(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    """Gradients are accumulated, each generation serves two steps, and each of those is trained on twice."""
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="steps") as rollouts:
        trainer = trainer_of(
            seen.through(rollouts),
            tmp_path,
            max_steps=8,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            num_iterations=2,
        )
        await trained(trainer)
        assert len(seen.returned) == 2
        assert seen.versions[1] == seen.versions[0] + 1
        assert [len(each["completion_ids"]) for each in seen.returned] == [8 * SIZE, 8 * SIZE]


async def test_each_step_is_published_also_where_trl_takes_the_engine_for_the_trainer(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="uncorrected", corrects=False) as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path, max_steps=3)
        await trained(trainer)
    assert not trainer.use_vllm
    assert seen.versions == [seen.versions[0] + step for step in range(3)]
    for found, version in zip(seen.returned, seen.versions, strict=True):
        assert {each for row in found["token_versions"] for each in row} == {version}


async def test_evaluation_generates_on_the_weights_of_its_step(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="evaluation") as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path, max_steps=1, num_generations_eval=2)
        await trained(trainer)
        await asyncio.to_thread(trainer.evaluate)
        await asyncio.to_thread(trainer.evaluate)
    assert [len(each["completion_ids"]) for each in seen.returned] == [2 * SIZE, 8, 8]
    assert seen.versions == [seen.versions[0], *[seen.versions[0] + 1] * 2]


async def test_the_same_program_draws_the_same_completions(here: RunningHub, tmp_path: Path, monkeypatch: Any) -> None:
    found = []
    for _ in range(2):
        seen = Seen(monkeypatch)
        with HubRollouts("policy", name="again") as rollouts:
            await trained(trainer_of(seen.through(rollouts), tmp_path))
        found.append([each["completion_ids"] for each in seen.returned])
    assert found[0] == found[1]


async def test_sampling_is_the_trainers(here: RunningHub, tmp_path: Path, monkeypatch: Any) -> None:
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="sampling") as rollouts:
        await trained(
            trainer_of(seen.through(rollouts), tmp_path, max_steps=1, temperature=0.5, top_p=0.8, top_k=5, seed=7)
        )
    for each in seen.delivered.values():
        assert each.sampling == tensorhub.Sampling(
            max_tokens=6, temperature=0.5, top_p=0.8, top_k=5, stop_token_ids=(1,), seed=7
        )


async def test_a_trainer_of_a_checkpoint_publishes_its_weights_and_drops_what_was_before(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    more = {"save_strategy": "steps", "save_steps": 1}
    seen = Seen(monkeypatch)
    rollouts = HubRollouts("policy", name="resumed", epoch=1)
    await trained(trainer_of(seen.through(rollouts), tmp_path, **more))
    # It is not closed, as a trainer that was killed: the next one has its name.
    again = Seen(monkeypatch)
    rollouts._hub.close(release=False)  # type: ignore[union-attr]
    with HubRollouts("policy", name="resumed", epoch=2) as second:
        trainer = trainer_of(again.through(second), tmp_path, **more)
        checkpoint = str(tmp_path / "checkpoint-1")
        await trained(trainer, resume_from_checkpoint=checkpoint)
        assert len(again.returned) == 1
        assert again.versions[0] == seen.versions[1] + 1
    groups = {group for group, _ in again.delivered}
    assert groups == {"1-0-0", "1-0-1"}
    # The second step's weights are those of the checkpoint, so its completions are those of the first trainer's.
    assert again.prompts == seen.prompts[1:]


# --------------------------------------------------------------------------------------------------- failures


async def test_training_goes_on_when_a_runner_is_killed_in_the_middle_of_a_step(
    here: RunningHub, tmp_path: Path, monkeypatch: Any
) -> None:
    seen = Seen(monkeypatch)
    with HubRollouts("policy", name="killed") as rollouts:
        trainer = trainer_of(seen.through(rollouts), tmp_path, max_steps=3, max_completion_length=96)
        training = asyncio.create_task(trained(trainer))

        async def is_generating() -> bool:
            if rollouts._rollouts is None:
                return False
            status = await asyncio.to_thread(rollouts._rollouts.status)
            return any(each.runner == "runner-0" and each.executing for each in status.instances)

        await until(is_generating, "runner-0 generates")
        here.kill("runner-0")
        await asyncio.wait_for(training, WAIT_S)
    assert trainer.state.global_step == 3
    assert len(seen.delivered) == 3 * 2 * SIZE
    attempts = {run.attempt for each in seen.delivered.values() for run in each.runs}
    assert len(attempts) > len(seen.delivered), "no response moved, so the kill came too late"


async def test_a_completion_that_fails_ends_the_training_with_its_reason(here: RunningHub, tmp_path: Path) -> None:
    with HubRollouts("policy", name="fails") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, prompts=[" ".join(["w5"] * 200)] * 4)
        with pytest.raises(tensorhub.TensorHubError, match=r"completion 0 of the prompt of 200 tokens .* could not be"):
            await trained(trainer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_p": 0.1}, "min_p=0.1 of GRPOConfig can't be followed by runners: leave it at 0.0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs={'num_beams': 2}"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"max_completion_length": None}, "max_completion_length=None has no limit"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
async def test_what_runners_cannot_follow_is_refused(
    here: RunningHub, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with HubRollouts("policy", name="refused") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, **settings)
        with pytest.raises(tensorhub.NotInThisVersion, match=re.escape(said)):
            await trained(trainer)
        assert rollouts.version is None, "nothing was registered"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trainer: setattr(trainer.accelerator.state, "num_processes", 2), "a trainer of 2 processes"),
        (lambda trainer: setattr(trainer, "is_deepspeed_enabled", True), "under DeepSpeed"),
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "under FSDP"),
        (lambda trainer: setattr(trainer.model, "peft_config", {}), "of a PEFT adapter"),
        (lambda trainer: setattr(trainer, "_is_vlm", True), "with images"),
        (lambda trainer: setattr(trainer, "tools", [print]), "with tools"),
    ],
    ids=["processes", "deepspeed", "fsdp", "peft", "images", "tools"],
)
async def test_a_trainer_of_another_kind_is_refused(
    here: RunningHub, tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    with HubRollouts("policy", name="refused") as rollouts:
        trainer = trainer_of(rollouts, tmp_path)
        before = trainer.accelerator.state.num_processes
        change(trainer)
        try:
            with pytest.raises(tensorhub.NotInThisVersion, match=said):
                await asyncio.to_thread(rollouts, ["w3"] * SIZE, trainer)
        finally:
            trainer.accelerator.state.num_processes = before


async def test_each_trainer_needs_rollouts_of_its_own_and_none_that_are_closed(
    here: RunningHub, tmp_path: Path
) -> None:
    with HubRollouts("policy", name="one") as rollouts:
        with pytest.raises(tensorhub.TensorHubError, match="there is no trainer yet"):
            rollouts.sync_weights()
        trainer = trainer_of(rollouts, tmp_path, max_steps=1)
        await trained(trainer)
        with pytest.raises(tensorhub.TensorHubError, match="has another trainer"):
            await trained(trainer_of(rollouts, tmp_path))
    with pytest.raises(tensorhub.TensorHubError, match="was closed"):
        await asyncio.to_thread(rollouts, ["w3"] * SIZE, trainer)
    rollouts.close()


async def test_without_a_hub_the_first_generation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_DIR", str(tmp_path))
    with HubRollouts("policy") as rollouts, pytest.raises(tensorhub.AgentUnavailable, match="there is no hub in"):
        await trained(trainer_of(rollouts, tmp_path))
