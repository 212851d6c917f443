"""Runs the demo: a hub, a trainer and four rollouts as processes; kills one, starts one late, and checks every copy.

Invariants:
- However it ends, no process of its own is left; its directory is removed unless something went wrong.
- It ends within `RUN_S_MAX` beyond the time that it is to train for.
- It returns 0 only when every copy was compared and equal, and the killed rollout and the late one have caught up.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from tensorhub._control.hub_file import AgentEntry
from tensorhub.local import tether
from tensorhub.local.children import reason
from tensorhub.local.hub import SIGNALS, LocalHub
from tensorhub_common.config import settings
from tensorhub_common.errors import TensorHubError
from tensorhub_common.runtime.supervision import Supervisor

PROGRAMS: Final = "tensorhub.demo"
TRAINER: Final = "trainer"
KILLED: Final = "rollout-2"
LATE: Final = "rollout-4"
REPLICAS: Final = (TRAINER, "rollout-1", KILLED, "rollout-3", LATE)
KILL_AT_VERSION: Final = 5
LATE_AT_VERSION: Final = 8

RUN_S_MAX: Final = 240.0
END_S_MAX: Final = 30.0
STOP_S: Final = 3.0
STARTS_MAX: Final = 4
"""A program that ends by itself is started again, as a supervisor does; after this many starts the demo has failed."""

LINE_BYTES_MAX: Final = 1 << 20
SHM_BYTES_MIN: Final = 400_000_000
"""Each replica keeps 53 MB in shared memory."""
MEMORY_BYTES_MIN: Final = 2_000_000_000
SHARED_SETTINGS: Final = ("TENSORHUB_SHM_DIR", "TENSORHUB_UCXX")
"""What the demo's own hub takes from the environment; other settings may be about another hub."""
QUIET_MODEL: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}

INTRODUCTION: Final = f"""\
A small Llama learns in one process, which publishes each step as a version. Three rollouts follow and generate.
{LATE} joins late. Where the hub is the demo's own, {KILLED} is killed with its agent, and comes back.
After each read a rollout compares every byte with what the trainer wrote before it published (BLAKE2b).
"""
TEXTS: Final = {
    "up": "is up; to look at it: tensorhub status --dir {directory} --job {job}",
    "started": "starts (process {pid})",
    "published": "published version {version} (loss {loss:.2f})",
    "held": "holds version {version}, from {origin}: {verdict}; says {says!r}",
    "killed": "is killed: SIGKILL to process {pid} and to its agent, process {agent_pid}",
    "trouble": "tries again: {error}: {message}",
    "ended": "ended with exit code {code}: {reason}",
    "end": "holds version {version} at the end: {verdict}",
}

ROW: Final = "{:<10} {:<8} {:>8}  {:<9} {}"
VERDICT: Final = """
{versions} versions in {at_s:.0f} s; loss {loss_first} -> {loss_last}
{compared} copies, {gb:.1f} GB in all, were compared byte by byte with what the trainer wrote: {differences} differ"""

Agents = Callable[[], Sequence[AgentEntry]]


class Replica(msgspec.Struct, kw_only=True):
    """What is known of one program; a row of the summary."""

    replica: str
    version: int | None = None
    updates: int = 0
    nbytes: int = 0
    """What it has read."""
    compared_equal: int = 0
    equal_at_end: bool | None = None
    starts: int = 0


async def run_demo(*, seconds: float = 0, hosts: int = 1, json: bool = False, attach: Sequence[Path] = ()) -> int:
    """Run it and return the exit code: 1 where something went wrong. Cancelled, it ends all its processes first.

    `seconds`: train for at least this long. `hosts`: on how many hosts the agents pretend to be. `json`: an object a
    line. `attach`: sockets of agents of a hub that runs, which is used instead of one of its own; nobody is killed.
    """
    check_machine(has_hub=not attach)
    display = Display(json=json)
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-demo-"))
    faults: list[str] = []
    try:
        for name in ("digests", "logs"):
            (folder / name).mkdir()
        async with hub_of(folder, hosts, attach) as (agents, environment):
            demo = Demo(folder, agents, environment, display, can_kill=not attach)
            faults = await demo.run(seconds)
    finally:
        if not faults:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if faults else 0


def check_machine(*, has_hub: bool) -> None:
    """Raise where the machine is too small: in the middle of the demo it would be an error of some process."""
    shm_dir = settings.load(os.environ).shm_dir
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = [("memory", next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), MEMORY_BYTES_MIN)]
    if has_hub:
        free.append((f"shared memory in {shm_dir}", shutil.disk_usage(shm_dir).free, SHM_BYTES_MIN))
    for what, found, needed in free:
        if found < needed:
            raise TensorHubError(f"the demo needs {needed / 1e9:.1f} GB of {what}, and {found / 1e9:.1f} GB are free")


@contextlib.asynccontextmanager
async def hub_of(folder: Path, hosts: int, attach: Sequence[Path]) -> AsyncIterator[tuple[Agents, dict[str, str]]]:
    """Give the agents, as they are now, and the environment in which programs find their hub."""
    job = {"TENSORHUB_JOB": f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"}
    if attach:
        entries = [AgentEntry(id=path.stem, pid=0, socket=str(path.absolute()), host="", site="") for path in attach]
        yield lambda: entries, os.environ | job
        return
    own = {
        name: text for name, text in os.environ.items() if not name.startswith("TENSORHUB_") or name in SHARED_SETTINGS
    }
    async with LocalHub(folder, agents=len(REPLICAS), hosts=hosts, environment=own) as up:
        yield lambda: up.hub.agents, own | job | {"TENSORHUB_DIR": str(folder)}


class Demo:
    """One run: what has happened, and what is to be done next."""

    def __init__(
        self, folder: Path, agents: Agents, environment: dict[str, str], display: "Display", *, can_kill: bool
    ) -> None:
        self._folder, self._agents, self._display = folder, agents, display
        self._environment = environment | QUIET_MODEL
        self._must_kill = can_kill
        self._replicas = {name: Replica(replica=name) for name in REPLICAS}
        self._losses: list[float] = []
        self._compared, self._nbytes_compared, self._differences = 0, 0, 0
        self._processes: dict[str, Process] = {}
        self._events: asyncio.Queue[tuple[str, Process, dict[str, Any]]] = asyncio.Queue()
        self._last: int | None = None
        self._faults: list[str] = []
        self._work = Supervisor("the demo")
        self._began = time.monotonic()

    async def run(self, seconds: float) -> list[str]:
        """Run to the end, sum up, and return what went wrong."""
        self._tell("the hub", "up", job=self._environment["TENSORHUB_JOB"], directory=str(self._folder))
        try:
            for name in REPLICAS:
                if name != LATE:
                    await self._start(name, seconds)
            await self._until(self._all_hold_last, RUN_S_MAX + seconds)
            self._signal_all(signal.SIGTERM)
            await self._until(lambda: not self._processes, END_S_MAX)
        except TimeoutError:
            states = ", ".join(f"{each.replica} holds {each.version or 'none'}" for each in self._replicas.values())
            self._faults.append(f"the demo did not end in time: of version {self._last or 'unknown'} {states}")
        except TensorHubError as error:
            self._faults.append(str(error))
        finally:
            await self._stop()
        return self._sum_up()

    async def _until(self, is_reached: Callable[[], bool], bound_s: float) -> None:
        async with asyncio.timeout(bound_s):
            while not is_reached():
                name, process, event = await self._events.get()
                if self._processes.get(name) is process:  # What a killed one said before counts no more.
                    await self._on(name, event)

    async def _on(self, name: str, event: dict[str, Any]) -> None:
        replica, kind = self._replicas[name], event.pop("kind")
        match kind:
            case "published":
                replica.version = event["version"]
                self._losses.append(event["loss"])
            case "trained":
                self._last = event["version"]
            case "held" | "end":
                self._compare(replica, kind, event)
            case "ended":
                del self._processes[name]
        self._tell(name, kind, **event)
        if kind == "ended" and (event["code"] or replica.equal_at_end is None):
            if replica.starts == STARTS_MAX or (name == TRAINER and self._losses):
                raise TensorHubError(f"{name} ended with exit code {event['code']}: {event['reason']}")
            await self._start(name)
        if self._must_kill and len(self._losses) >= KILL_AT_VERSION and self._replicas[KILLED].updates:
            self._must_kill = False
            await self._kill(KILLED)
        if len(self._losses) >= LATE_AT_VERSION and not self._replicas[LATE].starts:
            await self._start(LATE)

    def _compare(self, replica: Replica, kind: str, event: dict[str, Any]) -> None:
        differing, version = event["differing"], event["version"]
        event["verdict"] = f"NOT EQUAL in {', '.join(differing[:3])}" if differing else "every byte is equal"
        self._compared += 1
        self._nbytes_compared += event["nbytes"]
        if differing:
            self._differences += 1
            self._faults.append(f"{replica.replica} holds other bytes than version {version}: {event['verdict']}")
        if kind == "end":
            replica.equal_at_end = not differing and version == self._last
            return
        sources = event["sources"]
        event["origin"] = ", ".join(sorted({each["replica"] for each in sources})) or "its own memory"
        replica.version = version
        replica.updates += 1
        replica.compared_equal += not differing
        replica.nbytes += sum(each["nbytes"] for each in sources)

    def _all_hold_last(self) -> bool:
        versions = {each.version for each in self._replicas.values()}
        return not self._must_kill and self._last is not None and versions == {self._last}

    # ----------------------------------------------------------------------------------------------- processes

    async def _start(self, name: str, seconds: float = 0) -> None:
        digests, log = str(self._folder / "digests"), self._folder / "logs" / f"{name}.log"
        program = (
            ("trainer", digests, f"--seconds={seconds}") if name == TRAINER else ("rollout", digests, f"--name={name}")
        )
        with log.open("ab") as stderr:
            log_start = stderr.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
                *(sys.executable, "-P", "-m", f"{PROGRAMS}.{program[0]}", *program[1:]),
                env=self._environment | {"TENSORHUB_AGENT": self._agent_of(name).socket},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=stderr,
                limit=LINE_BYTES_MAX,
                # In a session of its own: Ctrl-C reaches this process alone, which ends them all.
                start_new_session=True,
            )
        self._processes[name] = process
        self._replicas[name].starts += 1
        self._work.start(self._follow(name, process, log, log_start), f"following {name}")
        self._tell(name, "started", pid=process.pid)

    async def _follow(self, name: str, process: Process, log: Path, log_start: int) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._events.put_nowait((name, process, msgspec.json.decode(line)))
        code = await process.wait()
        self._events.put_nowait((name, process, {"kind": "ended", "code": code, "reason": reason(log, log_start)}))

    def _agent_of(self, name: str) -> AgentEntry:
        agents = self._agents()
        return agents[REPLICAS.index(name) % len(agents)]

    async def _kill(self, name: str) -> None:
        """Kill the program and its agent, which the hub starts again, and start the program again."""
        process, agent = self._processes[name], self._agent_of(name)
        for pid in (agent.pid, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._replicas[name].version = None
        self._tell(name, "killed", pid=process.pid, agent_pid=agent.pid)
        await process.wait()
        await self._start(name)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _stop(self) -> None:
        for number in SIGNALS:  # The end has a bound: a second Ctrl-C must not cut it off.
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal_all(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.gather(*(process.wait() for process in self._processes.values()))
        await self._work.close()

    # ------------------------------------------------------------------------------------------------- results

    def _tell(self, name: str, kind: str, **facts: object) -> None:
        state = "; ".join(f"{each.replica} {each.version or '-'}" for each in self._replicas.values())
        self._display.tell(time.monotonic() - self._began, name, kind, facts, f"versions: {state}")

    def _sum_up(self) -> list[str]:
        losses, replicas, faults = self._losses, list(self._replicas.values()), self._faults
        faults += [f"{each.replica} was not compared at the end" for each in replicas if not each.equal_at_end]
        if not losses or losses[-1] >= losses[0]:
            faults.append("the loss did not go down")
        summary = {
            "at_s": round(time.monotonic() - self._began, 3),
            "ok": not faults,
            "faults": faults,
            "versions": len(losses),
            "loss_first": round(losses[0], 3) if losses else None,
            "loss_last": round(losses[-1], 3) if losses else None,
            "compared": self._compared,
            "nbytes_compared": self._nbytes_compared,
            "differences": self._differences,
        }
        self._display.sum_up(summary, replicas, self._folder)
        return faults


class Display:
    """Writes lines for people, or an object a line for programs; on a terminal a last line says how far it is."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._has_progress = not json and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if not json:
            self._write(INTRODUCTION)

    def tell(self, at_s: float, name: str, kind: str, facts: dict[str, Any], progress: str) -> None:
        """Write what happened."""
        if self._json:
            self._write_object({"kind": kind, "at_s": round(at_s, 3), "replica": name, **facts})
        elif kind in TEXTS and not (kind == "ended" and facts["code"] == 0):
            self._write(f"{at_s:5.1f} s  {name:<9}  {TEXTS[kind].format(**facts)}")
            if self._has_progress:
                sys.stdout.write(progress[: shutil.get_terminal_size().columns - 1])
                sys.stdout.flush()

    def sum_up(self, summary: dict[str, Any], replicas: list[Replica], folder: Path) -> None:
        """Write a table and the verdict, or the last object."""
        if self._json:
            self._write_object({"kind": "summary", **summary, "replicas": replicas})
            return
        self._write(f"\n{ROW.format('replica', 'version', 'read', 'equal', 'at the end')}")
        for each in replicas:
            end = {True: "equal", False: "NOT EQUAL", None: "not compared"}[each.equal_at_end]
            equal = f"{each.compared_equal} of {each.updates}" if each.updates else "-"
            self._write(ROW.format(each.replica, each.version or "-", f"{each.nbytes / 1e6:.0f} MB", equal, end))
        self._write(VERDICT.format(gb=summary["nbytes_compared"] / 1e9, **summary))
        for fault in summary["faults"]:
            self._write(f"FAILED: {fault}")
        if summary["faults"]:
            self._write(f"what each process wrote is in {folder}")

    def _write_object(self, value: object) -> None:
        self._write(msgspec.json.encode(value).decode())

    def _write(self, line: str) -> None:
        sys.stdout.write(f"\r\x1b[K{line}\n" if self._has_progress else f"{line}\n")
        sys.stdout.flush()
