"""What a caller gets wrong is refused with one line that says what to do, and nothing changes.

Each refusal is compared with the registry's word before it and after it, and with the bytes in memory.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tests.bounds import BUSY_S, WAIT_S
from tests.integration.hubs import RunningHub, assert_same_bytes, catalog_of, new_job
from tests.integration.programs import command, fork_program

import tensorhub

pytestmark = pytest.mark.asyncio(loop_scope="session")


SETTLED_S = 60.0


class Scene:
    """A model with version 5 published by "trainer" and held by "reader"."""

    def __init__(self, job: str, here: tensorhub.AsyncHub, there: tensorhub.AsyncHub) -> None:
        self.job, self.here, self.there = job, here, there
        self.trainer: tensorhub.AsyncShard
        self.reader: tensorhub.AsyncShard


WEIGHTS = {"w": torch.arange(100.0), "b": torch.ones(3)}


@pytest_asyncio.fixture(loop_scope="session")
async def scene(hub: RunningHub) -> AsyncIterator[Scene]:
    job = new_job()
    async with hub.connected(job) as (here, there):
        scene = Scene(job, here, there)
        scene.trainer = await here.register("m", WEIGHTS, replica="trainer")
        scene.reader = await there.register("m", WEIGHTS, replica="reader")
        await scene.trainer.publish(5)
        await scene.reader.replicate()
        yield scene


@asynccontextmanager
async def refused(hub: RunningHub, scene: Scene, error: type[Exception], *words: str) -> AsyncIterator[None]:
    """Expect this error, in one line with these words, and the catalog and the memory to be as they were."""
    before = await catalog_of(hub, scene.job)
    with pytest.raises(error) as raised:
        yield
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    # A shard that its siblings refuse is released when the caller has heard of it already.
    async with asyncio.timeout(SETTLED_S):
        while await catalog_of(hub, scene.job) != before:
            pass
    assert_same_bytes(scene.trainer.tensors, WEIGHTS)
    assert_same_bytes(scene.reader.tensors, WEIGHTS)


async def assert_goes_on(scene: Scene) -> None:
    """The next version goes its way."""
    await scene.trainer.unpublish()
    assert await scene.trainer.publish() == 6
    assert await scene.reader.update() == 6


@pytest.mark.long
async def test_unknown_versions(hub: RunningHub, scene: Scene) -> None:
    fresh = await scene.there.register("unknown", WEIGHTS, replica="reader")
    for wish in ("latest", 3):
        async with refused(hub, scene, tensorhub.VersionUnavailable, "'unknown'", "has a trainer published"):
            await fresh.replicate(wish, timeout_s=0.3)
    async with refused(hub, scene, tensorhub.VersionUnavailable, "version 6", "'m'"):
        await scene.reader.replicate(6, timeout_s=0.3)
    async with refused(hub, scene, tensorhub.VersionUnavailable, "out of range"):
        await scene.reader.replicate(-1)
    async with refused(hub, scene, TypeError, "whole number or 'latest'"):
        await scene.reader.replicate("newest")
    assert await scene.here.versions("never-heard-of") == []
    await assert_goes_on(scene)


async def test_versions_that_are_not_newer(hub: RunningHub, scene: Scene) -> None:
    async with refused(hub, scene, tensorhub.VersionConflict, "unpublish 5 first"):
        await scene.trainer.publish(6)
    async with refused(hub, scene, tensorhub.VersionConflict, "out of range"):
        await scene.trainer.publish(2**53)
    other = await scene.there.register("m", {"w": torch.zeros(100), "b": torch.ones(3)}, replica="other")
    for version in (4, 0):
        async with refused(hub, scene, tensorhub.VersionConflict, "not newer than the last published one, 5", "6 or"):
            await other.publish(version)
    async with refused(hub, scene, tensorhub.VersionConflict, "with other bytes"):
        await other.publish(5)
    async with refused(hub, scene, tensorhub.NotPublished):
        await other.unpublish()
    await assert_goes_on(scene)


async def test_other_layouts(hub: RunningHub, scene: Scene) -> None:
    """A sibling that does not fit, another count of shards, and a reader with other tensors."""
    part = tensorhub.TensorSpec((50,), torch.float32, (100,), (0,))
    async with hub.connected(scene.job, agents=1) as (again,):
        half = await again.register("m", {"w": part}, replica="halves", shard=0, shards=2)
        clash = tensorhub.TensorSpec((50,), torch.float32, (101,), (50,))
        async with refused(hub, scene, tensorhub.LayoutMismatch, "'w'"):
            await scene.there.register("m", {"w": clash}, replica="halves", shard=1, shards=2)
        async with refused(hub, scene, tensorhub.LayoutMismatch, "shards=2"):
            await scene.there.register("m", {"w": part}, replica="halves", shard=1, shards=3)
        await half.release()
    bytes_before = {"w": torch.full((99,), 3.0), "b": torch.ones(3)}
    other = await scene.there.register("m", bytes_before, replica="other")
    async with refused(hub, scene, tensorhub.LayoutMismatch, "'w'"):
        await other.replicate()
    assert_same_bytes(other.tensors, bytes_before)
    await assert_goes_on(scene)


@pytest.mark.long
async def test_other_layout_of_a_shard_that_was_left(hub: RunningHub, scene: Scene) -> None:
    """A worker that comes back with other tensors does not get the memory, and the memory stays."""
    code = (
        "import sys, tensorhub, torch, os\n"
        "hub = tensorhub.connect(sys.argv[1], agent=sys.argv[2])\n"
        "hub.register('m', {'w': torch.ones(7)}, replica='left').publish(6)\n"
        "os._exit(0)\n"
    )
    assert await asyncio.to_thread(fork_program, hub, code, scene.job, hub.file.agents[0].socket) == (0, "", "")
    async with refused(hub, scene, tensorhub.LayoutMismatch, "'w'"):
        await scene.here.register("m", {"w": torch.ones(8)}, replica="left")
    back = await scene.here.register("m", {"w": torch.zeros(7)}, replica="left")
    assert back.version == 6
    assert_same_bytes(back.tensors, {"w": torch.ones(7)})


@pytest.mark.parametrize(("shard", "shards"), [(2, 2), (-1, 2), (0, 0), (0, 65_537)])
async def test_shards_out_of_range(hub: RunningHub, scene: Scene, shard: int, shards: int) -> None:
    async with refused(hub, scene, tensorhub.LayoutMismatch, "give"):
        await scene.here.register("m", WEIGHTS, replica="r", shard=shard, shards=shards)
    await assert_goes_on(scene)


async def test_one_shard_claimed_twice_in_one_process(hub: RunningHub, scene: Scene) -> None:
    async with refused(hub, scene, tensorhub.ReplicaConflict, "m/trainer"):
        await scene.here.register("m", WEIGHTS, replica="trainer")
    async with (
        hub.connected(scene.job, agents=1) as (again,),
        refused(hub, scene, tensorhub.ReplicaConflict, "m/trainer"),
    ):
        await again.register("m", WEIGHTS, replica="trainer")
    async with refused(hub, scene, tensorhub.ReplicaConflict, "m/trainer"):
        await scene.there.register("m", WEIGHTS, replica="trainer")
    await assert_goes_on(scene)


async def test_one_shard_claimed_by_two_processes(hub: RunningHub, scene: Scene) -> None:
    program = (
        "import sys, tensorhub, torch\n"
        "hub = tensorhub.connect(sys.argv[1], agent=sys.argv[2])\n"
        "try:\n"
        "    hub.register('m', {'w': torch.arange(100.0), 'b': torch.ones(3)}, replica='trainer')\n"
        "except tensorhub.ReplicaConflict as why:\n"
        "    print(why)\n"
    )
    before = await catalog_of(hub, scene.job)
    for agent in hub.file.agents:
        code, said, err = await asyncio.to_thread(fork_program, hub, program, scene.job, agent.socket)
        assert (code, err) == (0, "")
        assert len(said.splitlines()) == 1, said
        assert "m/trainer" in said
    assert await catalog_of(hub, scene.job) == before
    await assert_goes_on(scene)


NAMES = ["", "a b", "a.b", "*", ">", "_hub", "ä", "x" * 65, "a/b", "a\nb", 7, None]


@pytest.mark.parametrize("name", NAMES, ids=repr)
async def test_names_that_are_none(hub: RunningHub, scene: Scene, name: Any) -> None:
    async with refused(hub, scene, tensorhub.InvalidName):
        await scene.here.register(name, WEIGHTS, replica="r")
    async with refused(hub, scene, tensorhub.InvalidName):
        await scene.here.register("m", WEIGHTS, replica=name)
    async with refused(hub, scene, tensorhub.InvalidName):
        await scene.here.versions(name)
    if name is not None:
        async with refused(hub, scene, tensorhub.InvalidName):
            await tensorhub.connect_async(name, agent=hub.file.agents[0].socket)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
async def test_tensors_that_are_none(hub: RunningHub, scene: Scene) -> None:
    bad: list[tuple[str, Any]] = [
        ("'s'", {"s": torch.ones(3).to_sparse()}),
        ("'q'", {"q": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)}),
        ("''", {"": torch.ones(3)}),
        ("'t'", {"t": [1, 2, 3]}),
        ("strings", {7: torch.ones(3)}),
        ("mapping", [torch.ones(3)]),
    ]
    for word, given in bad:
        async with refused(hub, scene, tensorhub.LayoutMismatch, word):
            await scene.here.register("m", given, replica="r")
    await assert_goes_on(scene)


async def test_shards_that_want_different_things(hub: RunningHub, scene: Scene) -> None:
    """Two numbers in one round fail it for both shards at once, whether they publish or replicate."""
    both = [
        await each.register("n", {"w": torch.ones(4)}, replica="pair", shard=number, shards=2)
        for number, each in enumerate((scene.here, scene.there))
    ]
    await assert_both_conflict(both, lambda shard: shard.publish(shard.shard + 1))
    assert await asyncio.gather(*(shard.publish(3) for shard in both)) == [3, 3]
    pair = [
        await each.register("n", {"w": torch.zeros(4)}, replica="readers", shard=number, shards=2)
        for number, each in enumerate((scene.there, scene.here))
    ]
    await assert_both_conflict(pair, lambda shard: shard.replicate(shard.shard + 3))
    for shard in pair:
        assert_same_bytes(shard.tensors, {"w": torch.zeros(4)})
    assert list(await asyncio.gather(pair[0].replicate(3), pair[1].replicate())) == [3, 3]
    await assert_goes_on(scene)


async def assert_both_conflict(
    shards: list[tensorhub.AsyncShard], call: Callable[[tensorhub.AsyncShard], Awaitable[int]]
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcomes = await asyncio.gather(*(call(shard) for shard in shards), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [tensorhub.VersionConflict] * 2, outcomes
    assert loop.time() - began < BUSY_S
    assert [shard.version for shard in shards] == [None, None]


async def test_a_shard_that_never_comes(hub: RunningHub, scene: Scene) -> None:
    half = await scene.here.register("n", {"w": torch.ones(4)}, replica="pair", shard=0, shards=2)
    async with refused(hub, scene, tensorhub.RoundTimeout, "shards [1]"):
        await half.publish(timeout_s=0.3)
    async with refused(hub, scene, tensorhub.RoundTimeout, "shards [1]"):
        await half.replicate(timeout_s=0.3)
    await assert_goes_on(scene)


@pytest.mark.long
async def test_file_that_is_no_safetensors(hub: RunningHub, scene: Scene, tmp_path: Path) -> None:
    """The command line says in one line which file it can't read, and nothing is registered."""
    before = await catalog_of(hub, scene.job)
    bad = tmp_path / "weights.safetensors"
    for content in (b"", b"no weights", (2**40).to_bytes(8, "little") + b"{", b"\x02" + bytes(7) + b"{}x" * 9):
        bad.write_bytes(content)
        status, out, err = await command(hub, "publish", "m", "--job", scene.job, "--version", "6", bad)
        assert (status, out) == (1, ""), (content, status, out, err)
        assert len(err.splitlines()) == 1, err
        assert bad.name in err
    assert await catalog_of(hub, scene.job) == before
    status, out, err = await run_tensorhub(hub, scene, "versions", "m", "--json")
    assert (status, json.loads(out)["version"], err) == (0, 5, "")
    await assert_goes_on(scene)


async def run_tensorhub(hub: RunningHub, scene: Scene, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("tensorhub")),
        *arguments,
        "--job",
        scene.job,
        "--dir",
        str(hub.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
