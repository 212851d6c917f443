"""The commands against a real hub: weights in files go in and come out, and everything answers."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.kit.hubs import RunningHub, new_job

from tensorhub import TensorSpec, mapping

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_weights_in_files_go_in_and_come_out(hub: RunningHub, tmp_path: Path) -> None:
    job = new_job()
    given = {"w": torch.randn(1000, 30), "flag": torch.ones((), dtype=torch.bool), "half": torch.randn(7).half()}
    save_file(given, tmp_path / "in.safetensors")
    published = await hub.command("publish", "policy", "--version", "4", tmp_path / "in.safetensors", "--job", job)
    assert published == (0, published[1], "")
    assert (await hub.command("pull", "policy", tmp_path / "out.safetensors", "--job", job))[0] == 0
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    code, out, _ = await hub.command("versions", "policy", "--job", job, "--json")
    assert (code, '"holders":["published"]' in out) == (0, True)
    code, out, _ = await hub.command("doctor", "--quick", "--job", job)
    assert code == 0, out


async def test_pull_puts_the_shards_of_a_holder_together(hub: RunningHub, tmp_path: Path) -> None:
    job = new_job()
    whole = torch.arange(24.0).reshape(4, 6)
    async with hub.connected(job) as (here, there):
        shards = []
        for index, at in enumerate((here, there)):
            spec = {
                "w": TensorSpec((4, 3), "float32", (4, 6), (0, 3 * index)),
                f"own-{index}": TensorSpec((2,), "int8"),
            }
            shards.append(await at.register("policy", spec, replica="trainer", shard=index, shards=2))
            shards[-1].tensors["w"].copy_(whole[:, 3 * index : 3 * index + 3])
            shards[-1].tensors[f"own-{index}"].fill_(index)
        await asyncio.gather(*(shard.publish(1) for shard in shards))
        code, out, err = await hub.command("pull", "policy", tmp_path / "out.safetensors", "--job", job, "--json")
        assert (code, err) == (0, ""), out
        assert [each.replica for each in await here.replicas("policy")] == ["trainer"]
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["w"], whole)
    assert set(found) == {"w", "own-0", "own-1"}


@pytest.mark.long
async def test_pull_says_what_shards_lack_also_where_they_overlap(hub: RunningHub, tmp_path: Path) -> None:
    """Two shards have more elements together than the tensor, and still not all of them; with a third they do."""
    job = new_job()
    boxes = [(0, 8), (1, 7), (8, 4)]
    async with hub.connected(job) as (here, _):
        for shards in (2, 3):
            given = [TensorSpec((rows, 2), "float32", (12, 2), (at, 0)) for at, rows in boxes[:shards]]
            workers = [
                await here.register(f"of-{shards}", {"w": spec}, replica="trainer", shard=shard, shards=shards)
                for shard, spec in enumerate(given)
            ]
            for worker, (at, rows) in zip(workers, boxes, strict=False):
                worker.tensors["w"].copy_(torch.arange(24.0).view(12, 2)[at : at + rows])
            await asyncio.gather(*(worker.publish(1) for worker in workers))
        code, _, err = await hub.command("pull", "of-2", tmp_path / "lacks.safetensors", "--job", job)
        assert (code, "have only a part of tensor 'w'" in err) == (1, True)
        assert not (tmp_path / "lacks.safetensors").exists()
        assert (await hub.command("pull", "of-3", tmp_path / "whole.safetensors", "--job", job))[0] == 0
    assert torch.equal(load_file(tmp_path / "whole.safetensors")["w"], torch.arange(24.0).view(12, 2))


CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 6,
    "vocab_size": 5,
    "tie_word_embeddings": True,
}


async def test_pull_writes_the_models_own_tensors_of_a_fused_engine(hub: RunningHub, tmp_path: Path) -> None:
    """Two ranks of an engine, whose one key head both of them have, and whose vocabulary is padded to 8."""
    job, at = new_job(), "model.layers.0.self_attn"
    query, key, value = torch.rand(8, 4), torch.rand(2, 4), torch.rand(2, 4)
    embedding = torch.rand(5, 4)
    async with hub.connected(job) as workers:
        shards = []
        for rank, worker in enumerate(workers):
            padded = torch.cat([embedding, torch.full((3, 4), torch.nan)])
            given = {
                f"{at}.qkv_proj.weight": torch.cat([query[4 * rank : 4 * rank + 4], key, value]),
                "model.embed_tokens.weight": padded[4 * rank : 4 * rank + 4],
                f"{at}.rotary_emb.cos_sin_cache": torch.ones(7),
            }
            names = mapping.llama(CONFIG, tp_rank=rank, tp_size=2)
            shards.append(await worker.register("policy", given, replica="engine", shard=rank, shards=2, mapping=names))
        assert f"{at}.rotary_emb.cos_sin_cache" not in shards[0].tensors
        assert shards[1].tensors["model.embed_tokens.weight"][1:].eq(0).all()
        await asyncio.gather(*(shard.publish(1) for shard in shards))
        code, out, err = await hub.command("pull", "policy", tmp_path / "out.safetensors", "--job", job)
        assert (code, err) == (0, ""), out
    found = load_file(tmp_path / "out.safetensors")
    expected = {
        f"{at}.q_proj.weight": query,
        f"{at}.k_proj.weight": key,
        f"{at}.v_proj.weight": value,
        "model.embed_tokens.weight": embedding,
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
async def test_pull_takes_the_latest_that_no_rewind_has_retired(hub: RunningHub, tmp_path: Path) -> None:
    """Two replicas hold versions 1 and 2; the trainer goes back to 1, and the other still holds 2."""
    job, out = new_job(), tmp_path / "out.safetensors"
    for version in (1, 2):
        save_file({"w": torch.full((8,), float(version))}, tmp_path / "in.safetensors")
        given = ("--version", str(version), "--replica", f"of-{version}", "--job", job)
        assert (await hub.command("publish", "policy", tmp_path / "in.safetensors", *given))[0] == 0
    assert (await hub.command("rewind", "policy", "--to", "1", "--job", job))[0] == 0
    for which in ([], ["--version", "latest"], ["--version", "1"]):
        code, said, err = await hub.command("pull", "policy", out, *which, "--job", job)
        assert (code, err, said.split(" is in ")[0]) == (0, "", "policy version 1")
        assert load_file(out)["w"].eq(1).all()
        out.unlink()
    refused = await hub.command("pull", "policy", out, "--version", "2", "--job", job)
    assert refused == (1, "", "tensorhub: version 2 of policy was retired by a rewind: pull the latest\n")
