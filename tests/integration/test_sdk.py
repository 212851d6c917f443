"""The SDK against a real hub: what its interface promises, in one process and in several."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.processes import Run, clean_environment, executed
from tests.kit.tensors import WEIGHTS_BYTES, assert_same_bytes, full, shown, weights
from tests.kit.transports import BOTH, hub_over

import tensorhub
from tensorhub import AsyncHub, AsyncShard, DrainTimeout
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="session")
two_hosts = hub_over(BOTH)


@pytest.mark.long
async def test_versions_in_a_row_and_a_reader_that_passes_one_on(two_hosts: RunningHub) -> None:
    """Each version arrives as itself, numbers may be left out, and what is held is fetched once."""
    async with two_hosts.pair(weights(0)) as it:
        assert it.engine.version is None
        for version in (1, 2, 3, 10, 11, 400):
            assert await it.step(weights(version), version) == version
            assert await it.trainer.publish(version) == version, "it is published already"
            assert await (it.engine.replicate() if version == 1 else it.engine.update()) == version
            assert {it.trainer.version, it.engine.version} == {version}
            assert_same_bytes(it.engine.tensors, weights(version))
            assert await it.engine.update() is None
        assert it.engine.last_read is not None
        assert it.engine.last_read.nbytes == WEIGHTS_BYTES
        await it.trainer.unpublish()
        assert repr(it.trainer) == "<m/trainer shard 0 of 1, version None>"
        it.trainer.tensors["a"].zero_()
        assert_same_bytes(it.engine.tensors, weights(400))
        assert await it.versions() == {**dict.fromkeys((1, 2, 3, 10, 11), "unavailable"), 400: "available"}
        assert (await it.here.versions("m"))[-1].holders == ("engine",)
        await it.trainer.release()
        third = await it.here.register("m", weights(99), replica="third")
        assert await third.replicate(400) == 400
        assert_same_bytes(third.tensors, weights(400))
        await it.engine.release()
        assert [each.replica for each in await it.here.replicas("m")] == ["third"]


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_shard_names_the_root_of_what_it_holds_also_in_the_process_that_comes_next(
    hub: RunningHub, install: Install
) -> None:
    async with hub.pair(full(1), installs=("in-place", install)) as it:
        assert it.engine.root == ""
        await it.trainer.publish()
        roots = []
        for value in (2, 3):
            await it.engine.update()
            assert it.engine.last_read is not None
            assert it.engine.root == it.engine.last_read.root
            roots.append(it.engine.root)
            await it.step(full(value))
        assert len({*roots, ""}) == 3
        await it.there.close(release=False)
        async with await hub.connect(it.job, 1) as again:
            engine = await again.register("m", full(0), replica="engine", install=install, resume="memory")
            assert (engine.version, engine.root) == (2, roots[1])


async def test_update_waits_for_something_newer(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        await it.trainer.publish()
        await it.engine.replicate()
        waiting = asyncio.create_task(it.engine.update(wait_s=30, timeout_s=30))
        assert await it.step(full(3)) == 2
        assert await waiting == 2
        assert shown(it.engine) == {3.0}
        assert await it.engine.update(wait_s=0.2) is None


async def first(hub: AsyncHub, count: int, after: int | None = None) -> list[tensorhub.Watched]:
    events: list[tensorhub.Watched] = []
    async with asyncio.timeout(WAIT_S):
        async for event in hub.watch("m", after=after):
            events.append(event)
            if len(events) == count:
                return events
    raise AssertionError


async def test_questions_may_be_the_first_thing_that_is_asked(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        assert await here.versions("m") == []
    async with hub.connected() as (here, there):
        watching = asyncio.create_task(first(there, 1))
        await (await here.register("m", full(1), replica="trainer")).publish()
        assert [each.version for each in await watching] == [1]


async def test_watch_ends_with_its_hub(hub: RunningHub) -> None:
    async with hub.connected(agents=1) as (here,):
        watching = asyncio.create_task(first(here, 1))
        await asyncio.sleep(0)
        await here.close()
        with pytest.raises(tensorhub.AgentUnavailable, match="closed"):
            await watching


@pytest.mark.long
@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_worker_that_was_killed_finds_its_memory(hub: RunningHub, install: Install) -> None:
    """A trainer what it published. A staged engine what was swapped in: after one swap that is its second segment."""
    async with hub.pair(full(5, 9)) as it:
        await it.trainer.publish(3)
        async with hub.worker(it.job) as first_life:
            await first_life.ask("register_full", "m", "worker", 9, 0.0, {"install": install})
            assert await first_life.ask("replicate", "worker") == 3
            first_life.say('["die"]')
            assert await first_life.code() == -signal.SIGKILL
        worker = await it.here.register("m", full(0, 9), replica="worker", install=install)
        assert (worker.version, shown(worker)) == (3, {5.0})
        assert await it.step(full(6, 9)) == 4
        assert await worker.update() == 4
        assert shown(worker) == {6.0}


async def test_one_shard_has_one_worker(hub: RunningHub) -> None:
    """Another connection, another agent and another process are each refused, and nothing is taken from the first."""
    async with hub.pair(full(1)) as it, hub.connected(it.job, agents=1) as (again,):
        await it.trainer.publish(5)
        before = await hub.catalog(it.job)
        for other in (it.here, again, it.there):
            with pytest.raises(tensorhub.ReplicaConflict, match="m/trainer"):
                await other.register("m", full(1), replica="trainer")
        for agent in (0, 1):
            async with hub.worker(it.job, agent) as other_process:
                with pytest.raises(Exception, match=r"ReplicaConflict: [^\n]*m/trainer[^\n]*$"):
                    await other_process.ask("register_full", "m", "trainer", 1000, 1.0, {})
        assert await hub.catalog(it.job) == before
        assert await it.step(full(2)) == 6


README = """
import sys, tensorhub, torch
hub = tensorhub.connect(sys.argv[1])
hub.register("policy", {"w": torch.full((4, 4), float(sys.argv[2]))}, replica="trainer").publish(version=1)
engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
print(engine.replicate("latest"), engine.tensors["w"])
"""


@pytest.fixture
async def job(hub: RunningHub) -> AsyncIterator[str]:
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
    assert "tensorhub.ReplicaConflict: shard 0 of policy/trainer was found with version 1" in err
    assert "resume='memory'" in err
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


async def test_a_replica_reports_what_all_of_its_shards_lack(
    hub: RunningHub, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may want no more; but a name that was forgotten must not go unnoticed."""
    parts = {"whole": ("a b", "head c"), "holed": ("a c", "b")}
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", {name: torch.ones(4) for name in ("a", "b", "head", "c")}, replica="trainer")
        readers = {
            replica: [
                await at.register(
                    "m", {name: torch.zeros(4) for name in names.split()}, replica=replica, shard=n, shards=2
                )
                for n, (at, names) in enumerate(zip((there, here), cut, strict=True))
            ]
            for replica, cut in parts.items()
        }
        for _ in range(2):
            await trainer.publish()
            await asyncio.gather(*(shard.replicate() for shards in readers.values() for shard in shards))
            found = {
                replica: [(read.unregistered, read.unregistered_count) for shard in shards if (read := shard.last_read)]
                for replica, shards in readers.items()
            }
            assert found == {"whole": [((), 0)] * 2, "holed": [(("head",), 1), ((), 0)]}
            await trainer.unpublish()
    [line] = [str(each.msg) for each in caplog.records if "that no shard of the replica registered" in str(each.msg)]
    assert "shard 0 of m/holed" in line
    assert "'head'" in line


EXAMPLE = Path(__file__).parents[2] / "examples" / "no_sdk_trainer.py"


async def run_example(hub: RunningHub, job: str, *arguments: str) -> tuple[int, list[str]]:
    command = (sys.executable, str(EXAMPLE), hub.file.nats, hub.file.credentials, job, *arguments)
    code, out, err = await asyncio.to_thread(Run(executed(command, clean_environment())).ended)
    return code, [line.strip() for line in (out + err).splitlines()]


async def test_a_version_is_published(hub: RunningHub) -> None:
    """The agent gates the memory, digests it and says ready; then readers get it like any other version."""
    async with hub.pair(full(7)) as it:
        status, lines = await run_example(hub, it.job, "m", "trainer", "7")
        assert lines[0].endswith("asked for its outcome: publish.wished")
        assert (status, lines[1:]) == (0, ["inbox: publish.wished", "event: version.published 7"])
        assert await it.engine.replicate() == it.trainer.version == 7
        assert shown(it.engine) == {7.0}
        await it.engine.release()
        await it.trainer.unpublish()
        status, lines = await run_example(hub, it.job, "m", "trainer", "7")
        assert (status, lines[-1]) == (0, "event: version.available 7")
        await it.trainer.unpublish()


async def test_every_agent_with_a_shard_of_the_replica_takes_part(hub: RunningHub) -> None:
    job = new_job()
    async with hub.connected(job) as both:
        for number, each in enumerate(both):
            await each.register("m", full(1, 5), replica="trainer", shard=number, shards=2)
        status, lines = await run_example(hub, job, "m", "trainer", "1")
        assert (status, lines[-1]) == (0, "event: version.published 1")
