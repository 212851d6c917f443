"""A job of rollouts on real processes with fake engines, some of which are killed or stopped: who gets what in the end.

Every token follows from its request's seed and its place (tests/kit/fake_engine.py), so each response is compared
token for token, whatever became of it on the way; and with what the engines themselves say that they made.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from tests.bounds import WAIT_S
from tests.chaos.rollout_trainer import MODEL, PROGRAM, Attaching
from tests.chaos.rollout_verdict import SEED, STOP, Delivered, Key, Verdict, delivered_of
from tests.kit.engine_records import Records, read_records
from tests.kit.fake_engine import WEIGHT
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.processes import Peer, conversing, forked
from tests.kit.waiting import until_answer

import tensorhub
from tensorhub.local.hub import LocalRollouts, ServiceCommands
from tensorhub_common.protocol.rollout.entries import DEFAULT_POLICY, PolicyName
from tensorhub_common.protocol.rollout.questions import RolloutStatus

ENGINE: Final = "tests.kit.fake_engine:load"
ROOT: Final = Path(__file__).parents[2]

_batches: Final = msgspec.json.Decoder(tuple[list[Delivered] | None, str | None])


@dataclass
class RolloutJob:
    """One job: its hub, its trainer, and what has come."""

    hub: RunningHub
    name: str
    trainer: tensorhub.AsyncHub
    weights: tensorhub.AsyncShard
    verdict: Verdict
    group_size: int = 4
    version: int = 1
    """The newest that this trainer has published."""

    @property
    def tokens_max(self) -> int:
        return self.verdict.tokens_max

    @property
    def received(self) -> dict[Key, Delivered]:
        return self.verdict.received

    @property
    def wrongs(self) -> list[str]:
        return self.verdict.wrongs

    @property
    def missing(self) -> list[Key]:
        return self.verdict.missing

    @property
    def submitted(self) -> list[str]:
        return [*self.verdict.submitted]

    def records(self) -> Records:
        """Return what the engines say that they made."""
        return read_records(self.hub.directory / "records")

    # The trainer in this process.

    async def attach(self, epoch: int = 0, **more: object) -> tensorhub.AsyncRollouts:
        sampling = tensorhub.Sampling(max_tokens=self.tokens_max, seed=SEED, stop_token_ids=(STOP,))
        given = {"staleness": 1 << 20, "group_size": self.group_size, "sampling": sampling, **more}
        rollouts = await self.trainer.rollouts(MODEL, epoch=epoch, **given)  # type: ignore[arg-type]
        self.verdict.attached()
        return rollouts

    async def submit(self, rollouts: tensorhub.AsyncRollouts, groups: int) -> list[str]:
        first = len(self.verdict.submitted)
        prompts = [tensorhub.Prompt([1, 2 + first + number], id=f"p{first + number}") for number in range(groups)]
        self.verdict.submitted |= {str(prompt.id): self.group_size for prompt in prompts}
        return await rollouts.submit(prompts, timeout_s=WAIT_S)

    async def take(self, batch: tensorhub.AsyncBatch) -> None:
        responses = [delivered_of(each) for each in batch.responses]
        self.verdict.take(responses)
        await batch.done(timeout_s=WAIT_S)
        self.verdict.acknowledged(responses)

    async def take_all(self, rollouts: tensorhub.AsyncRollouts, wait_s: float = WAIT_S) -> None:
        async for batch in rollouts.batches(1, wait_s=wait_s):
            await self.take(batch)

    async def publish(self) -> int:
        """Publish the next version, whose weights are its number."""
        self.version += 1
        async with self.weights.overwriting() as tensors:
            tensors[WEIGHT].fill_(self.version)
        return await self.weights.publish(self.version)

    # Looking.

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

    async def until_tokens_at(self, rollouts: tensorhub.AsyncRollouts, runner: str, count: int = 1) -> None:
        """Wait until a runner makes tokens of so many requests."""

        def makes(found: RolloutStatus) -> bool:
            return any(each.runner == runner and each.executing >= count for each in found.instances)

        await until_answer(rollouts.status, makes, f"{runner} makes tokens of {count}")

    async def leader(self, rollouts: tensorhub.AsyncRollouts) -> str:
        """Return the name of the manager that leads."""
        return (await rollouts.status()).manager.partition(".")[0]

    def check(self, *, is_all: bool = True) -> None:
        """Raise AssertionError where something is wrong, or missing."""
        self.verdict.check_records(self.records())
        assert not self.wrongs, self.wrongs[:3]
        assert not is_all or not self.missing, self.missing[:5]


class RemoteTrainer:
    """A trainer in a process of its own, which may be killed: `replace` starts the next one."""

    def __init__(self, job: RolloutJob, agent: int = 0, **more: object) -> None:
        self._job, self.verdict = job, job.verdict
        socket = job.hub.file.agents[agent].socket
        given = {"group_size": job.group_size, "tokens_max": job.tokens_max, **more}
        self.attaching = msgspec.convert({"job": job.name, "agent": socket, **given}, Attaching)
        self._stack = AsyncExitStack()
        self._peer: Peer | None = None
        self._undone: list[Delivered] = []

    @property
    def peer(self) -> Peer:
        assert self._peer is not None
        return self._peer

    @property
    def pid(self) -> int:
        return self.peer.pid

    async def start(self) -> None:
        """Start a process, and attach."""
        start = forked(PROGRAM, (), self._job.hub.environment())
        self._peer = await self._stack.enter_async_context(conversing("a trainer", start))
        await self._peer.line()
        await self.attach()

    async def attach(self) -> None:
        await self.peer.ask("attach", msgspec.to_builtins(self.attaching))
        self._undone.clear()
        self.verdict.attached()

    async def replace(self) -> None:
        """Kill the process, if it lives, and have another one attach."""
        await self.close()
        await self.start()

    async def close(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def submit(self, groups: list[str]) -> None:
        """Submit these groups; those that were submitted before are known."""
        self.verdict.submitted |= dict.fromkeys(groups, self.attaching.group_size)
        await self.peer.ask("submit", [(name, 2 + index) for index, name in enumerate(groups)])

    async def take(self, count_min: int = 1, wait_s: float = WAIT_S) -> list[Delivered] | None:
        """Take a batch; None: nothing is open."""
        self.peer.say(msgspec.json.encode(("take", count_min, wait_s)).decode())
        taken, error = _batches.decode(await self.peer.line(2 * WAIT_S))
        assert error is None, error
        if taken is not None:
            self.verdict.take(taken)
            self._undone += taken
        return taken

    async def done(self) -> None:
        """Acknowledge all that was taken."""
        await self.peer.ask("done")
        self.verdict.acknowledged(self._undone)
        self._undone.clear()

    async def take_all(self) -> None:
        while await self.take() is not None:
            await self.done()


@asynccontextmanager
async def rollout_job(
    directory: Path,
    *,
    runners: int = 3,
    runners_max: int = 0,
    managers: int = 2,
    agents: int = 2,
    tokens_max: int = 200,
    step_s: float = 0.005,
    nats_nodes: int = 1,
    commands: ServiceCommands | None = None,
    trainer_install: Literal["in-place", "staged"] = "in-place",
    **settings: str,
) -> AsyncIterator[RolloutJob]:
    """Bring a hub up with runners of fake engines, and publish version 1."""
    records = directory / "records"
    records.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": str(ROOT), "FAKE_STEP_S": str(step_s), "FAKE_RECORDS": str(records), **settings}
    plan = LocalRollouts(runners, ENGINE, managers=managers, runners_max=runners_max)
    async with (
        running_hub(
            directory, agents, rollouts=plan, nats_nodes=nats_nodes, settings=environment, commands=commands
        ) as hub,
        await hub.connect("default") as trainer,
    ):
        weights = await trainer.register(MODEL, {WEIGHT: torch.ones(16)}, replica="trainer", install=trainer_install)
        await weights.publish(1)
        verdict = Verdict(tokens_max, is_exact="FAKE_LENGTH_MEAN" not in settings)
        yield RolloutJob(hub, "default", trainer, weights, verdict)


async def struck(
    job: RolloutJob, blow: Callable[[], Awaitable[object]], groups: int = 12, *, policy: PolicyName = DEFAULT_POLICY
) -> float:
    """Submit, strike once tokens are made, take all; return how long all took. Raises AssertionError if one is lost."""
    rollouts = await job.attach(policy=policy)
    await job.until_serving(rollouts, 1)
    began = time.monotonic()
    await job.submit(rollouts, groups)
    await job.until_tokens(rollouts)
    taking = asyncio.create_task(job.take_all(rollouts))
    await blow()
    await taking
    job.check()
    await rollouts.close()
    return time.monotonic() - began
