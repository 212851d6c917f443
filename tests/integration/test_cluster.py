"""A whole hub on three nodes of NATS and several registries, of which some are lost; `make cluster` has all blows."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.chaos.cluster import Cluster
from tests.chaos.content import MIB
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.tensors import full, shown, write
from tests.kit.waiting import retried

import tensorhub
from tensorhub import AsyncShard, NotPublished, RegistryUnavailable, ReplicaConflict, VersionUnavailable
from tensorhub.cli.doctor import hub_checks
from tensorhub_common.config.settings import load

BOUND_S = 4.0
SLACK_S = 20.0
pytestmark = pytest.mark.slow


async def assert_refused_in_time(call: Callable[[], Awaitable[object]]) -> None:
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable):
        await call()
    assert time.monotonic() - began < BOUND_S + SLACK_S


async def until_done(call: Callable[[], Awaitable[object]]) -> None:
    async def done() -> None:
        try:
            await call()
        except NotPublished:
            return

    await retried(done, RegistryUnavailable, ReplicaConflict, VersionUnavailable, pause_s=0.1)


async def test_without_a_majority_calls_end_in_time_and_go_on_afterwards(tmp_path: Path) -> None:
    async with running_hub(tmp_path / "hub", registries=2, nats_nodes=3) as hub, hub.pair(full(1)) as it:
        await it.trainer.publish(1)
        assert await it.engine.replicate() == 1
        with hub.stopped("nats-0", "nats-1"):
            await assert_refused_in_time(lambda: it.here.versions("m", timeout_s=BOUND_S))
            await assert_refused_in_time(lambda: it.here.retain("m", last=1, timeout_s=BOUND_S))
            await assert_refused_in_time(lambda: it.trainer.unpublish(timeout_s=BOUND_S))
            await assert_refused_in_time(lambda: it.engine.update(timeout_s=BOUND_S))
            assert shown(it.engine) == {1.0}
        await until_done(lambda: it.trainer.unpublish(timeout_s=BOUND_S))
        write(it.trainer, full(2))
        await until_done(lambda: it.trainer.publish(2, timeout_s=BOUND_S))
        await until_done(lambda: it.engine.replicate(2, timeout_s=BOUND_S))
        assert shown(it.engine) == {2.0}
        assert [each.version for each in await it.here.versions("m") if each.holders] == [2]


async def test_any_address_finds_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node of `hub.json` is gone for good, and the one that is named is no address of a node that lives."""
    async with running_hub(tmp_path / "hub", registries=2, nats_nodes=3) as hub:
        urls = [node.url for node in hub.file.nats_nodes]
        with hub.stopped("nats-0"):
            monkeypatch.setenv("TENSORHUB_DIR", str(tmp_path / "hub"))
            await retried(lambda: register(hub, "by-the-file", None), RegistryUnavailable, pause_s=0.1)
            findings = {each.check: each async for each in hub_checks.hub(load(os.environ), "job", None)}
            assert findings["nats nodes"].level == "warn"
            assert urls[0] in findings["nats nodes"].found
            assert findings["nats"].level == "ok"
            await retried(lambda: register(hub, "by-name", f"{urls[0]},{urls[2]}"), RegistryUnavailable, pause_s=0.1)


async def register(hub: RunningHub, replica: str, nats: str | None) -> AsyncShard:
    async with await tensorhub.connect_async("job", agent=hub.file.agents[0].socket, nats=nats) as here:
        shard = await here.register("m", full(1), replica=replica)
        assert replica in {each.replica for each in await here.replicas("m")}
        return shard


async def test_the_leader_of_the_log_and_the_leading_registry_are_killed(tmp_path: Path) -> None:
    blows = ("leader", "registry", "registry-stopped")
    run = Cluster(directory=tmp_path / "hub", nbytes=MIB, blows=blows, stop_s=4.0)
    await run.go()
    assert not run.findings.wrongs, run.findings.wrongs
    assert len(run.struck_by) == len(blows)
    assert run.findings.compared["commit"] > len(blows)
