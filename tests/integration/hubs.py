"""A whole hub of real processes for the tests of a module, and connections of this process to its agents."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

import nats
import torch
from msgspec import structs
from nats.aio.client import Client
from tests.bounds import WAIT_S
from tests.integration.agent_held import HELD_DIR, HOLD

import tensorhub
from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub.local.hub import LocalHub, ServiceCommands
from tensorhub_common.auth.keys import public_key_of, read_seed
from tensorhub_common.auth.permissions import inbox_of

_jobs: Final = count()


class RunningHub:
    """A hub that is up. Each test takes a job of its own on it."""

    def __init__(self, up: LocalHub, directory: Path) -> None:
        self.up = up
        self.directory = directory

    @property
    def file(self) -> HubFile:
        return self.up.hub

    @asynccontextmanager
    async def connected(self, job: str | None = None, agents: int = 2) -> AsyncIterator[list[tensorhub.AsyncHub]]:
        """Connect to the first agents; all is released at the end."""
        name = job or new_job()
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    await tensorhub.connect_async(name, agent=agent.socket, nats=self.file.nats_all)
                )
                for agent in self.file.agents[:agents]
            ]


@asynccontextmanager
async def running_hub(
    directory: Path, agents: int = 2, hosts: int = 1, **environment: str
) -> AsyncIterator[RunningHub]:
    """Bring a hub up in this directory."""
    async with LocalHub(directory, agents=agents, hosts=hosts, environment={**os.environ, **environment}) as up:
        yield RunningHub(up, directory)


@asynccontextmanager
async def held_hub(directory: Path, hold: str, hosts: int = 1, **environment: str) -> AsyncIterator[RunningHub]:
    """Bring a hub up whose agents are held in the middle of a read (agent_held.py), with their files in `directory`."""
    commands = ServiceCommands(agent=(sys.executable, "-m", "tests.integration.agent_held"))
    told = {**os.environ, HOLD: hold, HELD_DIR: str(directory), **environment}
    async with LocalHub(directory / "hub", agents=2, hosts=hosts, commands=commands, environment=told) as up:
        yield RunningHub(up, directory)


async def until_held(directory: Path) -> None:
    """Wait until the read is held."""
    async with asyncio.timeout(WAIT_S):
        while not (directory / "held").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_cluster(directory: Path, registries: int = 2) -> AsyncIterator[RunningHub]:
    """Bring a hub up on three nodes of NATS."""
    async with LocalHub(directory, agents=2, registries=registries, nats_nodes=3) as up:
        yield RunningHub(up, directory)


def admin_key(hub: HubFile) -> Path:
    """Return the key with which a test may say what nobody else may."""
    return Path(hub.credentials).with_name("admin.nk")


async def raw_client(hub: HubFile) -> Client:
    """Return a NATS client that has nothing of ours about it."""
    key = admin_key(hub)
    prefix = inbox_of(public_key_of(read_seed(key), key))
    return await nats.connect(hub.nats, nkeys_seed=str(key), inbox_prefix=prefix)


def new_job() -> str:
    """Return a job name that no other test of this run uses."""
    return f"job-{next(_jobs)}"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def assert_same_bytes(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and every byte: NaNs are equal to themselves, and -0.0 is not 0.0."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(raw(found[name]), raw(tensor)), f"{name} differs"


async def catalog_of(hub: RunningHub, job: str) -> dict[str, object]:
    """Return all that the registry says of a job, but for how long its log is."""
    async with RegistryClient(job, NatsAddress(hub.file.nats, Path(hub.file.credentials))) as registry:
        status = await registry.status()
        models = [model.model for model in status.models]
        return {
            "status": structs.replace(status, seq=0),
            "versions": {model: await registry.versions(model) for model in models},
            "replicas": {model: await registry.replicas(model) for model in models},
        }
