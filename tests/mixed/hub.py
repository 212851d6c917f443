"""A hub whose processes run two releases, and the workers that use it.

`tensorhub up` of today keeps the processes running; each is killed and begun anew with the other release on demand.
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.kit.hubs import RunningHub
from tests.kit.processes import Peer, WorkerError, clean_environment, worker
from tests.kit.worker import digest, values

from tensorhub.local.hub import LocalHub, ServiceCommands
from tensorhub.local.keyring import Keyring

OLD: Final = "old"
NEW: Final = "new"
_KEYS: Final = """
import json, sys
from pathlib import Path
from tensorhub_common.access.keyring import Keyring
from tensorhub_common.access.permissions import Role, User
known = {role.value for role in Role}
Keyring(Path(sys.argv[1])).make([User(Role(role), name) for role, name in json.loads(sys.argv[2]) if role in known])
"""
"""A program of the older release, by its names. Roles that it does not know get no keys."""


class Wrong(Exception):
    """Something that should not be, in a sentence."""


@dataclass(slots=True)
class Tally:
    """What was done in a step, and how long the slowest call took."""

    publishes: int = 0
    reads: int = 0
    nbytes: int = 0
    slowest_s: float = 0.0


class Mixed(RunningHub):
    """The hub, and which release each of its processes runs."""

    def __init__(self, up: LocalHub, directory: Path, pythons: dict[str, str], first: str) -> None:
        super().__init__(up, directory)
        self.pythons = pythons
        self.runs = dict.fromkeys((*up._registries, "planner-0", *up._agents()), first)

    async def run_as(self, name: str, release: str, number: signal.Signals = signal.SIGKILL) -> None:
        child = self.up._by_name[name]
        module = f"tensorhub_{name.partition('-')[0]}"
        child.spec = dataclasses.replace(child.spec, command=_module(self.pythons[release], module))
        before = child.pid
        os.kill(before, number)
        try:
            await self.until_back(name, before)
        except AssertionError:
            raise Wrong(f"{name} ({release}) does not come back: {self.log(name)[-600:]}") from None
        self.runs[name] = release

    @asynccontextmanager
    async def worker_of(self, name: str, release: str, job: str, agent: str) -> AsyncIterator[Peer]:
        """Have a worker of this release on that agent."""
        environment = clean_environment(TENSORHUB_DIR=str(self.directory), OMP_NUM_THREADS="1")
        errors = self.directory / f"{name}.stderr"
        async with worker(f"{name} (SDK {release})", environment, self.pythons[release], errors) as peer:
            await peer.ask("connect", job, agent)
            yield peer


def _module(python: str, name: str) -> tuple[str, ...]:
    return (python, "-P", "-m", name)


@asynccontextmanager
async def mixed_hub(directory: Path, pythons: dict[str, str], first: str, users: str) -> AsyncIterator[Mixed]:
    """Bring up a hub of two hosts that runs one release. NATS goes by the permissions of `users` throughout."""
    names = ("tensorhub_registry", "tensorhub_planner", "tensorhub_agent")
    up = LocalHub(
        directory,
        agents=3,
        hosts=2,
        registries=2,
        commands=ServiceCommands(*(_module(pythons[first], name) for name in names)),
        environment=clean_environment(TENSORHUB_NEW_JOB_LEVEL="0", TENSORHUB_METRICS="0"),
    )
    if users == OLD:
        up._keys = _Keys(up._keys.folder, pythons[OLD])
    async with up:
        yield Mixed(up, directory, pythons, first)


class _Keys(Keyring):
    """A keyring whose file for NATS the older release has written: an upgrade may come before that of NATS."""

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder)
        self._python = python

    def make(self, users: Any, renewed: Any = ()) -> None:
        wanted = json.dumps([[str(user.role), user.name] for user in users])
        subprocess.run([self._python, "-P", "-c", _KEYS, str(self.folder), wanted], check=True)


class Traffic:
    """Trainers and engines of both releases: what is published is read in each way, and compared byte for byte."""

    def __init__(self, hub: Mixed, job: str) -> None:
        self.hub, self.job = hub, job
        self.version = 0
        self._workers: dict[str, Peer] = {}

    @asynccontextmanager
    async def begun(self) -> AsyncIterator["Traffic"]:
        """Start the workers. Of each model one release trains; the other reads it in place, and it itself staged."""
        async with AsyncExitStack() as stack:
            for release in (OLD, NEW):
                for role, agent in (("trainer", "agent-0"), ("engine", "agent-2"), ("far", "agent-1")):
                    name = f"{role}-{release}"
                    begun = self.hub.worker_of(name, release, self.job, agent)
                    self._workers[name] = await stack.enter_async_context(begun)
            for model, other in ((OLD, NEW), (NEW, OLD)):
                await self._workers[f"trainer-{model}"].ask("register", model, "trainer", "in-place", 0)
                await self._workers[f"engine-{other}"].ask("register", model, f"near-{model}", "in-place", 0)
                await self._workers[f"far-{model}"].ask("register", model, f"far-{model}", "staged", 0)
            yield self
            for each in self._workers.values():
                each.end_orders()
            await asyncio.gather(*(each.code() for each in self._workers.values()))

    async def step(self) -> Tally:
        tally = Tally()
        before, self.version = self.version, self.version + 1
        for model, other in ((OLD, NEW), (NEW, OLD)):
            if before:
                await self._passing(tally, f"far-{other}", model, "in-place", before)
                await self._timed(tally, f"trainer-{model}", "unpublish", "trainer")
            await self._timed(tally, f"trainer-{model}", "write", "trainer", self.version)
            await self._timed(tally, f"trainer-{model}", "publish", "trainer", self.version)
            tally.publishes += 1
            await self._read(tally, f"engine-{other}", f"near-{model}", self.version)
            await self._read(tally, f"far-{model}", f"far-{model}", self.version)
            await self._passing(tally, f"engine-{model}", model, "mapped", self.version)
        return tally

    async def _passing(self, tally: Tally, name: str, model: str, install: str, version: int) -> None:
        replica = f"{install}-{model}-{version}"
        await self._timed(tally, name, "register", model, replica, install, 0)
        await self._read(tally, name, replica, version)
        await self._timed(tally, name, "release", replica)

    async def _read(self, tally: Tally, name: str, replica: str, version: int) -> None:
        found, of = await self._timed(tally, name, "read", replica, version)
        wanted = values(version)
        if (found, of) != (version, digest(wanted)):
            raise Wrong(f"{name}: {replica} read version {found} with other bytes than version {version} has")
        tally.reads += 1
        tally.nbytes += sum(tensor.nbytes for tensor in wanted.values())

    async def _timed(self, tally: Tally, name: str, *order: Any) -> Any:
        began = time.monotonic()
        try:
            answer = await self._workers[name].ask(*order)
        except WorkerError as why:
            raise Wrong(str(why)) from None
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
        return answer
