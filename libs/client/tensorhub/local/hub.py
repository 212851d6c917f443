"""Brings up a whole hub on one machine and keeps it up: NATS, registries, a planner and agents.

Each process logs in to NATS with a key of its own, made at the first start in this directory, and may say there what
its role says and no more; workers and commands have the key that `hub.json` names.

Always true: `hub.json` exists only while every process has answered that it is ready, and names the processes
that run now; at the end of this process, also by a signal, none of the others is left.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tensorhub._control import hub_file
from tensorhub._control.hub_file import AgentEntry, HubFile, NatsEntry, ProcessEntry, RegistryEntry, RunnerEntry
from tensorhub._control.registry_client import NatsAddress
from tensorhub.local.children import Child, Children, ChildSpec
from tensorhub.local.directory import HubDirectory
from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub.local.launcher import follow, runner_names
from tensorhub.local.nats_server import ANY_PORT, LISTEN, Cluster, NatsServer
from tensorhub.local.process_settings import Place, login, of_agent, of_runner, without_nats
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.config import settings
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.ping import ping
from tensorhub_common.runtime.supervision import Fault, OnFault, Supervisor

AGENTS_MAX: Final = 256
REGISTRIES_MAX: Final = 16
RUNNERS_MAX: Final = 256
NATS_NODES: Final = (1, 3, 5)
"""Of an even number no more can be lost than of one less."""
REPLICAS_MAX: Final = 3
"""On how many nodes each log is, if there are as many: it outlives one of them, and no write waits for more."""
READY_TIMEOUT_S: Final = 30.0
RUNNERS_READY_S: Final = 120.0
"""What runners are given more: each imports torch and transformers, and builds its model."""
PING_TIMEOUT_S: Final = 0.5
PING_WAIT_S: Final = 0.02

NATS: Final = "nats"
PLANNER: Final = "planner-0"
ROLLOUT: Final = "rollout-0"
CLIENT: Final = User(Role.CLIENT)
ADMIT_S: Final = 10.0
"""So long NATS may take to let in who has a new key."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log: Final = logging.getLogger(__name__)


def _module(name: str) -> tuple[str, ...]:
    # -P: what is in the user's working directory must not shadow what a service imports.
    return (sys.executable, "-P", "-m", name)


@dataclass(frozen=True, slots=True)
class ServiceCommands:
    """How to run the services; tests put others in their place."""

    registry: tuple[str, ...] = _module("tensorhub_registry")
    planner: tuple[str, ...] = _module("tensorhub_planner")
    agent: tuple[str, ...] = _module("tensorhub_agent")
    rollout: tuple[str, ...] = _module("tensorhub_rollout")
    runner: tuple[str, ...] = _module("tensorhub_runner")


@dataclass(frozen=True, slots=True)
class LocalRollouts:
    """The rollout manager of a hub, and runners of one job: runner i is at agent i modulo the number of agents."""

    runners: int = 0
    engine: str = "torch"
    model: Path | None = None
    """The folder with the `config.json` of the runners' model."""
    job: str = "default"
    managers: int = 1
    runners_max: int = 0
    """Limit of the runners while the manager wishes for more than `runners`; 0: no more than these."""

    def __post_init__(self) -> None:
        """Check the counts."""
        for count in (self.runners, self.runners_max):
            if not 0 <= count <= RUNNERS_MAX:
                raise ValueError(f"{count} runners are not possible: take 0 to {RUNNERS_MAX}")
        if self.runners_max and self.runners_max < self.runners:
            raise ValueError(f"at most {self.runners_max} runners are fewer than {self.runners}: take as many or more")
        if self.most and self.engine == "torch" and self.model is None:
            raise ValueError("runners of torch need a model: name the folder of its config.json")

    @property
    def most(self) -> int:
        """How many runners there may be."""
        return max(self.runners, self.runners_max)

    @property
    def names(self) -> list[str]:
        """All runners that there may be."""
        return [*runner_names(self.most)]


class LocalHub:
    """One hub on this machine. Use it as an async context manager, in a thread that lives as long (see `tether`).

    `agents=0`: its agents run elsewhere, on hosts that reach NATS at `listen`. They and their runners get keys from
    `admit`. `on_fault` is told an error that leaves a process unkept; `run` ends at one by itself.
    """

    def __init__(
        self,
        directory: Path,
        agents: int = 1,
        hosts: int = 1,
        *,
        racks: int = 0,
        registries: int = 1,
        nats_nodes: int = 1,
        site: str = "site-0",
        rollouts: LocalRollouts | None = None,
        commands: ServiceCommands | None = None,
        environment: Mapping[str, str] | None = None,
        listen: str = LISTEN,
        port: int = ANY_PORT,
        on_fault: OnFault | None = None,
    ) -> None:
        if not 0 <= agents <= AGENTS_MAX:
            raise ValueError(f"{agents} agents are not possible: take 0 (they run elsewhere) to {AGENTS_MAX}")
        if not agents and rollouts is not None and rollouts.most:
            raise ValueError(f"{rollouts.most} runners need an agent: take 1 or more")
        if not 1 <= hosts <= max(agents, 1):
            raise ValueError(f"{hosts} hosts are not possible with {agents} agents: take 1 to {agents}")
        if not 0 <= racks <= hosts:
            raise ValueError(f"{racks} racks are not possible with {hosts} hosts: take 0 (none is known) to {hosts}")
        if not 1 <= registries <= REGISTRIES_MAX:
            raise ValueError(f"{registries} registries are not possible: take 1 to {REGISTRIES_MAX}")
        if nats_nodes not in NATS_NODES:
            raise ValueError(f"{nats_nodes} NATS nodes are not possible: take 1, 3 or 5")
        self._directory = HubDirectory(directory)
        self._count = agents
        self._hosts, self._racks = hosts, racks
        self._site = site
        self._rollouts = rollouts
        self._commands = commands or ServiceCommands()
        self._environment = dict(os.environ if environment is None else environment)
        self._listen, self._port = listen, port
        self._keys = Keyring(self._directory.credentials)
        self._registries = [f"registry-{index}" for index in range(registries)]
        self._nats_names = [NATS] if nats_nodes == 1 else [f"{NATS}-{index}" for index in range(nats_nodes)]
        self._nats: dict[str, NatsServer] = {}
        self._children: Children | None = None
        self._by_name: dict[str, Child] = {}
        self._runners = [] if rollouts is None else rollouts.names[: rollouts.runners]
        self._launching: Supervisor | None = None
        self._is_ready = False
        self._fallen: asyncio.Event | None = None
        self._fault: Fault | None = None
        self._tell_fault = on_fault

    @property
    def hub(self) -> HubFile:
        """What `hub.json` says now."""
        pids = {name: child.pid for name, child in self._by_name.items()}
        nodes = [NatsEntry(server.url, pids[name]) for name, server in self._nats.items()]
        return HubFile(
            nats=nodes[0].url,
            nats_pid=nodes[0].pid,
            credentials=str(self._keys.path_of(CLIENT)),
            registry=ProcessEntry(pids[self._registries[0]]),
            planner=ProcessEntry(pids[PLANNER]),
            agents=[self._entry(agent, index, pids[agent]) for index, agent in enumerate(self._agents())],
            registries=[RegistryEntry(name, pids[name]) for name in self._registries],
            nats_nodes=nodes,
            rollout=None if self._rollouts is None else ProcessEntry(pids[ROLLOUT]),
            rollout_managers=[RegistryEntry(name, pids[name]) for name in self._managers()],
            runners=[
                RunnerEntry(runner, pids[runner], self._rollouts.engine, self._agent_of(runner), runner)
                for runner in self._runners
                if self._rollouts is not None
            ],
        )

    async def start(self) -> HubFile:
        """Bring all up and return once each process has said that it is ready. On an error nothing is left running."""
        self._directory.open()
        try:
            hub_file.remove(self._directory.path)
            self._children = Children(self._on_restart, self._on_fault)
            names = [] if self._rollouts is None else self._rollouts.names
            runners = [User(Role.RUNNER, runner) for runner in names]
            self._keys.make([*OF_EVERY_HUB, *(User(Role.AGENT, agent) for agent in self._agents()), *runners])
            await self._start_nats(self._children)
            registry, planner = self._logs_in(User(Role.REGISTRY)), self._logs_in(User(Role.PLANNER))
            for name in self._registries:
                own = {"TENSORHUB_REGISTRY_ID": name, "TENSORHUB_LOG_REPLICAS": str(self._replicas)}
                await self._start(name, self._commands.registry, own | registry)
            await self._start(PLANNER, self._commands.planner, {"TENSORHUB_PLANNER_ID": PLANNER} | planner)
            for index, agent in enumerate(self._agents()):
                await self._start(agent, self._commands.agent, self._of_agent(agent, index))
            if self._rollouts is not None:
                await self._start_rollouts(self._rollouts)
            await self._children.while_starting(self._wait_ready())
            self._children.settle()
            self._is_ready = True
            hub_file.write(self._directory.path, self.hub)
            if self._rollouts is not None and self._rollouts.most > self._rollouts.runners:
                self._launch(self._rollouts)
            return self.hub
        except BaseException:
            await self.stop()
            raise

    async def _start_nats(self, children: Children) -> None:
        folders = self._directory.nats(len(self._nats_names))
        cluster = None if len(folders) == 1 else Cluster.of(len(folders))
        for index, name in enumerate(self._nats_names):
            server = self._nats[name] = NatsServer(
                folders[index], self._keys.conf, cluster, index, listen=self._listen, port=self._port
            )
            server.prepare()
            await self._start(name, server.command, {}, is_last=True)
        for name, server in self._nats.items():
            await children.while_starting(server.wait_ready(self._by_name[name].pid))
        # A cluster can be asked for streams only once its nodes have met.
        await (await children.while_starting(self._connect())).close()

    async def _start_rollouts(self, rollouts: LocalRollouts) -> None:
        manager = self._logs_in(User(Role.ROLLOUT))
        for name in self._managers():
            own = {"TENSORHUB_ROLLOUT_ID": name, "TENSORHUB_LOG_REPLICAS": str(self._replicas)}
            await self._start(name, self._commands.rollout, own | manager)
        for runner in self._runners:
            await self._start(runner, self._commands.runner, self._of_runner(rollouts, runner))

    def _launch(self, rollouts: LocalRollouts) -> None:
        """Begin to follow how many runners the manager wishes for."""
        address = NatsAddress(self.nats, self._keys.path_of(CLIENT))
        following = follow(rollouts.job, address, self, rollouts.runners, rollouts.most)
        self._launching = Supervisor("runners that come and go", self._on_fault)
        self._launching.start(following, "following what is wished for")

    @property
    def runners(self) -> tuple[str, ...]:
        """The runners that are kept running."""
        return tuple(self._runners)

    async def start_runner(self, runner: str) -> None:
        """Start one more runner, and keep it running."""
        assert self._rollouts is not None
        await self._start(runner, self._commands.runner, self._of_runner(self._rollouts, runner))
        self._runners.append(runner)
        self._write()

    def notify_runner(self, runner: str) -> None:
        """Tell a runner that it goes away soon, so that its responses move."""
        assert self._children is not None
        self._children.signal(self._by_name[runner], signal.SIGUSR1)

    async def end_runner(self, runner: str) -> None:
        """End a runner, and keep it no more."""
        assert self._children is not None
        self._runners.remove(runner)
        child = self._by_name.pop(runner)
        self._write()
        await self._children.end(child)

    async def admit(self, users: Iterable[User]) -> dict[User, bytes]:
        """Return the keys of users whose processes run elsewhere, and clients' too; NATS lets in who has one.

        Keys that are missing are made. Raises `RegistryUnavailable` where NATS does not take them within `ADMIT_S`.
        """
        assert self._children is not None, "admitted before started"
        found = {user: self._keys.path_of(user) for user in users}
        new = [user for user, path in found.items() if not path.exists()]
        if new:
            self._keys.make(new)
            for name in self._nats:
                self._children.signal(self._by_name[name], signal.SIGHUP)
            for server in self._nats.values():
                # A node that has not read its file yet refuses the keys; each reads all of them at once.
                await _wait_admitted(server.url, found[new[-1]])
        return {user: path.read_bytes() for user, path in found.items()}

    async def stop(self) -> None:
        """Take `hub.json` away and end all processes, within a bound."""
        if not self._directory.is_open:
            return
        self._is_ready = False
        hub_file.remove(self._directory.path)
        if self._launching is not None:
            await self._launching.close()
        if self._children is not None:
            await self._children.stop()
        self._directory.free_segments(settings.load(self._environment).shm_dir)
        self._directory.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def run(self, on_ready: Callable[[HubFile], None]) -> int:
        """Be up until SIGINT, SIGTERM or SIGHUP comes, then stop all and return the signal's number.

        Raises `TensorHubError` where it can't come up, or can't be kept up.
        """
        loop, work = asyncio.get_running_loop(), Supervisor("up")
        self._fallen = asyncio.Event()
        told: list[int] = []

        def stop(number: int) -> None:
            told.append(number)
            ending.cancel()

        async def be_up(fallen: asyncio.Event) -> None:
            on_ready(await self.start())
            await fallen.wait()

        ending = work.start(be_up(self._fallen), "being up", awaited=True)
        for number in SIGNALS:
            # It comes once only: how long it takes to stop has a bound, and a second signal would leave something.
            loop.add_signal_handler(number, stop, number)
        try:
            await asyncio.wait({ending})
            if not told:
                ending.result()
                raise TensorHubError(f"the hub can't be kept up: {self._fault}")
            return told[0]
        finally:
            await work.close()
            await self.stop()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_fault(self, fault: Fault) -> None:
        """Take an error that leaves a process unkept: `run` ends, and with it the hub, rather than be half a hub."""
        self._fault = fault
        if self._fallen is not None:
            self._fallen.set()
        if self._tell_fault is not None:
            self._tell_fault(fault)

    def _agents(self) -> list[str]:
        return [f"agent-{index}" for index in range(self._count)]

    def _agent_of(self, runner: str) -> str:
        return f"agent-{_number_of(runner) % self._count}"

    def _managers(self) -> list[str]:
        return [] if self._rollouts is None else [f"rollout-{index}" for index in range(self._rollouts.managers)]

    def _host(self, index: int) -> str:
        return f"host-{index % self._hosts}"

    def _rack(self, index: int) -> str:
        return f"rack-{index % self._hosts % self._racks}" if self._racks else ""

    def _entry(self, agent: str, index: int, pid: int) -> AgentEntry:
        host, rack = self._host(index), self._rack(index)
        return AgentEntry(agent, pid, str(self._directory.socket(agent)), host, self._site, rack)

    @property
    def _replicas(self) -> int:
        """On how many nodes each log is."""
        return min(REPLICAS_MAX, len(self._nats_names))

    @property
    def nats(self) -> str:
        """The addresses of all nodes of NATS, as `connect(nats=…)` takes them."""
        return ",".join(server.url for server in self._nats.values())

    async def _connect(self) -> Bus:
        return await connect(
            self.nats, name="tensorhub-up", credentials=self._keys.path_of(CLIENT), timeout_s=READY_TIMEOUT_S
        )

    def _logs_in(self, user: User) -> dict[str, str]:
        return login(self.nats, self._keys.path_of(user))

    def _of_agent(self, agent: str, index: int) -> dict[str, str]:
        state = self._directory.state(agent)
        state.mkdir(mode=0o700, exist_ok=True)
        place = Place(self._host(index), self._site, self._rack(index))
        return {
            **self._logs_in(User(Role.AGENT, agent)),
            **of_agent(agent, place, self._directory.socket(agent), state, self._keys.path_of(CLIENT)),
            # Loading UCX takes its time, and agents of one host have no use for it.
            "TENSORHUB_UCXX": self._environment.get("TENSORHUB_UCXX") or ("on" if self._hosts > 1 else "off"),
        }

    def _of_runner(self, rollouts: LocalRollouts, runner: str) -> dict[str, str]:
        socket = self._directory.socket(self._agent_of(runner))
        host = self._host(_number_of(runner) % self._count)
        return {
            **self._logs_in(User(Role.RUNNER, runner)),
            **of_runner(runner, rollouts.job, host, socket, rollouts.engine, rollouts.model),
        }

    async def _start(self, name: str, command: tuple[str, ...], own: dict[str, str], *, is_last: bool = False) -> None:
        assert self._children is not None, "started before opened"
        environment = without_nats(self._environment) | own | {"TENSORHUB_DIR": str(self._directory.path)}
        spec = ChildSpec(name, command, environment, self._directory.log(name), is_last)
        self._by_name[name] = await self._children.start(spec)

    async def _wait_ready(self) -> None:
        async with await self._connect() as bus:
            missing = [name for name in self._by_name if name not in self._nats]
            bound_s = READY_TIMEOUT_S + (RUNNERS_READY_S if self._runners else 0.0)
            try:
                async with asyncio.timeout(bound_s):
                    while missing:
                        await _wait_pong(bus, missing[0])
                        del missing[0]
            except TimeoutError:
                raise RegistryUnavailable(
                    f"{', '.join(missing)} did not say within {bound_s:g} s that it is ready: "
                    f"see {self._directory.log(missing[0])}"
                ) from None

    def _on_restart(self, _: Child) -> None:
        if self._is_ready:
            self._write()

    def _write(self) -> None:
        """Have `hub.json` name the processes that run now."""
        try:
            hub_file.write(self._directory.path, self.hub)
        except OSError as error:
            _log.warning("hub.json can't be written, so it names processes that are gone: %s", error)


def _number_of(runner: str) -> int:
    return int(runner.rpartition("-")[2])


async def _wait_admitted(nats: str, key: Path) -> None:
    deadline = asyncio.get_running_loop().time() + ADMIT_S
    while True:
        try:
            bus = await connect(nats, name="tensorhub-up", credentials=key, timeout_s=ADMIT_S)
        except RegistryUnavailable:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(PING_WAIT_S)
        else:
            await bus.close()
            return


async def _wait_pong(bus: Bus, process: str) -> None:
    while await ping(bus, process, PING_TIMEOUT_S) is None:  # noqa: ASYNC110 (only asking again tells)
        await asyncio.sleep(PING_WAIT_S)
