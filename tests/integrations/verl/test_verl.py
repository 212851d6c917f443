"""verl's registry, its manager and its workers, on CPU with Ray, move weights by the hub: docs/guides/verl.md."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
import yaml
from tests.integrations.verl.clusters import group_of, ray_of
from tests.integrations.verl.workers import SHAPES, Actor, Replica, RolloutWorker, actors_at, weights_at
from tests.kit.hubs import RunningHub, new_job, running_hub
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

import tensorhub
from tensorhub.integrations.verl import TensorHubCheckpointEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "guides" / "verl.md").read_text()
CONFIG: Final = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "architectures": ["Qwen2ForCausalLM"],
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), 1) as running:
        yield running


@pytest.fixture
def here(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of this process find the hub; the job is the test's own."""
    monkeypatch.setenv("TENSORHUB_DIR", str(hub.directory))
    return new_job()


def engines(job: str, *, receivers: int = 1, **more: Any) -> tuple[list[Any], list[Any]]:
    """Make two actors and some receivers, as verl does: by name, from the registry."""
    actors = [
        CheckpointEngineRegistry.new("tensorhub", is_master=rank == 0, bucket_size=1 << 20, job=job, **more)
        for rank in range(2)
    ]
    return actors, [
        CheckpointEngineRegistry.new("tensorhub", bucket_size=1 << 20, job=job, **more) for _ in range(receivers)
    ]


def begun(actors: list[Any], receivers: list[Any]) -> None:
    """Do what `CheckpointEngineManager.build_process_group` does."""
    metadata = [each.prepare() for each in [*actors, *receivers]]
    theirs, ours = TensorHubCheckpointEngine.build_topology(len(actors), len(receivers), metadata)
    for group, kwargs in ((actors, theirs), (receivers, ours)):
        assert {len(each) for each in kwargs.values()} == {len(group)}
        for rank, engine in enumerate(group):
            engine.init_process_group(**{name: each[rank] for name, each in kwargs.items()})


async def received(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


async def updated(actors: list[Any], receivers: list[Any], step: int) -> list[dict[str, torch.Tensor]]:
    begun(actors, receivers)
    sends = [each.send_weights(weights_at(step), global_steps=step) for each in actors]
    done = await asyncio.gather(*sends, *(received(each) for each in receivers))
    for each in [*actors, *receivers]:
        each.finalize()
    return done[len(actors) :]


def assert_equal(found: dict[str, torch.Tensor], step: int) -> None:
    wanted = actors_at(step)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_registry_knows_it_and_it_is_whole() -> None:
    assert CheckpointEngineRegistry.get("tensorhub") is TensorHubCheckpointEngine
    assert issubclass(TensorHubCheckpointEngine, CheckpointEngine)
    assert not TensorHubCheckpointEngine.__abstractmethods__
    assert TensorHubCheckpointEngine.wire_format == "named_tensors"


async def test_each_update_comes_whole_also_to_a_worker_that_joins_late(here: str) -> None:
    actors, receivers = engines(here, receivers=2)
    try:
        for step in range(3):
            for found in await updated(actors, receivers, step):
                assert_equal(found, step)
        late = CheckpointEngineRegistry.new("tensorhub", bucket_size=0, job=here)
        receivers.append(late)
        for step in (3, 4):
            for found in await updated(actors, receivers[1:], step):
                assert_equal(found, step)
        # The first was left out of two updates.
        for found in await updated(actors, receivers, 5):
            assert_equal(found, 5)
    finally:
        for each in [*receivers, *actors]:
            each.close()


async def test_an_actor_that_was_started_again_goes_on(here: str) -> None:
    actors, receivers = engines(here)
    await updated(actors, receivers, 1)
    # It ends without a word, as a killed one does: its memory stays with the agent.
    actors[0]._run(actors[0]._hub.close(release=False))
    again, _ = engines(here)
    try:
        for step in (1, 7):
            (found,) = await updated(again, receivers, step)
            assert_equal(found, step)
    finally:
        for each in [*receivers, *again]:
            each.close()


async def test_a_model_that_changes_is_refused_and_the_next_update_is_whole(here: str) -> None:
    actors, receivers = engines(here)
    try:
        await updated(actors, receivers, 1)
        begun(actors, receivers)
        for wrong, said in (
            ([*weights_at(2), ("new", torch.ones(1))], r"'new' is torch.float32 of \[1\], and it was not there"),
            ([("embed.weight", torch.ones(3))], r"it was torch.float32 of \[64, 33\] in the first update"),
            ([*weights_at(2)][1:], "'embed.weight' was in the first update, and is missing"),
        ):
            with pytest.raises(tensorhub.LayoutMismatch, match=said):
                await actors[0].send_weights(iter(wrong))
        (found,) = await updated(actors, receivers, 3)
        assert_equal(found, 3)
    finally:
        for each in [*receivers, *actors]:
            each.close()


async def test_what_verl_does_wrongly_is_said(here: str) -> None:
    actors, receivers = engines(here, timeout_s=1)
    other = CheckpointEngineRegistry.new("tensorhub", bucket_size=0, job=new_job())
    try:
        with pytest.raises(tensorhub.TensorHubError, match="no update was begun"):
            await received(receivers[0])
        with pytest.raises(ValueError, match="rank 0 of the actor is no master"):
            TensorHubCheckpointEngine.build_topology(1, 1, [receivers[0].prepare(), actors[0].prepare()])
        with pytest.raises(ValueError, match=f"is in job {here}, and other workers in "):
            TensorHubCheckpointEngine.build_topology(1, 1, [actors[0].prepare(), other.prepare()])
        begun(actors, receivers)
        with pytest.raises(tensorhub.TensorHubError, match="no version after 0 of policy came within 1 s"):
            await received(receivers[0])
    finally:
        for each in [*receivers, *actors, other]:
            each.close()


async def test_the_example_says_what_the_guide_says(hub: RunningHub) -> None:
    program = (ROOT / "examples" / "verl_checkpoint.py").read_text()
    code, out, err = await hub.run_interpreter(program, TENSORHUB_JOB=new_job())
    assert code == 0, err
    assert re.findall(r"^step .*$", PAGE, re.MULTILINE) == [line for line in out.splitlines() if line[:4] == "step"]


def test_the_settings_of_the_guide_are_verls(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    given = yaml.safe_load(settings)["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
    config = CheckpointEngineConfig(**given)
    made = CheckpointEngineRegistry.new(config.backend, bucket_size=0, **config.engine_kwargs[config.backend])
    assert isinstance(made, TensorHubCheckpointEngine)


# ----------------------------------------------------------------------------------- verl's manager, over Ray


@pytest.fixture
def cluster(hub: RunningHub) -> Iterator[str]:
    """A Ray of this machine whose workers find the hub; returns the job."""
    job = new_job()
    with ray_of(hub.directory, job):
        yield job


async def test_verls_manager_moves_each_update_from_its_actors_to_its_rollout_workers(
    cluster: str, tmp_path: Path
) -> None:
    """Two ranks of an actor, one replica of one worker; then a second replica joins, and the first leaves."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = CheckpointEngineConfig(
        backend="tensorhub",
        engine_kwargs={"tensorhub": {"timeout_s": 120}},
    )
    model = HFModelConfig(path=str(tmp_path), load_tokenizer=False, override_config={"attn_implementation": "eager"})
    rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config)

    actors = group_of(2, Actor, config=config)
    rollouts = group_of(2, RolloutWorker, rollout_config=rollout_config, model_config=model)
    replicas = [Replica(replica_rank=rank, config=rollout_config, model_config=model) for rank in range(2)]
    await asyncio.gather(*[each.init_hybrid(rollouts) for each in replicas])
    manager = CheckpointEngineManager(config, actors, replicas[:1])

    async def unlike(replica: Any, step: int) -> list[str]:
        return list(await replica.workers[0].unlike.remote(step))

    for step in (0, 1):
        await manager.update_weights(global_steps=step)
        assert await unlike(replicas[0], step) == []
    assert set(await unlike(replicas[0], 9)) == SHAPES.keys() - {"nothing"}, "it can tell"
    manager.add_replicas(replicas[1:])
    await manager.update_weights(global_steps=2)
    assert [await unlike(each, 2) for each in replicas] == [[], []]
    manager.remove_replicas(replicas[:1])
    await manager.update_weights(global_steps=3)
    assert await unlike(replicas[1], 3) == []
    assert await unlike(replicas[0], 2) == [], "it was left as it was"
    assert actors.how_many() == [4 * len(SHAPES)] * 2, "each rank takes part in gathering"
    assert re.fullmatch(r"job-\d+-\d+", cluster)
