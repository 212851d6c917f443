"""Resharding where things are odd or go wrong: the bytes that were published, or one error that says what lacks."""

import asyncio
import re

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.cuts import (
    Sharding,
    assert_holds,
    columns,
    layers,
    mesh,
    published,
    registered,
    rows,
    specs,
    whole,
)
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import fork_program
from tests.integration.transports import HUB_OF, UCXX_AND_AT_LENGTH_LOCAL

from tensorhub import AsyncShard, TensorSpec
from tensorhub.specs import DTYPES
from tensorhub_common.errors import LayoutMismatch, RoundTimeout, VersionUnavailable
from tensorhub_common.programs.regions import DIMS_MAX

pytestmark = pytest.mark.asyncio(loop_scope="session")

Model = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=UCXX_AND_AT_LENGTH_LOCAL)
def hub(request: pytest.FixtureRequest) -> RunningHub:
    hub: RunningHub = request.getfixturevalue(HUB_OF[request.param])
    return hub


def odd_model(seed: int) -> Model:
    """Return a tensor of every dtype there is, some of one element, and none."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, itemsize in DTYPES.items():
        high = 2 if name == "bool" else 256
        raw = torch.randint(0, high, (7, 5 * itemsize), generator=generator, dtype=torch.uint8)
        tensors[f"{name}.matrix"] = raw.view(getattr(torch, name))
        tensors[f"{name}.scalar"] = raw[0, :itemsize].clone().view(getattr(torch, name)).reshape(())
        tensors[f"{name}.empty"] = torch.empty(3, 0, dtype=getattr(torch, name))
    return tensors


async def replicated(readers: list[AsyncShard], version: int) -> None:
    assert set(await asyncio.gather(*(shard.replicate(version) for shard in readers))) == {version}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_every_dtype(hub: RunningHub) -> None:
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, odd_model(0))
        readers = {how: await registered(hubs, how.__name__, how, 2, odd_model(0)) for how in (columns, whole, layers)}
        for version in (1, 2):
            assert await published(trainer, rows, odd_model(version)) == version
            for how, shards in readers.items():
                await replicated(shards, version)
                assert_holds(shards, how, odd_model(version))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


@pytest.mark.slow
async def test_thousands_of_tiny_tensors(hub: RunningHub) -> None:
    tensors = {f"layers.{number}.w": torch.full((3, 4), float(number)) for number in range(4000)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, tensors)
        engine = await registered(hubs, "engine", columns, 2, tensors)
        assert await published(trainer, rows, tensors) == 1
        await replicated(engine, 1)
        assert_holds(engine, columns, tensors)


async def test_shards_without_a_tensor_or_a_byte(hub: RunningHub) -> None:
    """More pipeline stages than tensors, and rows for one of four ranks."""
    tensors = {"w": torch.ones(1, 4), "bb": torch.tensor(2.0)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, tensors)
        stages = await registered(hubs, "stages", layers, 4, tensors)
        assert await published(trainer, rows, tensors) == 1
        await replicated(stages, 1)
        assert_holds(stages, layers, tensors)
        readers = await registered(hubs, "reader", columns, 3, tensors)
        await replicated(readers, 1)
        assert_holds(readers, columns, tensors)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_an_engine_publishes_and_the_trainer_reads(hub: RunningHub) -> None:
    """The other way round, and once more: what was read resharded is a source, and may be published on from."""
    async with hub.connected() as hubs:
        tensors = odd_model(1)
        engine = await registered(hubs, "engine", columns, 2, tensors)
        assert await published(engine, columns, tensors) == 1
        trainer = await registered(hubs, "trainer", rows, 4, tensors)
        await replicated(trainer, 1)
        assert_holds(trainer, rows, tensors)
        await asyncio.gather(*(shard.release() for shard in engine))
        late = await registered(hubs, "late", mesh, 4, tensors)
        await replicated(late, 1)
        assert_holds(late, mesh, tensors)
        await asyncio.gather(*(shard.unpublish() for shard in trainer))
        assert await published(trainer, rows, odd_model(2)) == 2
        await replicated(late, 2)
        assert_holds(late, mesh, odd_model(2))


@pytest.mark.parametrize("how", [rows, columns])
async def test_a_staged_engine_shows_the_old_version_until_all_is_there(hub: RunningHub, how: Sharding) -> None:
    tensors = {"w": torch.arange(999.0 * 8).view(999, 8)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, tensors)
        engine = [
            await hubs[1].register(
                "m", specs(tensors, how, shard, 2), replica="engine", shard=shard, shards=2, install="staged"
            )
            for shard in range(2)
        ]
        for version in (1, 2, 3):
            values = {"w": tensors["w"] + version}
            assert await published(trainer, rows, values) == version
            await replicated(engine, version)
            assert_holds(engine, how, values)
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


async def test_a_mapped_engine_of_another_sharding_is_told_so(hub: RunningHub) -> None:
    tensors = {"w": torch.ones(8, 8)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, tensors)
        engine = await hubs[0].register("m", tensors, replica="engine", install="mapped")
        assert await published(trainer, rows, tensors) == 1
        with pytest.raises(VersionUnavailable, match="trainer/0 on agent-0 has another layout"):
            await engine.replicate(1, timeout_s=5)


async def test_a_gap_is_named_with_its_tensor_and_region(hub: RunningHub) -> None:
    tensors = {"a": torch.ones(8, 6), "w": torch.ones(8, 6)}
    holed = specs(tensors, rows, 1, 2)
    holed["w"] = TensorSpec((3, 6), torch.float32, global_shape=(8, 6), offset=(5, 0))
    async with hub.connected() as hubs:
        trainer = [
            await hubs[0].register("m", specs(tensors, rows, 0, 2), replica="trainer", shard=0, shards=2),
            await hubs[1].register("m", holed, replica="trainer", shard=1, shards=2),
        ]
        for shard in trainer:
            shard.mark_loaded()
        assert set(await asyncio.gather(*(shard.publish() for shard in trainer))) == {1}
        reader = await registered(hubs, "reader", columns, 2, tensors)
        failed = await asyncio.gather(*(shard.replicate(1, timeout_s=10) for shard in reader), return_exceptions=True)
        for error in failed:
            assert isinstance(error, LayoutMismatch), failed
            assert re.search(r"no holder has \[4:5, [03]:[36]\] of 'w'", str(error))
        # What lies beside the gap can be read by who wants no more.
        beside = await hubs[0].register(
            "m", {"a": tensors["a"], "w": TensorSpec((4, 6), "float32", (8, 6), (0, 0))}, replica="beside"
        )
        assert await beside.replicate(1) == 1


async def test_a_shard_that_never_came_is_named(hub: RunningHub) -> None:
    tensors = {"w": torch.ones(8, 6)}
    async with hub.connected() as hubs:
        trainer = [
            await hubs[0].register("m", specs(tensors, rows, shard, 4), replica="trainer", shard=shard, shards=4)
            for shard in range(3)
        ]
        for shard in trainer:
            shard.mark_loaded()
        failed = await asyncio.gather(*(shard.publish(timeout_s=1) for shard in trainer), return_exceptions=True)
        assert [type(error) for error in failed] == [RoundTimeout] * 3, failed
        assert all("shards [3] did not publish" in str(error) for error in failed), failed


async def test_a_read_that_runs_out_of_time_names_its_shard_once(hub: RunningHub) -> None:
    """The bound ends in mid-read, or before it began; a later call with more time ends with the bytes."""
    tensors = {"w": torch.arange(64.0 * 2**20 / 4).view(4096, 4096)}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 2, tensors)
        assert await published(trainer, rows, tensors) == 1
        reader = await registered(hubs, "reader", columns, 1, tensors)
        with pytest.raises((RoundTimeout, VersionUnavailable)) as raised:
            await reader[0].replicate(1, timeout_s=0.005)
        assert str(raised.value).count("shard 0") <= 1, raised.value
        await replicated(reader, 1)
        assert_holds(reader, columns, tensors)


async def test_all_shards_are_told_alike_that_nothing_is_published_yet(hub: RunningHub) -> None:
    """Both end at the same bound: the second is not told that it waited for the first, which had left by then."""
    tensors = {"w": torch.ones(8, 6)}
    async with hub.connected() as hubs:
        reader = await registered(hubs, "reader", columns, 2, tensors)
        failed = await asyncio.gather(*(s.replicate("latest", timeout_s=1) for s in reader), return_exceptions=True)
        assert [type(error) for error in failed] == [VersionUnavailable] * 2, failed
        assert {str(error) for error in failed} == {
            "no version of model 'm' was to be had within the bound: has a trainer published one?"
        }


GONE = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import torch, tensorhub
from tests.integration.cuts import rows, specs

hub = tensorhub.connect(sys.argv[1])
tensors = {"w": torch.arange(96.0).view(12, 8)}
shards = [hub.register("m", specs(tensors, rows, n, 4), replica="trainer", shard=n, shards=4) for n in range(4)]
for n, shard in enumerate(shards):
    shard.tensors["w"].copy_(tensors["w"][3 * n : 3 * n + 3])
with ThreadPoolExecutor(4) as threads:
    assert list(threads.map(lambda shard: shard.publish(1), shards)) == [1] * 4
os._exit(0)
"""


@pytest.mark.long
async def test_a_trainer_comes_back_with_other_ranks(hub: RunningHub) -> None:
    """Its old shards can't become the new ones, and it is told what to do; readers have both versions."""
    tensors, job = {"w": torch.arange(96.0).view(12, 8)}, new_job()
    code, _, said = await asyncio.to_thread(fork_program, hub, GONE, job)
    assert code == 0, said
    async with hub.connected(job) as hubs:
        with pytest.raises(LayoutMismatch, match="give the same, or take another replica name"):
            await registered(hubs[:1], "trainer", rows, 3, tensors)
        trainer = await registered(hubs, "trainer-of-3", rows, 3, tensors)
        assert await published(trainer, rows, {"w": tensors["w"] + 1}) == 2
        reader = await registered(hubs, "reader", columns, 2, tensors)
        for version in (1, 2):
            await replicated(reader, version)
            assert_holds(reader, columns, {"w": tensors["w"] + version - 1})
        old = await registered(hubs[:1], "trainer", rows, 4, tensors)
        assert [shard.version for shard in old] == [1] * 4
        for shard in old:
            await shard.release()
        assert "trainer" not in {replica.replica for replica in await hubs[0].replicas("m")}
        await registered(hubs[:1], "trainer", rows, 3, tensors)


async def test_readers_of_two_shardings_while_the_trainer_publishes_on(hub: RunningHub) -> None:
    """Whatever version a reader is given, it is that one in every byte, and never an older one than it had.

    It may be that one again, where the newer one went after the reader's memory began to be overwritten.
    """
    versions = 12

    def values(version: int) -> Model:
        return {"w": torch.full((1001, 513), float(version)), "b": torch.full((77,), version, dtype=torch.int64)}

    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 4, values(0))
        cuttings: list[Sharding] = [columns, whole]
        readers = {how: await registered(hubs, how.__name__, how, 2, values(0)) for how in cuttings}

        async def publish() -> None:
            for version in range(1, versions + 1):
                assert await published(trainer, rows, values(version)) == version
                if version < versions:
                    await asyncio.gather(*(shard.unpublish() for shard in trainer))

        async def follow(how: Sharding) -> None:
            held = 0
            while held < versions:
                got = await asyncio.gather(*(shard.update(wait_s=20) for shard in readers[how]), return_exceptions=True)
                if all(isinstance(one, VersionUnavailable) for one in got):
                    continue
                version = got[0]
                assert isinstance(version, int), got
                assert got == [version, version]
                assert version >= held
                assert_holds(readers[how], how, values(version))
                held = version

        async with asyncio.timeout(WAIT_S):
            publishing = asyncio.create_task(publish())
            await asyncio.gather(*(follow(how) for how in readers))
            await publishing


async def test_unpublished_in_the_middle(hub: RunningHub) -> None:
    """The reader has the version or says that it has not; the trainer may overwrite from then on."""
    tensors = {"w": torch.full((4096, 2048), 1.0)}
    ends = set()
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 2, tensors)
        reader = await registered(hubs, "reader", columns, 2, tensors)
        for version, delay in enumerate((0, 1, 4, 16, 64, 256), 1):
            values = {"w": torch.full((4096, 2048), float(version))}
            assert await published(trainer, rows, values) == version
            reading = [asyncio.create_task(shard.replicate(version, timeout_s=20)) for shard in reader]
            for _ in range(delay):
                await asyncio.sleep(0)
            await asyncio.gather(*(shard.unpublish() for shard in trainer))
            for shard in trainer:
                shard.tensors["w"].fill_(-1.0)
            got = await asyncio.gather(*reading, return_exceptions=True)
            if got == [version, version]:
                assert_holds(reader, columns, values)
                ends.add("read")
            else:
                assert all(isinstance(one, VersionUnavailable) for one in got), got
                ends.add("said no")
    assert ends <= {"read", "said no"}


async def test_boxes_of_more_dimensions_than_can_be_carried(hub: RunningHub) -> None:
    """The tensor is named at once, and nothing waits for the call's bound."""
    rank = DIMS_MAX + 1
    async with hub.connected() as hubs:
        trainer = await hubs[0].register("m", {"deep": TensorSpec((3,) * rank, "uint8")}, replica="trainer")
        trainer.mark_loaded()
        assert await trainer.publish() == 1
        corner = {"deep": TensorSpec((2,) * rank, "uint8", (3,) * rank, (1,) * rank)}
        reader = await hubs[1].register("m", corner, replica="reader")
        with pytest.raises(LayoutMismatch, match=f"'deep' lies in boxes of {rank} dimensions"):
            await reader.replicate(1)
