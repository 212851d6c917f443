"""A whole hub of real processes, which tests share by jobs, and what they do with it: connect, command, kill, look."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import nats
import pytest
import pytest_asyncio
import torch
from msgspec import structs
from nats.aio.client import Client
from tests.bounds import WAIT_S
from tests.kit import processes
from tests.kit.processes import Ended, Peer, Run, clean_environment, conversing, forked
from tests.kit.tensors import Tensors, write
from tests.kit.waiting import kill, stopped, until
from torch import nn

import tensorhub
from tensorhub import TensorSpec
from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub.arguments import Install
from tensorhub.local.hub import LocalHub, LocalRollouts, ServiceCommands
from tensorhub_common.auth.keys import public_key_of, read_seed
from tensorhub_common.auth.permissions import inbox_of
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.introspection.activity import gather_activity
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.activity import Activity
from tensorhub_common.protocol.queries import AgentInfo, ReplicaInfo
from tensorhub_common.protocol.subjects import commands_of

COMMAND: Final = """
import os, sys
from tensorhub_launcher import main
try:
    main()
except SystemExit as end:
    # To take apart an interpreter that has torch would take longest of all.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
"""

_jobs: Final = count()

Given = Tensors | Mapping[str, TensorSpec] | nn.Module
"""What may be registered."""


def new_job() -> str:
    return f"job-{os.getpid()}-{next(_jobs)}"


@dataclass(frozen=True)
class Pair:
    """A trainer at one agent and an engine at another, in a job of their own."""

    job: str
    here: tensorhub.AsyncHub
    there: tensorhub.AsyncHub
    trainer: tensorhub.AsyncShard
    engine: tensorhub.AsyncShard

    async def step(self, tensors: Tensors, version: int | None = None) -> int:
        """Take back what is published, write other values, and publish them."""
        async with self.trainer.overwriting(timeout_s=WAIT_S):
            write(self.trainer, tensors)
        return await self.trainer.publish(version)

    async def versions(self) -> dict[int, str]:
        return {each.version: each.state for each in await self.here.versions("m")}


class RunningHub:
    def __init__(self, up: LocalHub, directory: Path) -> None:
        self.up = up
        self.directory = directory

    @property
    def file(self) -> HubFile:
        """What hub.json says now."""
        return self.up.hub

    @property
    def admin_key(self) -> Path:
        """The key with which a test may say what no other process may."""
        return Path(self.file.credentials).with_name("admin.nk")

    @asynccontextmanager
    async def connected(self, job: str | None = None, agents: int = 2) -> AsyncIterator[list[tensorhub.AsyncHub]]:
        async with AsyncExitStack() as stack:
            name = job or new_job()
            yield [await stack.enter_async_context(await self.connect(name, at)) for at in range(agents)]

    @asynccontextmanager
    async def pair(
        self,
        tensors: Given,
        into: Given | None = None,
        *,
        job: str | None = None,
        installs: tuple[Install, Install] = ("in-place", "in-place"),
    ) -> AsyncIterator[Pair]:
        """Register a trainer with tensors and an engine with zeros or with `into`, both of model "m"."""
        name = job or new_job()
        async with self.connected(name) as (here, there):
            if into is None:
                assert isinstance(tensors, Mapping)
                into = {each: torch.zeros_like(tensor) for each, tensor in tensors.items()}  # type: ignore[arg-type]
            trainer = await here.register("m", tensors, replica="trainer", install=installs[0])
            engine = await there.register("m", into, replica="engine", install=installs[1])
            yield Pair(name, here, there, trainer, engine)

    async def connect(self, job: str, agent: int = 0) -> tensorhub.AsyncHub:
        socket = self.file.agents[agent].socket
        return await tensorhub.connect_async(job, agent=socket, nats=self.file.nats_all)

    async def bus(self, key: Path | None = None) -> Bus:
        return await connect(self.file.nats_all, name="test", credentials=key or Path(self.file.credentials))

    def registry(self, job: str, key: Path | None = None) -> RegistryClient:
        return RegistryClient(job, NatsAddress(self.file.nats_all, key or Path(self.file.credentials)))

    @asynccontextmanager
    async def raw_client(self) -> AsyncIterator[Client]:
        """Connect a NATS client that has nothing of ours about it."""
        key = self.admin_key
        prefix = inbox_of(public_key_of(read_seed(key), key))
        client = await nats.connect(self.file.nats, nkeys_seed=str(key), inbox_prefix=prefix)
        try:
            yield client
        finally:
            await client.close()

    # Processes.

    def pid(self, process: str) -> int:
        return self.file.pids[process]

    def kill(self, process: str) -> int:
        pid = self.pid(process)
        kill(pid)
        return pid

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        with stopped(*(self.pid(name) for name in names)):
            yield

    async def until_back(self, process: str, killed: int = 0) -> None:
        async with await self.bus() as bus:

            async def is_back() -> bool:
                pong = await ping(bus, process)
                return pong is not None and pong.pid != killed

            await until(is_back, f"{process} is back")

    def log(self, process: str) -> str:
        return (self.directory / "logs" / f"{process}.log").read_text(errors="replace")

    # Programs beside it.

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment of a program that knows of the hub no more than its directory."""
        return clean_environment(**{"TENSORHUB_DIR": str(self.directory), **more})

    async def run(self, program: str, *arguments: str, **more: str) -> Ended:
        """Run Python text to its end in a process that has imported torch and tensorhub already."""
        run = Run(forked(program, arguments, self.environment(**more)))
        return await asyncio.to_thread(run.ended)

    async def run_interpreter(self, program: str, *arguments: str, **more: str) -> Ended:
        """Run Python text to its end in an interpreter of its own."""
        return await asyncio.to_thread(processes.run_interpreter, program, arguments, self.environment(**more))

    async def command(self, *arguments: str | Path, **more: str) -> Ended:
        return await self.run(COMMAND, *map(str, arguments), **more)

    @asynccontextmanager
    async def program(self, text: str, *arguments: str, **more: str) -> AsyncIterator[Peer]:
        async with conversing("a program", forked(text, arguments, self.environment(**more))) as peer:
            yield peer

    @asynccontextmanager
    async def worker(self, job: str, agent: int = 0, **more: str) -> AsyncIterator[Peer]:
        """Start a worker process that is connected and takes orders (worker.py); it is killed at the end."""
        async with processes.worker(f"worker at agent-{agent}", self.environment(**more)) as peer:
            await peer.ask("connect", job, self.file.agents[agent].socket)
            yield peer

    # Looking.

    async def activity(self, job: str, process: str) -> Activity:
        async with await self.bus() as bus:
            found = await gather_activity(bus, job, [process])
        return next(each for each in found if each.process == process)

    async def agent_info(self, job: str, agent: str) -> AgentInfo:
        async with self.registry(job) as registry:
            return next(each for each in (await registry.status()).agents if each.agent == agent)

    async def until_said(self, job: str, verb: str, count: int = 1) -> None:
        async with (
            asyncio.timeout(WAIT_S),
            await self.bus() as bus,
            aclosing(JobLog(bus, job).follow(1, commands_of(job))) as entries,
        ):
            async for entry in entries:
                count -= f".cmd.{verb}." in entry.subject
                if not count:
                    return

    async def catalog(self, job: str) -> dict[str, Any]:
        async with self.registry(job) as registry:
            status = await registry.status()
            models = [model.model for model in status.models]
            return {
                "status": structs.replace(status, seq=0),
                "versions": {model: await registry.versions(model) for model in models},
                "replicas": {model: await registry.replicas(model) for model in models},
            }


@asynccontextmanager
async def running_hub(
    directory: Path,
    agents: int = 2,
    hosts: int = 1,
    *,
    registries: int = 1,
    nats_nodes: int = 1,
    agent: str = "",
    rollouts: LocalRollouts | None = None,
    commands: ServiceCommands | None = None,
    settings: Mapping[str, str] | None = None,
    **more: str,
) -> AsyncIterator[RunningHub]:
    """Bring a hub up in this directory, with these settings in its environment.

    `agent`: which unusual agent it runs (agents.py). `commands`: how services are run, where it is otherwise.
    """
    if agent:
        commands = ServiceCommands(agent=(sys.executable, "-m", "tests.kit.agents", agent))
    async with LocalHub(
        directory,
        agents=agents,
        hosts=hosts,
        registries=registries,
        nats_nodes=nats_nodes,
        rollouts=rollouts,
        commands=commands,
        environment={**os.environ, **(settings or {}), **more},
    ) as up:
        yield RunningHub(up, directory)


def module_hub(agents: int = 2, hosts: int = 1, *, over: Sequence[Any] = (), **settings: str) -> Any:
    """Return a fixture: a hub of a module's own, in its loop. `over`: on how many hosts, one after the other."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", params=over or (hosts,), ids=None if over else ("",))
    async def hub(
        tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> AsyncIterator[RunningHub]:
        async with running_hub(tmp_path_factory.mktemp("hub"), agents, request.param, settings=settings) as running:
            yield running

    return hub


async def copies_of(hub: tensorhub.AsyncHub, model: str, version: int | None = None) -> list[ReplicaInfo]:
    found = [each for each in await hub.replicas(model) if each.replica.startswith("_cache-")]
    return [each for each in found if version in (None, each.version)]
