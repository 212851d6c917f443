"""A whole hub on three nodes of NATS and several registries, of which some are lost; `make cluster` has all blows."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.chaos.cluster import Cluster
from tests.chaos.content import MIB
from tests.integration.hubs import RunningHub, assert_same_bytes, running_cluster
from tests.stopping import stop

import tensorhub
from tensorhub.cli.doctor import hub_checks
from tensorhub_common.config.settings import load

BOUND_S = 4.0
SLACK_S = 20.0
BACK_S = 60.0

pytestmark = pytest.mark.slow


async def answered(call: Callable[[], Awaitable[object]], *, margin_s: float = 0.0) -> None:
    """Make a call that can't succeed: it ends in `RegistryUnavailable`, within its bound."""
    began = time.monotonic()
    with pytest.raises(tensorhub.RegistryUnavailable):
        await call()
    assert time.monotonic() - began < BOUND_S + margin_s + SLACK_S


@pytest.mark.timeout(150)
async def test_without_a_majority_calls_end_in_time_and_go_on_afterwards(tmp_path: Path) -> None:
    """What was published before stays; what could not be said is not said later behind the caller's back."""
    async with (
        running_cluster(tmp_path / "hub") as hub,
        hub.connected("job") as (here, there),
    ):
        trainer = await here.register("m", {"w": torch.ones(1000)}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros(1000)}, replica="reader")
        await trainer.publish(1)
        assert await reader.replicate() == 1
        for node in hub.file.nats_nodes[:2]:
            stop(node.pid)
        try:
            await answered(lambda: here.versions("m", timeout_s=BOUND_S), margin_s=0.0)
            await answered(lambda: here.retain("m", last=1, timeout_s=BOUND_S), margin_s=0.0)
            await answered(lambda: trainer.unpublish(timeout_s=BOUND_S))
            await answered(lambda: reader.update(timeout_s=BOUND_S))
            assert_same_bytes(reader.tensors, {"w": torch.ones(1000)})
        finally:
            for node in hub.file.nats_nodes[:2]:
                os.kill(node.pid, signal.SIGCONT)
        async with asyncio.timeout(BACK_S):
            await until_done(lambda: trainer.unpublish(timeout_s=BOUND_S))
            trainer.tensors["w"].fill_(2.0)
            await until_done(lambda: trainer.publish(2, timeout_s=BOUND_S))
            await until_done(lambda: reader.replicate(2, timeout_s=BOUND_S))
        assert_same_bytes(reader.tensors, {"w": torch.full((1000,), 2.0)})
        assert [each.version for each in await here.versions("m") if each.holders] == [2]


async def until_done(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call until it succeeds, or has: the caller bounds the time."""
    while True:
        with suppress(tensorhub.NotPublished):
            with suppress(tensorhub.RegistryUnavailable, tensorhub.ReplicaConflict, tensorhub.VersionUnavailable):
                await call()
                return
            await asyncio.sleep(0.1)
            continue
        return


@pytest.mark.timeout(150)
async def test_any_address_finds_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node of `hub.json` is gone for good, and the one that is named is no address of a node that lives."""
    async with running_cluster(tmp_path / "hub") as hub:
        file = hub.file
        stop(file.nats_nodes[0].pid)
        try:
            monkeypatch.setenv("TENSORHUB_DIR", str(tmp_path / "hub"))
            await registered(hub, "by-the-file", None)
            findings = {each.check: each async for each in hub_checks.hub(load(os.environ), "job", None)}
            assert findings["nats nodes"].level == "warn"
            assert file.nats_nodes[0].url in findings["nats nodes"].found
            assert findings["nats"].level == "ok"
            await registered(hub, "by-name", f"{file.nats_nodes[0].url},{file.nats_nodes[2].url}")
        finally:
            os.kill(file.nats_nodes[0].pid, signal.SIGCONT)


async def registered(hub: RunningHub, replica: str, nats: str | None) -> None:
    async with asyncio.timeout(BACK_S):
        while True:
            with suppress(tensorhub.RegistryUnavailable):
                async with await tensorhub.connect_async("job", agent=hub.file.agents[0].socket, nats=nats) as here:
                    await here.register("m", {"w": torch.ones(10)}, replica=replica)
                    names = {each.replica for each in await here.replicas("m")}
                    assert replica in names
                    return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(200)
async def test_the_leader_of_the_log_and_the_leading_registry_are_killed(tmp_path: Path) -> None:
    """Equal bytes, versions that only rise, one outcome for each command, an answer for each caller."""
    run = Cluster(tmp_path / "hub", ("leader", "registry", "registry-stopped"), MIB, stop_s=4.0)
    await run.go()
    assert not run.findings.wrongs, run.findings.wrongs
    assert len(run.struck) == 3
    assert run.findings.compared["commit"] > 3
