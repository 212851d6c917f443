"""A worker that comes back with values of its own, against a real hub: nothing of the two is dropped silently."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full, shown

from tensorhub import AsyncHub, AsyncShard, DrainTimeout, ReplicaConflict
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")

README = """
import sys, tensorhub, torch
hub = tensorhub.connect(sys.argv[1])
hub.register("policy", {"w": torch.full((4, 4), float(sys.argv[2]))}, replica="trainer").publish(version=1)
engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
print(engine.replicate("latest"), engine.tensors["w"])
"""


@pytest.fixture
async def job(hub: RunningHub) -> AsyncIterator[str]:
    """A job whose shards are all released at the end."""
    name = new_job()
    yield name
    async with hub.connected(name, agents=1) as (here,):
        await here.delete_job()


async def test_the_lines_of_the_readme_run_twice_with_other_values(hub: RunningHub, job: str) -> None:
    """The second run must not print the first one's weights as if they were its own."""
    code, out, err = await hub.run(README, job, "1")
    assert (code, out.split()[0]) == (0, "1"), err
    code, out, err = await hub.run(README, job, "2")
    assert (code, out) == (1, "")
    assert err.strip().endswith(
        "tensorhub.ReplicaConflict: shard 0 of policy/trainer was found with version 1, and register was given other "
        "values for 'w': register it with resume='memory' to go on from version 1, or with resume='values' to replace "
        "it by the given values"
    )
    code, out, err = await hub.run(README, job, "1")
    assert code == 0, err


async def put(hub: RunningHub, job: str, value: float, **options: object) -> tuple[AsyncHub, AsyncShard]:
    connected = await hub.connect(job)
    return connected, await connected.register("m", full(value), replica="trainer", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("install", ["in-place", "staged"])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["alone", "mapped"])
async def test_a_restarted_trainers_checkpoint_becomes_the_next_version(
    hub: RunningHub, job: str, install: Install, *, is_mapped: bool
) -> None:
    """What a mapped reader shows is not overwritten: one memory waits for it, and with two it goes on beside."""
    first, shard = await put(hub, job, 1, install=install)
    await shard.publish()
    async with hub.connected(job) as (here, there):
        reader = await here.register("m", full(0), replica="reader", install="mapped" if is_mapped else "in-place")
        await reader.replicate()
        await first.close(release=False)
        if is_mapped and install == "in-place":
            for _ in range(2):
                async with hub.connected(job, agents=1) as (again,):
                    with pytest.raises(DrainTimeout):
                        await again.register("m", full(2), replica="trainer", resume="values", timeout_s=0.5)
                assert shown(reader) == {1.0}
            await reader.release()
            reader.tensors.clear()
        second, shard = await put(hub, job, 2, install=install, resume="values")
        assert (shard.version, shown(shard)) == (None, {2.0})
        assert await shard.publish() == 2
        engine = await there.register("m", full(0), replica="engine")
        assert await engine.replicate() == 2
        assert shown(engine) == {2.0}
        if is_mapped and install == "staged":
            assert shown(reader) == {1.0}
            await reader.update()
            assert shown(reader) == {2.0}
            await reader.release()
            reader.tensors.clear()
    await second.close()


async def test_an_engine_that_comes_back_reads_on(hub: RunningHub, job: str) -> None:
    """Its own values are whatever it was built with; it need not choose before it reads."""
    first, shard = await put(hub, job, 1)
    await shard.publish()
    for _ in range(2):
        async with hub.connected(job) as (_, there):
            engine = await there.register("m", {"w": torch.rand(1000)}, replica="engine")
            if engine.version is not None:
                with pytest.raises(ReplicaConflict, match="resume='memory'"):
                    await engine.unpublish()
            assert await engine.replicate() == 1
            assert shown(engine) == {1.0}
            await there.close(release=False)
    await first.close()


async def test_a_replica_reports_what_all_of_its_shards_lack(
    hub: RunningHub, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may want no more; but a name that was forgotten must not go unnoticed.

    Each stage leaves out what the other one has; that is no mistake, and "head" is.
    """
    given = {name: torch.ones(4) for name in ("a", "b", "head", *"cdefghijk")}
    async with hub.connected(job) as (here, there):

        async def engine(replica: str, *parts: str) -> list[AsyncShard]:
            return [
                await at.register(
                    "m", {name: torch.zeros(4) for name in names.split()}, replica=replica, shard=n, shards=len(parts)
                )
                for n, (at, names) in enumerate(zip((there, here), parts, strict=False))
            ]

        trainer = await here.register("m", given, replica="trainer")
        # No two have a layout in common, or a shard could take its pieces from another replica, and report nothing.
        rest = " ".join("cdefghijk")
        readers = {
            "all": await engine("all", " ".join(given)),
            "whole": await engine("whole", "a b", f"head {rest}"),
            "holed": await engine("holed", f"a {rest}", "b"),
            "few": await engine("few", "head"),
        }
        for _ in range(2):
            await trainer.publish()
            await asyncio.gather(*(shard.replicate() for shards in readers.values() for shard in shards))
            found = {
                replica: [(read.unregistered, read.unregistered_count) for shard in shards if (read := shard.last_read)]
                for replica, shards in readers.items()
            }
            few = (("a", "b", *"cdefgh"), 11)
            assert found == {
                "all": [((), 0)],
                "whole": [((), 0)] * 2,
                "holed": [(("head",), 1), ((), 0)],
                "few": [few],
            }
            unread = [(read.unread, read.unread_count) for shard in readers["few"] if (read := shard.last_read)]
            assert unread == [few]
            await trainer.unpublish()
    lines = [str(each.msg) for each in caplog.records if "that no shard of the replica registered" in str(each.msg)]
    assert len(lines) == 2
    (holed,) = [line for line in lines if "shard 0 of m/holed" in line]
    (few_line,) = [line for line in lines if "m/few" in line]
    assert "'head'" in holed
    assert "'a', 'b', 'c' and 8 more" in few_line
