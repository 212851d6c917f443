"""From any sharding to any other, by real processes, over both transports: the published bytes, or one error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import pytest
import pytest_asyncio
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.shardings import Sharding, assert_holds, columns, layers, mesh, model, published, registered, rows, whole
from tests.kit.transports import UCXX, UCXX_AND_LONG_LOCAL, hub_over

from tensorhub import AsyncShard, LayoutMismatch, VersionUnavailable
from tensorhub.arguments import INSTALLS
from tensorhub.specs import DTYPES
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS

pytestmark = pytest.mark.asyncio(loop_scope="session")
Model = dict[str, torch.Tensor]
Readers = list[tuple[Sharding, int]]

MORE: Final = DEFAULT_LIMITS.transports_max + 16
"""More sources than may have a transport at a time."""


hub = hub_over(UCXX_AND_LONG_LOCAL)


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


def short_model(seed: int) -> Model:
    """Return fewer tensors than pipeline stages, and rows for one of four ranks."""
    return {"w": torch.full((1, 4), float(seed)), "bb": torch.tensor(2.0)}


def bytes_model(shards: int, seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        "up": torch.randint(0, 256, (2 * shards, 258), generator=generator, dtype=torch.uint8),
        "down": torch.randn(shards, 34, generator=generator).to(torch.bfloat16),
    }


async def replicated(shards: list[AsyncShard], version: int) -> None:
    found = await asyncio.gather(*(shard.replicate(version, timeout_s=WAIT_S) for shard in shards))
    assert set(found) == {version}


async def unpublished(shards: list[AsyncShard]) -> None:
    await asyncio.gather(*(shard.unpublish() for shard in shards))


ALL: Final[Readers] = [(columns, 2), (whole, 1), (rows, 3), (mesh, 4), (layers, 2)]
EVERY_DTYPE: Final[Readers] = [(columns, 2), (whole, 2), (layers, 2)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("how", "shards", "make", "readers"),
    [
        *((how, shards, model, ALL) for how, shards in ((rows, 4), (columns, 3), (mesh, 4), (layers, 3), (whole, 2))),
        pytest.param(rows, 4, odd_model, EVERY_DTYPE, id="every-dtype", marks=pytest.mark.long),
        pytest.param(rows, 4, short_model, [(layers, 4), (columns, 3)], id="shards-without-a-byte"),
    ],
)
async def test_any_sharding_is_read_as_any_other(
    hub: RunningHub, how: Sharding, shards: int, make: Callable[[int], Model], readers: Readers
) -> None:
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", how, shards, make(0))
        # Every other one fills its memory beside.
        engines = [
            (await registered(hubs, f"{as_.__name__}-{n}", as_, n, make(0), INSTALLS[n % 2]), as_) for as_, n in readers
        ]
        for version in (1, 2):
            assert await published(trainer, how, make(version)) == version
            await replicated([shard for some, _ in engines for shard in some], version)
            for engine, as_ in engines:
                assert_holds(engine, as_, make(version))
            await unpublished(trainer)
        # What was read resharded is a source.
        late = await registered(hubs, "late", mesh, 4, make(0))
        await replicated(late, 2)
        assert_holds(late, mesh, make(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
async def test_a_reader_of_another_dtype_gets_what_torch_makes_of_it(hub: RunningHub, dtype: torch.dtype) -> None:
    """float32 is published; readers of two shardings hold each element as `.to()` has it, bit for bit."""
    whole_model = {name: tensor for name, tensor in model(7).items() if tensor.dtype is torch.float32}
    cast = {name: tensor.to(dtype) for name, tensor in whole_model.items()}
    async with hub.connected() as hubs:
        trainer = await registered(hubs, "trainer", rows, 3, whole_model)
        readers = {how: await registered(hubs, how.__name__, how, 2, cast) for how in (columns, rows)}
        assert await published(trainer, rows, whole_model) == 1
        await replicated([shard for some in readers.values() for shard in some], 1)
        for how, shards in readers.items():
            assert_holds(shards, how, cast)
        if dtype is torch.bfloat16:
            await asyncio.gather(*(shard.release() for shard in trainer))
            half = {name: tensor.to(torch.float16) for name, tensor in whole_model.items()}
            [reader] = await registered(hubs, "reader", whole, 1, half)
            with pytest.raises(LayoutMismatch, match="is float16 of global shape"):
                await reader.replicate(1, timeout_s=5)


@pytest.mark.long
async def test_more_sources_than_may_be_open_at_a_time_fill_a_reader(hub: RunningHub) -> None:
    """Each of its shards needs a part of each source; then the trainer takes its version back at once."""
    async with hub.connected() as (first, second):
        trainer = await registered([first], "trainer", rows, MORE, bytes_model(MORE, 0))
        engine = await registered([second], "engine", columns, 2, bytes_model(MORE, 0))
        for version in (1, 2):
            assert await published(trainer, rows, bytes_model(MORE, version)) == version
            await replicated(engine, version)
            reports = [shard.last_read for shard in engine]
            assert [sum(source.nbytes > 0 for source in each.sources) for each in reports if each] == [MORE, MORE]
            assert_holds(engine, columns, bytes_model(MORE, version))
            await unpublished(trainer)


async def test_all_shards_get_one_error_where_nothing_is_published_yet(hub: RunningHub) -> None:
    """Both end at the same bound: the second is not said to have waited for the first, which had left by then."""
    async with hub.connected() as hubs:
        reader = await registered(hubs, "reader", columns, 2, {"w": torch.ones(8, 6)})
        failed = await asyncio.gather(*(s.replicate("latest", timeout_s=1) for s in reader), return_exceptions=True)
        assert [type(error) for error in failed] == [VersionUnavailable] * 2, failed
        assert {str(error) for error in failed} == {
            "no version of model 'm' was to be had within the bound: has a trainer published one?"
        }


REPLICAS: Final = 3


@dataclass(frozen=True)
class TwoSites:
    hub: RunningHub
    near: list[int]
    far: list[int]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(2, id="local", marks=pytest.mark.slow),
        pytest.param(2 + REPLICAS, id="ucxx", marks=UCXX.marks),
    ],
)
async def two_sites(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[TwoSites]:
    """With two hosts all agents that are far share one; else each has a host of its own."""
    hosts = int(request.param)
    near_hosts = 1 if hosts == 2 else 2
    agents = 2 * REPLICAS if hosts == 2 else 2 + REPLICAS
    directory = tmp_path_factory.mktemp("hub")
    async with running_hub(directory, agents, hosts, agent="two-sites", NEAR_HOSTS=str(near_hosts)) as hub:
        near = [number for number in range(agents) if number % hosts < near_hosts]
        yield TwoSites(hub, near, [number for number in range(agents) if number not in near])


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("cut", "how", "shards"), [(rows, whole, 1), (rows, columns, 2), (columns, whole, 1)])
async def test_a_site_of_another_layout_takes_each_byte_about_once(
    two_sites: TwoSites, cut: Sharding, how: Sharding, shards: int
) -> None:
    """Each replica has read from its site peers, and together not much more than once from the trainer."""
    hub, near, far, job = two_sites.hub, two_sites.near, two_sites.far, new_job()
    async with hub.connected(job, len(hub.file.agents)) as hubs:
        trainer = await registered([hubs[number] for number in near[:2]], "trainer", cut, 2, model(0))
        readers = [await registered([hubs[far[n]]], f"engine-{n}", how, shards, model(0)) for n in range(REPLICAS)]
        waiting = [
            asyncio.create_task(shard.update(wait_s=WAIT_S, timeout_s=WAIT_S)) for each in readers for shard in each
        ]
        await hub.until_said(job, "want", len(waiting))
        assert await published(trainer, cut, model(1)) == 1
        assert set(await asyncio.gather(*waiting)) == {1}
        for each in readers:
            assert_holds(each, how, model(1))
        crossed = [sum(_bytes_of(shard, "trainer") for shard in each) for each in readers]
        nbytes = sum(tensor.nbytes for tensor in model(1).values())
        assert sum(crossed) < 1.5 * nbytes, f"{crossed} of {nbytes} bytes"
        for each in readers:
            assert all(_bytes_of(shard, "engine") > 0 for shard in each)


def _bytes_of(shard: AsyncShard, replica: str) -> int:
    assert shard.last_read is not None
    return sum(source.nbytes for source in shard.last_read.sources if source.replica.startswith(replica))
