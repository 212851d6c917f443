"""A part of the hub is stopped, killed or out of room: calls end with one line that says so; then work goes on."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from msgspec import structs
from tests.bounds import WAIT_S
from tests.kit.agents import FAULT, FAULTY_MODEL, UNOWNED_FAULT_MODEL
from tests.kit.hubs import RunningHub, module_hub, new_job, running_hub
from tests.kit.tensors import assert_same_bytes, full, shown
from tests.kit.waiting import retried, until, until_answer, wake
from tests.stopping import stop

import tensorhub
from tensorhub import (
    AgentUnavailable,
    RegistryUnavailable,
    RoundTimeout,
    TensorSpec,
    VersionUnavailable,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 1024 * 1024
SHORT_S = 0.3
SILENCE_S = 0.5
"""Shorter than the lease of the leading registry: it leads on afterwards."""

SOURCES_LOST_S = 0.5
LEFT = "on agent-0, was left because"


# Its log counts an agent however long it is stopped, its reads give sources up soon, and it has no caches.
hub = module_hub(
    TENSORHUB_LOST_AFTER_S="600",
    TENSORHUB_STALL_S="0.3",
    TENSORHUB_SOURCES_LOST_S=str(SOURCES_LOST_S),
    TENSORHUB_CACHE_BYTES="0",
    TENSORHUB_METRICS="0",
)


@contextlib.contextmanager
def one_line(error: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(error) as raised:
        yield
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


async def until_replicated(shard: tensorhub.AsyncShard) -> int:
    """Replicate once the shard is free again: a call that was given up goes on at the agent for a while."""
    errors = (tensorhub.ReplicaConflict, AgentUnavailable, VersionUnavailable)
    return await retried(lambda: shard.replicate(timeout_s=5), *errors, pause_s=0.05)


@pytest.mark.long
async def test_a_read_goes_on_while_the_log_counts_its_holder(hub: RunningHub) -> None:
    """It waits past every bound of a source, ends soon after the holder is back, and else at its own deadline."""
    async with hub.pair(full(1, 4096)) as it:
        assert await it.trainer.publish() == 1
        with hub.stopped("agent-0"):
            # On a busy machine it takes longer until a source is left.
            bound_s, refusal = 4.0, ""
            while LEFT not in refusal:
                with pytest.raises(RoundTimeout) as raised:
                    await it.engine.replicate(timeout_s=bound_s)
                refusal, bound_s = str(raised.value), 2 * bound_s
            assert await it.engine.update(timeout_s=bound_s / 2) is None
            assert it.engine.last_read is not None
            assert LEFT in it.engine.last_read.failure
            reading = asyncio.create_task(it.engine.replicate(timeout_s=WAIT_S))
            done, _ = await asyncio.wait({reading}, timeout=2.0)
            assert not done
        assert await reading == 1
        assert shown(it.engine) == {1.0}


@pytest.mark.long
async def test_a_read_ends_at_once_when_the_log_counts_no_holder(tmp_path: Path) -> None:
    """And later ones fail with the fact that it was published, and which holder of it is lost."""
    lost = r"version 1 of model 'm' was published, but its last holder is lost \(trainer on agent-0, lost \d+ s"
    async with (
        running_hub(tmp_path, TENSORHUB_STALL_S="0.3", TENSORHUB_LOST_AFTER_S="2") as hub,
        hub.pair(full(1)) as it,
    ):
        assert await it.trainer.publish() == 1
        with hub.stopped("agent-0"):
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(VersionUnavailable):
                    await it.engine.replicate(1, timeout_s=600)
            for version in (1, "latest"):
                with pytest.raises(VersionUnavailable, match=lost):
                    await it.engine.replicate(version, timeout_s=SHORT_S)
        # A release that the loss overtakes is to be repeated, so the end of this test waits until the agent is back.
        await until_answer(
            lambda: it.here.replicas("m"), lambda found: all(member.live for each in found for member in each.members)
        )


@pytest.mark.long
async def test_a_registration_that_was_given_up_is_taken_over_by_the_next(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is stopped, the worker gives up, the agent wakes and registers: that is no other worker."""
    monkeypatch.setattr("tensorhub_common.protocol.call_deadlines.END_S_MIN", SILENCE_S)
    async with hub.connected(agents=1) as (mine,):
        with hub.stopped("agent-0"), pytest.raises(AgentUnavailable, match="did not answer"):
            await mine.register("m", full(1), replica="trainer", timeout_s=SILENCE_S)
        await until(lambda: mine.replicas("m"), "the shard is in the log")
        shard = await registered(mine, 2)
        assert await shard.publish() == 1
        assert shown(shard) == {2.0}


async def registered(hub: tensorhub.AsyncHub, value: float) -> tensorhub.AsyncShard:
    return await retried(lambda: hub.register("m", full(value), replica="trainer"), tensorhub.ReplicaConflict)


@pytest.mark.long
async def test_a_release_that_was_given_up_touches_no_successor(hub: RunningHub) -> None:
    """It comes to its end at the agent, another worker brings the shard, and the first one asks once more."""
    job = new_job()
    async with hub.connected(job, 1) as (first,), hub.connected(job, 1) as (reads,), hub.connected(job, 1) as (second,):
        left = await first.register("m", full(1), replica="trainer")
        await left.publish()
        engine = await reads.register("m", full(0), replica="reader", install="mapped")
        assert await engine.replicate() == 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await left.release()
        await engine.release()
        del engine
        gc.collect()
        shard = await registered(second, 2)
        assert await shard.publish() == 2
        for call in (left.unpublish(), left.publish(3)):
            with pytest.raises(AgentUnavailable, match="is not this worker's: register it again"):
                await call
        await left.release()
        assert [each.version for each in await second.versions("m") if each.holders] == [2]
        await shard.unpublish()
        assert shown(shard) == {2.0}


@pytest.mark.long
async def test_a_read_that_its_only_source_left_half_filled_is_no_version(tmp_path: Path) -> None:
    """It is killed in the middle: what the memory has then can't become a version. It comes back after the read."""
    settings = {"HELD_DIR": str(tmp_path), "TENSORHUB_SOURCES_LOST_S": "0", "TENSORHUB_COPY_THREADS": "1"}
    async with running_hub(tmp_path / "hub", agent="held-copying", settings=settings) as hub:
        spec = {"w": TensorSpec((64 * MIB,), torch.uint8)}
        async with hub.pair(spec, spec) as it:

            async def phases() -> list[str]:
                reads = (await hub.activity(it.job, "agent-1")).reads
                return [source.phase for read in reads for source in read.sources]

            it.trainer.tensors["w"].random_(generator=torch.Generator().manual_seed(1))
            version = await it.trainer.publish()
            read = asyncio.create_task(it.engine.replicate(version))
            await until((tmp_path / "held").exists, "the read is held")
            assert await phases() == ["open"]
            hub.kill("agent-0")
            await until_answer(phases, lambda found: found != ["open"])
            (tmp_path / "go-on").touch()
            with pytest.raises(VersionUnavailable):
                await read
            (tmp_path / "may-return").touch()
            with one_line(tensorhub.NotFilled, "m/engine"):
                await it.engine.publish(version + 1)
            assert it.engine.version is None
            assert version + 1 not in await it.versions()
            assert await until_replicated(it.engine) == version
            assert_same_bytes(it.engine.tensors, it.trainer.tensors)


async def until_replicas_are(hub: tensorhub.AsyncHub, expected: dict[str, int | None]) -> None:
    async def counted() -> dict[str, int | None]:
        return {each.replica: each.version for each in await hub.replicas("m")}

    await until_answer(counted, lambda found: found == expected, f"the log counts {expected}")


@pytest.mark.long
async def test_a_release_happens_as_the_caller_was_told(hub: RunningHub) -> None:
    async with hub.connected(agents=1) as (mine,):
        shard = await mine.register("m", full(1), replica="trainer")
        await shard.publish()
        with (
            hub.stopped("registry-0"),
            pytest.raises(RegistryUnavailable, match="it goes as soon as the registry answers"),
        ):
            await shard.release(timeout_s=SHORT_S)
        await until_replicas_are(mine, {})
        await shard.release()
        again = await mine.register("m", full(2), replica="trainer")
        assert await again.publish() == 2
        assert shown(again) == {2.0}


@pytest.mark.long
async def test_what_the_log_counts_as_a_holder_is_read_again(hub: RunningHub) -> None:
    """The unpublish of a retained version's last copy is refused by the log, long after its caller has given up."""
    async with hub.pair(full(1)) as it:
        await it.trainer.publish()
        await it.here.retain("m", last=1)
        with (
            hub.stopped("registry-0"),
            pytest.raises(RegistryUnavailable, match="may be overwritten: don't, and call again"),
        ):
            await it.trainer.unpublish(timeout_s=SHORT_S)
        await until_replicas_are(it.here, {"trainer": 1, "engine": None})
        assert await it.engine.replicate(timeout_s=20) == 1
        assert shown(it.engine) == {1.0}
        await it.here.retain("m", last=0)


@pytest.mark.long
async def test_values_are_not_copied_over_a_publication_that_is_still_open(hub: RunningHub) -> None:
    """The worker dies in publish while the registry is silent. Its successor's values must not become version 1."""
    job, registry = new_job(), hub.pid("registry-0")
    async with hub.worker(job) as first:
        await first.ask("register_full", "m", "trainer", 1000, 1.0, {})
        stop(registry)
        try:
            first.say('["publish", "trainer", 1]')
            await hub.until_said(job, "ready")
            first.signal(signal.SIGKILL)
            await first.code()
            await hub.until_said(job, "withdraw")
        finally:
            asyncio.get_running_loop().call_later(SILENCE_S, wake, registry)
    async with hub.connected(job) as (mine, other):
        shard = await mine.register("m", full(2), replica="trainer")
        assert shard.version == 1, "the publication was in the log before it was withdrawn"
        assert shown(shard) == {1.0}
        reader = await other.register("m", full(0), replica="reader")
        assert await reader.replicate() == 1
        assert shown(reader) == {1.0}


@pytest.mark.long
async def test_stepping_without_overwriting_is_named_to_both(hub: RunningHub, caplog: pytest.LogCaptureFixture) -> None:
    async with hub.pair({"w": torch.ones(4096), "b": torch.ones(8)}) as it:
        await it.trainer.publish()
        it.trainer.tensors["w"].add_(1)
        with pytest.raises(tensorhub.IntegrityError, match="most likely its worker wrote to the tensors") as raised:
            await it.engine.replicate(timeout_s=WAIT_S)
        assert "trainer/0 on agent-0" in str(raised.value)
        assert "publish a new version there" in str(raised.value)
        await until(lambda: any(each.levelno == logging.ERROR for each in caplog.records))
        (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        assert "published tensors were overwritten" in line
        assert "(w)" in line
        async with it.trainer.overwriting(publish=True):
            it.trainer.tensors["w"].fill_(3)
        assert await it.engine.replicate(timeout_s=WAIT_S) == 2
        assert torch.equal(it.engine.tensors["w"], it.trainer.tensors["w"])
    assert "1 of the tensors of version 1 were overwritten" in hub.log("agent-0")


@pytest.mark.long
@pytest.mark.parametrize(
    "is_full", [False, pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount"))]
)
async def test_memory_that_is_all_taken(tmp_path: Path, *, is_full: bool) -> None:
    """There is room again after a release. A full /dev/shm is an error at register, and no SIGBUS later."""
    settings, shm = {"TENSORHUB_MEMORY_BYTES_MAX": "8MiB"}, tmp_path / "shm"
    if is_full:
        shm.mkdir()
        if await run("mount", "-t", "tmpfs", "-o", "size=8m", "tensorhub-test", str(shm)):
            pytest.skip("mounting is not allowed here")
        settings = {"TENSORHUB_SHM_DIR": str(shm), "TENSORHUB_MEMORY_BYTES_MAX": "1GiB"}
    five = {"w": torch.ones(5 * MIB, dtype=torch.uint8)}
    try:
        async with running_hub(tmp_path / "hub", 1, settings=settings) as hub, hub.connected("job", 1) as (here,):
            pid = hub.pid("agent-0")
            first = await here.register("m", five, replica="first")
            await first.publish(1)
            before = await hub.catalog("job")
            for given in (five, {"w": TensorSpec((2**50,), torch.uint8)}):
                with one_line(tensorhub.MemoryExhausted, "release"):
                    await here.register("m", given, replica="second")
            assert await hub.catalog("job") == before
            await assert_reported(hub, "no-memory", "", "" if is_full else "TENSORHUB_MEMORY_BYTES_MAX")
            assert_same_bytes(first.tensors, five)
            await first.release()
            # Tensors stay valid as long as they are referenced, and so does the memory that they are in.
            del first
            gc.collect()
            second = await here.register("m", five, replica="second")
            assert await second.publish(2) == 2
            assert hub.pid("agent-0") == pid
            assert (await hub.activity("well", "agent-0")).troubles == ()
    finally:
        assert not is_full or not await run("umount", "-l", str(shm))


async def run(*command: str) -> int:
    return await (await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)).wait()


@pytest_asyncio.fixture(loop_scope="module")
async def faulty(tmp_path: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path, agents=1, agent="faulty") as running:
        yield running


async def assert_reported(hub: RunningHub, kind: str, job: str, why: str) -> None:
    """Look at the agent's activity, and at what `status` and `doctor` print; the job asked about is another one."""
    (trouble,) = (await hub.activity("well", "agent-0")).troubles
    _, written, _ = await hub.command("status", "--json", "--job", "well")
    (process,) = [each for each in json.loads(written)["processes"] if each["process"] == "agent-0"]
    (reported,) = process["troubles"]
    for found in (structs.asdict(trouble), reported):
        assert (found["kind"], found["job"], why in found["why"]) == (kind, job, True)
    _, text, _ = await hub.command("status", "--job", "well")
    assert all(each in " ".join(text.split()) for each in ("! agent-0", kind, "->", why))
    code, findings, _ = await hub.command("doctor", "--quick", "--json", "--job", "well")
    (finding,) = [each for each in map(json.loads, findings.splitlines()) if kind in each["found"]]
    assert (code, why in finding["found"], finding["check"]) == (1, True, "activity")
    assert finding["advice"]


@pytest.mark.long
async def test_a_fault_in_one_job_sets_that_job_aside(faulty: RunningHub) -> None:
    """The others go on without noticing; once they have nothing here the agent starts anew, with the memory of all."""
    agent = faulty.pid("agent-0")
    async with faulty.connected("well", 1) as (well,), faulty.connected("ill", 1) as (ill,):
        trainer = await well.register("m", full(1), replica="trainer")
        engine = await well.register("m", full(0), replica="engine")
        await trainer.publish(1)
        kept = await ill.register("m", full(7), replica="trainer")
        await kept.publish(7)
        broken = await ill.register(FAULTY_MODEL, full(1), replica="trainer")
        with pytest.raises(AgentUnavailable, match=rf"has set job 'ill' aside.*{FAULT}"):
            await broken.publish(1)
        assert await engine.replicate(1) == 1
        await trainer.unpublish()
        assert await trainer.publish(2) == 2
        assert await engine.update() == 2
        with pytest.raises(AgentUnavailable, match="set job 'ill' aside"):
            await faulty.connect("ill")
        assert (await faulty.activity("well", "agent-0")).faults == 1
        await assert_reported(faulty, "job-set-aside", "ill", FAULT)
        assert faulty.pid("agent-0") == agent
        await engine.release()
        await trainer.release()
        await until(lambda: faulty.pid("agent-0") != agent, "the agent is started anew")
        await kept.unpublish(timeout_s=WAIT_S)
        assert shown(kept) == {7.0}
        assert await kept.publish(8) == 8
    assert (await faulty.activity("well", "agent-0")).troubles == ()


@pytest.mark.long
async def test_a_fault_that_no_job_owns_ends_the_agent_which_is_started_anew(
    faulty: RunningHub, caplog: pytest.LogCaptureFixture
) -> None:
    """With code 1 and one line that says what was wrong. The worker's call is done by the next process."""
    agent = faulty.pid("agent-0")
    async with faulty.connected("well", 1) as (well,):
        trainer = await well.register(UNOWNED_FAULT_MODEL, full(1), replica="trainer")
        assert await trainer.publish(1, timeout_s=WAIT_S) == 1
        await until(lambda: faulty.pid("agent-0") != agent, "the agent is started anew")
        await trainer.unpublish(timeout_s=WAIT_S)
    ended = next(each for each in caplog.messages if each.startswith(f"agent-0 ({agent})"))
    assert "ended with exit code 1" in ended
    (last,) = [line for line in faulty.log("agent-0").splitlines() if line.startswith("tensorhub-agent:")]
    assert f"a part: its work failed: ArithmeticError('{FAULT}')" in last
