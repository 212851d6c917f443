"""`tensorhub replay` against a real hub: what is confirmed, what is gone, and that nothing is left behind."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from tests.bounds import WAIT_S
from tests.chaos import rollout_replay
from tests.kit.hubs import COMMAND, RunningHub
from tests.kit.processes import Run, forked
from tests.kit.tiny_engines import SIZES, VOCABULARY, Desk, Response, engine_of, fill
from tests.kit.waiting import until_answer
from transformers import PreTrainedModel

import tensorhub
from tensorhub._rollouts import records
from tensorhub._rollouts.records import ResponseRecord
from tensorhub_common.protocol.rollout import messages
from tensorhub_runner.engines.models import build

CONFIG: Final[dict[str, Any]] = {**SIZES, "model_type": "llama"}
MODEL: Final = "policy"
PROMPT: Final = (5, 9, 3)
SAMPLING: Final = tensorhub.Sampling(max_tokens=20, temperature=0.8)


def response(job: str, index: int, versions: Sequence[int], roots: dict[int, str]) -> ResponseRecord:
    """Return what engines make that have one version after the other in memory, each for five tokens."""
    module, before = build(CONFIG), None
    runs, seed = list[tensorhub.TokenRun](), 100 + index
    for number, version in enumerate(versions):
        start, end = 5 * number, 5 * number + 5 if version != versions[-1] else SAMPLING.max_tokens
        fill(module, version)
        desk = Desk(engine_of(module))
        drawn = messages.Sampling(end, seed, SAMPLING.temperature)
        before = desk.begin(PROMPT, drawn, before and Response(before.attempt, before.tokens, before.logprobs))
        desk.run()
        sent = desk.engine.facts.run_engine
        engine = tensorhub.RunEngine(sent.kind, sent.build, sent.dtype, sent.is_exact)
        kv: messages.Kv = "recomputed" if number else "fresh"
        runs.append(tensorhub.TokenRun(start, end, version, roots[version], "runner-0", (1, number), kv, 0, engine))
    assert before is not None
    return ResponseRecord(
        job=job,
        model=MODEL,
        group="p",
        index=index,
        finish_reason="length",
        error=None,
        sampling=SAMPLING,
        seed=seed,
        runs=tuple(runs),
        prompt_ids=PROMPT,
        token_ids=tuple(before.tokens),
        logprobs=tuple(np.array(before.logprobs, np.float32).tolist()),
    )


async def publish_all(
    shard: tensorhub.AsyncShard, module: PreTrainedModel, reader: tensorhub.AsyncShard, versions: Sequence[int]
) -> dict[int, str]:
    """Publish versions, and return their roots."""
    roots = dict[int, str]()
    for version in versions:
        async with shard.overwriting():
            fill(module, version)
        await shard.publish(version)
        await reader.replicate(version)
        roots[version] = reader.root
    return roots


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
async def test_versions_are_fetched_and_scored_once_and_what_is_gone_is_told(
    hub: RunningHub, job: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "rollouts.jsonl"
    async with hub.connected(job) as (here, there):
        module = build(CONFIG)
        shard = await here.register(MODEL, module, replica="trainer")
        await here.retain(MODEL, last=4)
        reader = await there.register(MODEL, build(CONFIG), replica="reader")
        roots = await publish_all(shard, module, reader, (1, 2, 3))
        made = [response(job, 0, (1, 2, 3), roots), response(job, 1, (3,), roots), response(job, 2, (1,), roots)]
        records.append(file, made)
        given = ("replay", file, "--model", tmp_path)
        foreign = msgspec.structs.replace(made[1], index=3, token_ids=(*made[1].token_ids[:-1], VOCABULARY))
        (tmp_path / "more.jsonl").write_bytes(file.read_bytes() + records.encode(foreign))
        code, out, err = await hub.command("replay", tmp_path / "more.jsonl", "--model", tmp_path, "--json")
        assert (code, err) == (1, "")
        *whole, last = [run for each in out.splitlines() for run in _runs(each)]
        runs = [(run["version"], run["verdict"], run["tolerance"]) for run in whole]
        assert runs == [(version, "confirmed", 0.0) for version in (1, 2, 3, 3, 1)]
        assert (last["verdict"], f"token id {VOCABULARY}" in last["reason"]) == ("differs", True)

        await here.retain(MODEL, last=0)
        await until_answer(
            lambda: here.versions(MODEL), lambda found: [each.version for each in found if each.holders] == [3]
        )
        code, out, err = await hub.command(*given)
        assert (code, err) == (3, "")
        assert out.count("can't be scored: version 1 is no longer in the hub: retain what is to be replayed") == 2
        assert "3 responses (60 tokens in 5 runs): 2 gone, 1 confirmed" in out

        # What is gone is told where nothing else is left, too; and what is there of another model is told as such.
        records.append(tmp_path / "gone.jsonl", made[2:])
        assert (await hub.command("replay", tmp_path / "gone.jsonl", "--model", tmp_path))[0] == 3
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1, "intermediate_size": 48}))
        code, out, err = await hub.command("replay", file, "--model", other)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert sorted(each.replica for each in await here.replicas(MODEL)) == ["reader", "trainer"]


def _runs(line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(line)["runs"]
    return found


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
async def test_a_replay_that_is_broken_off_leaves_no_replica(hub: RunningHub, job: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "rollouts.jsonl"
    async with hub.connected(job) as (here, there):
        module = build(CONFIG)
        shard = await here.register(MODEL, module, replica="trainer")
        reader = await there.register(MODEL, build(CONFIG), replica="reader")
        roots = await publish_all(shard, module, reader, (1,))
        records.append(file, [response(job, 0, (1,), roots)])

        async def is_replaying() -> bool:
            return any(each.replica.startswith("replay-") for each in await here.replicas(MODEL))

        with hub.stopped("planner-0"):
            run = Run(forked(COMMAND, ("replay", str(file), "--model", str(tmp_path)), hub.environment()))
            await until_answer(is_replaying, bool)
            os.kill(run.pid, signal.SIGINT)
            ended = await asyncio.to_thread(run.ended)
            assert (ended[0], ended[2]) == (130, "tensorhub: interrupted\n")
            await until_answer(is_replaying, lambda found: not found)


@pytest.mark.slow
@pytest.mark.timeout(20 * WAIT_S)
async def test_responses_of_killed_runners_and_of_versions_that_came_meanwhile_are_confirmed(tmp_path: Path) -> None:
    """`make rollout-replay` does the same with 100 responses."""
    found = await rollout_replay.run(tmp_path, responses=24, kills=2, publishes=3)
    assert (found.said.code, found.said.err) == (0, "")
    assert "24 confirmed" in found.said.out
    assert {each["verdict"] for each in found.runs} == {"confirmed"}
    assert all(each["root"] and each["engine"] for each in found.runs)
    assert found.made.kills
    assert len({each["version"] for each in found.runs}) > 1
    codes = {what: said.code for what, said in found.changed.items()}
    assert codes == {"token": 1, "logprob": 1, "root": 1, "seed": 1, "gone": 3, "kept": 0}
