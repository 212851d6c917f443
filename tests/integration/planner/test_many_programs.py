"""All shards of an engine ask at once for what a trainer of another sharding has published."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.integration.planner.conftest import MODEL, ROOT, Job
from tests.integration.planner.test_service import planning
from tests.kit.nats import RunningNats
from tests.kit.waiting import retried

from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import Drained, Filled, Granted, Ready, Unpublish, Want
from tensorhub_common.protocol.plans import PLAN_ASK_S, Plan, ReadPriority
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.context import program_store

TRAINERS, ENGINES, TENSORS = 8, 12, 300
ROWS = 96
FIRST = 2


def sharded(rank: int, ranks: int, dim: int) -> Layout:
    """Return a rank's layout: all tensors cut along a dimension."""
    shape, offset = [ROWS, ROWS], [0, 0]
    shape[dim] = ROWS // ranks
    offset[dim] = rank * shape[dim]
    entries = [
        TensorEntry(f"layer-{number}", "bfloat16", 2, tuple(shape), (ROWS, ROWS), tuple(offset))
        for number in range(TENSORS)
    ]
    return layout_of(entries)


def of(replica: str, shard: int) -> dict[str, Any]:
    return {"model": MODEL, "replica": replica, "shard": shard}


async def publish(world: Job, version: int) -> None:
    """Let all trainers overwrite what they hold, if anything."""
    for shard in range(TRAINERS):
        about = of("trainers", shard)
        for command in (Unpublish(**about), Drained(**about)) if version > FIRST else ():
            await world.say(f"trainers-{shard}", command)
    for shard in range(TRAINERS):
        await world.say(f"trainers-{shard}", Ready(**of("trainers", shard), version=version, root=f"{version:032x}"))


async def begin(world: Job, version: int) -> int:
    """Let all shards want the version; return the round."""
    return [await world.say(f"engines-{n}", Want(**of("engines", n), want=version)) for n in range(ENGINES)][-1]


async def finish(world: Job, number: int, version: int) -> None:
    for n in range(ENGINES):
        await world.say(f"engines-{n}", Granted(**of("engines", n), round=number, attempt=1))
    for n in range(ENGINES):
        await world.say(f"engines-{n}", Filled(**of("engines", n), round=number, version=version, root=ROOT))


async def ask(world: Job, shard: int, version: int) -> Plan:
    """Ask as an agent does: it waits for so long, and asks again."""
    turn = ReadPriority(world.last_seq, world.last_seq)
    demand = world.demand("engines", version, shard=shard, agent=f"engines-{shard}", root=None, turn=turn)
    question, subject = msgspec.json.encode(demand), subjects.query_subject(world.name, "plan")
    body = await retried(lambda: world.bus.request(subject, question, PLAN_ASK_S), NoAnswer)
    return msgspec.json.decode(body, type=Plan)


async def test_each_program_is_compiled_once_and_the_next_version_is_read_as_the_first(
    nats_server: RunningNats, world: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits in vain asks again; every question is answered, and no reader's program is made twice."""
    compiled: Counter[str] = Counter()

    def counting(digest: str, destination: Layout, index: LayoutIndex) -> Any:
        compiled[digest] += 1
        return compile_program(digest, destination, index)

    monkeypatch.setattr(program_store, "compile_program", counting)
    await world.register("trainers", *(sharded(rank, TRAINERS, 0) for rank in range(TRAINERS)))
    await world.register("engines", *(sharded(rank, ENGINES, 1) for rank in range(ENGINES)))
    await publish(world, FIRST)
    async with planning(nats_server.url):
        number = await begin(world, FIRST)
        # Two questions of each shard: an agent that was stopped asks while its first question is being answered.
        first = await asyncio.gather(*(ask(world, shard % ENGINES, FIRST) for shard in range(2 * ENGINES)))
        assert set(compiled.values()) == {1}
        assert len(compiled) == len({plan.program for plan in first}) == ENGINES
        assert all(len(plan.shares) == TRAINERS for plan in first), "rows come from all who have some of a column"
        await finish(world, number, FIRST)
        await publish(world, FIRST + 1)
        await begin(world, FIRST + 1)
        second = await asyncio.gather(*(ask(world, shard, FIRST + 1) for shard in range(ENGINES)))
        assert sum(compiled.values()) == ENGINES
        for before, after in zip(first, second, strict=False):
            assert after.why.startswith(f"as version {FIRST} was read: "), after.why
            assert {share.source: share.pieces for share in after.shares} == {
                share.source: share.pieces for share in before.shares
            }
            assert {share.root for share in after.shares} == {f"{FIRST + 1:032x}"}
