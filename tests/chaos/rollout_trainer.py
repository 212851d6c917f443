"""A trainer of rollouts in a process of its own, which takes orders, so that it can be killed between any two of them.

An order is a JSON array: a method of `Trainer` and its arguments. It is answered by one line: what the method returns
and None, or None and the error.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from tests.bounds import WAIT_S
from tests.chaos.rollout_verdict import SEED, STOP, Delivered, delivered_of

import tensorhub

PROGRAM: Final = "from tests.chaos.rollout_trainer import main; main()"
MODEL: Final = "policy"


class Attaching(msgspec.Struct, frozen=True, kw_only=True):
    """As what a trainer attaches."""

    job: str
    agent: str
    name: str = "main"
    epoch: int = 0
    group_size: int = 4
    tokens_max: int = 200
    staleness: int = 1 << 20


class Trainer:
    def __init__(self) -> None:
        self._hub: tensorhub.AsyncHub | None = None
        self._rollouts: tensorhub.AsyncRollouts | None = None
        self._batches: AsyncGenerator[tensorhub.AsyncBatch, None] | None = None
        self._undone: list[tensorhub.AsyncBatch] = []

    @property
    def rollouts(self) -> tensorhub.AsyncRollouts:
        assert self._rollouts is not None
        return self._rollouts

    async def attach(self, said: dict[str, Any]) -> None:
        """Connect, and take the consumer's name."""
        config = msgspec.convert(said, Attaching)
        if self._hub is None:
            self._hub = await tensorhub.connect_async(config.job, agent=config.agent)
        self._undone.clear()
        self._batches = None
        self._rollouts = await self._hub.rollouts(
            MODEL,
            name=config.name,
            epoch=config.epoch,
            group_size=config.group_size,
            staleness=config.staleness,
            sampling=tensorhub.Sampling(max_tokens=config.tokens_max, seed=SEED, stop_token_ids=(STOP,)),
            timeout_s=WAIT_S,
        )

    async def submit(self, prompts: list[tuple[str, int]]) -> list[str]:
        """Submit prompts of two tokens: each one's id, and its second token."""
        given = [tensorhub.Prompt([1, second], id=name) for name, second in prompts]
        return await self.rollouts.submit(given, timeout_s=WAIT_S)

    async def take(self, min_responses: int, wait_s: float) -> list[Delivered] | None:
        """Return the responses of the next batch; None: nothing is open."""
        batches = self.rollouts.batches(min_responses, wait_s=wait_s)
        try:
            async for batch in batches:
                self._undone.append(batch)
                return [delivered_of(each) for each in batch.responses]
            return None
        finally:
            await batches.aclose()

    async def done(self) -> None:
        """Acknowledge all that was taken."""
        while self._undone:
            await self._undone[0].done(timeout_s=WAIT_S)
            del self._undone[0]


async def serve() -> None:
    trainer = Trainer()
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, *arguments = json.loads(line)
        try:
            answer = [await getattr(trainer, what)(*arguments), None]
        except Exception as why:  # noqa: BLE001 (the process that gave the order judges it)
            answer = [None, f"{type(why).__name__}: {why}"]
        print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    asyncio.run(serve())
