"""A hub whose processes run two releases, and the workers that use it.

`tensorhub up` of today keeps the processes running; each is killed and begun anew with the other release as told.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.mixed.actor import digest, values

from tensorhub.local.hub import LocalHub
from tensorhub.local.keyring import Keyring
from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection.ping import ping

OLD: Final = "old"
NEW: Final = "new"
ACTOR: Final = str(Path(__file__).with_name("actor.py"))
BEGIN_S: Final = 60.0
ANSWER_S: Final = 60.0
END_S: Final = 15.0
LOOK_S: Final = 0.05
_KEYS: Final = """
import json, sys
from pathlib import Path
from tensorhub_common.access.keyring import Keyring
from tensorhub_common.access.permissions import Role, User
Keyring(Path(sys.argv[1])).make([User(Role(role), name) for role, name in json.loads(sys.argv[2])])
"""
"""A program of the older release, by its names."""


class Wrong(Exception):
    """Something that should not be, in a sentence."""


class Actor:
    """A worker: one process of one release."""

    def __init__(self, name: str, release: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.release = name, release
        self.ended = False
        self._process = process

    async def told(self, *order: Any) -> Any:
        """Give an order, and return what came of it. Raises `Wrong` for an error."""
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(order) + "\n").encode())
        answer, error = await self._line(order)
        if error is not None:
            raise Wrong(f"{self.name} (SDK {self.release}), {' '.join(map(str, order))}: {error}")
        return answer

    async def begun(self) -> None:
        await self._line(("begin",))

    async def _line(self, order: tuple[Any, ...]) -> Any:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Wrong(f"{self.name} (SDK {self.release}) said nothing of {order} for {ANSWER_S:g} s") from None
        if not line:
            raise Wrong(f"{self.name} (SDK {self.release}) ended at {order}")
        return json.loads(line)

    async def end(self) -> None:
        """Let it end, within a bound."""
        self.ended = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@dataclass(slots=True)
class Tally:
    """What was done in a step, and how long the slowest call took."""

    publishes: int = 0
    reads: int = 0
    nbytes: int = 0
    slowest_s: float = 0.0


@dataclass(slots=True)
class Mixed:
    """The hub, and which release each of its processes runs."""

    up: LocalHub
    directory: Path
    pythons: dict[str, str]
    runs: dict[str, str] = field(default_factory=dict)

    async def run_as(self, name: str, release: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process, and return once it runs this release and says that it serves."""
        child = self.up._by_name[name]
        module = f"tensorhub_{name.partition('-')[0]}"
        child.spec = dataclasses.replace(child.spec, command=(self.pythons[release], "-P", "-m", module))
        before = child.pid
        os.kill(before, number)
        deadline = time.monotonic() + BEGIN_S
        keys = Keyring(self.directory / "credentials")
        async with await connect(self.up.hub.nats, name="mixed", credentials=keys.folder / "client.nk") as bus:
            while time.monotonic() < deadline:
                pong = await ping(bus, name, LOOK_S * 4) if child.pid != before else None
                if pong is not None and pong.pid == child.pid:
                    self.runs[name] = release
                    return
                await asyncio.sleep(LOOK_S)
        raise Wrong(f"{name} ({release}) does not say within {BEGIN_S:g} s that it serves: {self.log_of(name)[-600:]}")

    def log_of(self, name: str) -> str:
        """Return what a process has written."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    @asynccontextmanager
    async def actor(self, name: str, release: str, job: str, agent: str) -> AsyncIterator[Actor]:
        """Have a worker of this release on that agent."""
        own = {key: text for key, text in os.environ.items() if not key.startswith("TENSORHUB_")}
        with (self.directory / f"{name}.stderr").open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                self.pythons[release],
                "-P",
                ACTOR,
                env={**own, "TENSORHUB_DIR": str(self.directory), "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        actor = Actor(name, release, process)
        try:
            await actor.begun()
            await actor.told("connect", job, agent)
            yield actor
        finally:
            if not actor.ended:
                await actor.end()


@asynccontextmanager
async def mixed_hub(directory: Path, pythons: dict[str, str], first: str) -> AsyncIterator[Mixed]:
    """Bring up a hub of two hosts that runs one release. NATS goes by the older release's permissions throughout."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("TENSORHUB_")}
    up = LocalHub(
        directory,
        agents=3,
        hosts=2,
        registries=2,
        environment={**environment, "TENSORHUB_NEW_JOB_LEVEL": "0", "TENSORHUB_METRICS": "0"},
    )
    hub = Mixed(up, directory, pythons)
    up._commands = _commands(pythons[first])
    up._keys = _Keys(up._keys.folder, pythons[OLD])
    async with up:
        hub.runs = dict.fromkeys((*up._registries, "planner-0", *up._agents()), first)
        yield hub


def _commands(python: str) -> Any:
    from tensorhub.local.hub import ServiceCommands  # noqa: PLC0415 (beside its use)

    def module(name: str) -> tuple[str, ...]:
        return (python, "-P", "-m", name)

    return ServiceCommands(module("tensorhub_registry"), module("tensorhub_planner"), module("tensorhub_agent"))


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
        self._actors: dict[str, Actor] = {}

    @asynccontextmanager
    async def begun(self) -> AsyncIterator["Traffic"]:
        """Start the workers. Of each model one release trains; the other reads it in place, and it itself staged."""
        async with AsyncExitStack() as stack:
            for release in (OLD, NEW):
                for role, agent in (("trainer", "agent-0"), ("engine", "agent-2"), ("far", "agent-1")):
                    name = f"{role}-{release}"
                    self._actors[name] = await stack.enter_async_context(self.hub.actor(name, release, self.job, agent))
            for model, other in ((OLD, NEW), (NEW, OLD)):
                await self._actors[f"trainer-{model}"].told("register", model, "trainer", "in-place", 0)
                await self._actors[f"engine-{other}"].told("register", model, f"near-{model}", "in-place", 0)
                await self._actors[f"far-{model}"].told("register", model, f"far-{model}", "staged", 0)
            try:
                yield self
            finally:
                await asyncio.gather(*(actor.end() for actor in self._actors.values()))

    async def step(self) -> Tally:
        """Read what is there with a new replica, publish the next version, and read it in every way."""
        tally = Tally()
        before, self.version = self.version, self.version + 1
        for model, other in ((OLD, NEW), (NEW, OLD)):
            if before:
                await self._passing(tally, f"far-{other}", model, "in-place", before)
            trainer = self._actors[f"trainer-{model}"]
            if before:
                await self._timed(tally, trainer, "unpublish", "trainer")
            await trainer.told("write", "trainer", self.version)
            await self._timed(tally, trainer, "publish", "trainer", self.version)
            tally.publishes += 1
            await self._read(tally, f"engine-{other}", f"near-{model}", self.version)
            await self._read(tally, f"far-{model}", f"far-{model}", self.version)
            await self._passing(tally, f"engine-{model}", model, "mapped", self.version)
        return tally

    async def _passing(self, tally: Tally, name: str, model: str, install: str, version: int) -> None:
        """Read with a replica that comes and goes."""
        actor, replica = self._actors[name], f"{install}-{model}-{version}"
        await self._timed(tally, actor, "register", model, replica, install, 0)
        await self._read(tally, name, replica, version)
        await self._timed(tally, actor, "release", replica)

    async def _read(self, tally: Tally, name: str, replica: str, version: int) -> None:
        found, of = await self._timed(tally, self._actors[name], "read", replica, version)
        wanted = values(version)
        if (found, of) != (version, digest(wanted)):
            raise Wrong(f"{name}: {replica} read version {found} with other bytes than version {version} has")
        tally.reads += 1
        tally.nbytes += sum(tensor.nbytes for tensor in wanted.values())

    async def _timed(self, tally: Tally, actor: Actor, *order: Any) -> Any:
        began = time.monotonic()
        answer = await actor.told(*order)
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
        return answer
