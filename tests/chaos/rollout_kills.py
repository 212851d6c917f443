"""A job of rollouts on real processes with fake engines, some of which are killed or stopped: who gets what in the end.

Every token follows from its request's seed and its place (tests/kit/fake_engine.py), so each response is compared
token for token, whatever became of it on the way.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from tests.bounds import WAIT_S
from tests.kit.fake_engine import VOCABULARY, WEIGHT, token_of
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import until_answer

import tensorhub
from tensorhub.local.hub import LocalRollouts
from tensorhub_common.protocol.rollout.payloads import request_seed

ENGINE: Final = "tests.kit.fake_engine:load"
MODEL: Final = "policy"
SEED: Final = 11
STOP: Final = 7


def expected(group: str, index: int, tokens_max: int) -> list[int]:
    """Return the tokens that a response must have, whoever made them."""
    seed = request_seed(SEED, group, index)
    found: list[int] = []
    while len(found) < tokens_max and STOP not in found:
        found.append(token_of(seed, len(found)))
    return found


@dataclass
class RolloutJob:
    """One job: its hub, its trainer, and what has come."""

    hub: RunningHub
    name: str
    trainer: tensorhub.AsyncHub
    weights: tensorhub.AsyncShard
    tokens_max: int
    received: dict[tuple[str, int], tensorhub.Response] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    group_size: int = 4

    async def attach(self, epoch: int = 0, **more: object) -> tensorhub.AsyncRollouts:
        sampling = tensorhub.Sampling(max_tokens=self.tokens_max, seed=SEED, stop_token_ids=(STOP,))
        return await self.trainer.rollouts(
            MODEL,
            group_size=self.group_size,
            epoch=epoch,
            sampling=sampling,
            staleness=1 << 20,
            **more,  # type: ignore[arg-type]
        )

    async def submit(self, rollouts: tensorhub.AsyncRollouts, groups: int) -> None:
        first = len(self.submitted)
        prompts = [tensorhub.Prompt([1, 2 + first + number], id=f"p{first + number}") for number in range(groups)]
        self.submitted += await rollouts.submit(prompts)

    async def take(self, batch: tensorhub.AsyncBatch) -> None:
        for each in batch.responses:
            key = (each.group, each.index)
            if key in self.received:
                self.wrongs.append(f"{key} came twice")
            self.received[key] = each
            wanted = expected(each.group, each.index, self.tokens_max)
            if each.token_ids.tolist() != wanted:
                self.wrongs.append(f"{key} has other tokens ({each.finish_reason}, {each.error}): {each.token_ids}")
        await batch.done()

    async def take_all(self, rollouts: tensorhub.AsyncRollouts, wait_s: float = WAIT_S) -> None:
        async for batch in rollouts.batches(1, wait_s=wait_s):
            await self.take(batch)

    @property
    def missing(self) -> list[tuple[str, int]]:
        wanted = [(group, index) for group in self.submitted for index in range(self.group_size)]
        return [key for key in wanted if key not in self.received]

    def attempts(self) -> Counter[int]:
        """How many responses were made by how many attempts."""
        return Counter(len({run.attempt for run in each.runs}) for each in self.received.values())

    async def publish(self) -> int:
        async with self.weights.overwriting() as tensors:
            tensors[WEIGHT].fill_((self.weights.version or 0) + 1)
        return await self.weights.publish()

    async def until_serving(self, rollouts: tensorhub.AsyncRollouts, count: int) -> None:
        await until_answer(
            rollouts.status,
            lambda found: sum(each.state == "serving" for each in found.instances) >= count,
            f"{count} instances serve",
        )

    async def until_tokens(self, rollouts: tensorhub.AsyncRollouts) -> None:
        await until_answer(
            rollouts.status, lambda found: any(each.executing for each in found.instances), "tokens are made"
        )


@asynccontextmanager
async def rollout_job(
    directory: Path,
    *,
    runners: int = 3,
    managers: int = 2,
    agents: int = 2,
    tokens_max: int = 200,
    step_s: float = 0.005,
    nats_nodes: int = 1,
    **settings: str,
) -> AsyncIterator[RolloutJob]:
    """Bring a hub up with runners of fake engines, and publish version 1."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "FAKE_STEP_S": str(step_s), **settings}
    plan = LocalRollouts(runners, ENGINE, managers=managers)
    async with (
        running_hub(directory, agents, rollouts=plan, nats_nodes=nats_nodes, settings=environment) as hub,
        await hub.connect("default") as trainer,
    ):
        weights = await trainer.register(MODEL, {WEIGHT: torch.ones(16)}, replica="trainer")
        await weights.publish(1)
        yield RolloutJob(hub, "default", trainer, weights, tokens_max)


async def struck(job: RolloutJob, blow: Callable[[], Awaitable[object]], groups: int = 12) -> float:
    """Submit, strike once tokens are made, take all; return how long all took. Raises AssertionError if one is lost."""
    rollouts = await job.attach()
    await job.until_serving(rollouts, 1)
    began = time.monotonic()
    await job.submit(rollouts, groups)
    await job.until_tokens(rollouts)
    taking = asyncio.create_task(job.take_all(rollouts))
    await blow()
    await taking
    assert not job.wrongs, job.wrongs[:3]
    assert not job.missing, job.missing[:5]
    await rollouts.close()
    return time.monotonic() - began


assert STOP < VOCABULARY
