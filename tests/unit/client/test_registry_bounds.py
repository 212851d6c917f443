"""A bound holds for all that one call asks the registry, however late the first answer comes."""

import asyncio
from typing import Any

import pytest

from tensorhub import AsyncHub
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub_common.protocol.log.commands import Command, Retain

LATE_S = 0.05
BOUND_S = 60.0


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the job be opened late, and note the bounds of what is asked then."""
    noted: list[float] = []

    async def late(*_: object) -> None:
        await asyncio.sleep(LATE_S)

    async def note(_: object, __: str | Command, timeout_s: float) -> tuple[Any, ...]:
        noted.append(timeout_s)
        return ()

    monkeypatch.setattr(RegistryClient, "open_job", late)
    monkeypatch.setattr(RegistryClient, "status", late)
    for name in ("versions", "replicas", "_say"):
        monkeypatch.setattr(RegistryClient, name, note)
    return noted


async def test_a_ruling_has_what_the_opening_of_its_job_has_left(bounds: list[float]) -> None:
    registry = RegistryClient("run-7", NatsAddress("nats://127.0.0.1:1"))
    await registry.rule(Retain(model="policy", last=1), BOUND_S)
    await registry.delete_job(BOUND_S)
    assert [0 < bound <= BOUND_S - LATE_S / 2 for bound in bounds] == [True, True]


async def test_so_has_a_question(hub: AsyncHub, bounds: list[float]) -> None:
    await hub.versions("policy", timeout_s=BOUND_S)
    hub._job_is_open = False
    await hub.replicas("policy", timeout_s=BOUND_S)
    await hub.versions("policy", timeout_s=BOUND_S)
    assert [0 < bound <= BOUND_S - LATE_S / 2 for bound in bounds] == [True, True, False]
