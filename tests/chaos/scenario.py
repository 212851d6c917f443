"""What every run of violence shares: a hub, workers that train and read, a prober, blows, and the log at the end.

After a blow a version begun since must be published and read by every reader within a bound, and no call may be late.
In the whole log each command has one outcome, and nothing acknowledged is missing. Wrongs are sentences in `findings`.
"""

import argparse
import asyncio
import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
from tests.chaos.fleet import Findings, Fleet
from tests.chaos.verdict import LogVerdict
from tests.chaos.whole_log import read_whole_log
from tests.chaos.worker import TRAINER, Config
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import kill, wake
from tests.stopping import stop

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.subjects import command_subject

EVERY_S: Final = 0.05
APPEND_S: Final = 30.0
STOP_S: Final = 40.0
FIRST_S: Final = 60.0
"""The first version is published and read within this."""

WATCH_S: Final = 0.25
SHOWN_MAX: Final = 50
MESSAGES_MAX: Final = 40

Blow = Callable[[int], None]
"""Strikes a process: `kill` or `stop`."""
T = TypeVar("T")


class Prober:
    """Sends commands that change nothing until `stop`: none that was acknowledged may get lost."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.acknowledged: dict[str, int] = {}
        self.wrongs: list[str] = []
        self._joblog = JobLog(bus, job)
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._send())

    async def stop(self) -> None:
        self._ending.set()
        async with asyncio.timeout(STOP_S):
            await self._task

    async def _send(self) -> None:
        body = encode(Publish(model="none", replica="none"))
        subject = command_subject(self._joblog.job, "publish")
        while not self._ending.is_set():
            msg_id = str(uuid4())
            try:
                self.acknowledged[msg_id] = await self._joblog.append(subject, body, msg_id, timeout_s=APPEND_S)
            except TensorHubError as why:
                if self.acknowledged:
                    self.wrongs.append(f"the log did not take a command within {APPEND_S:g} s: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._ending.wait()


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = ""
    victim: str
    blow: str
    moment: str = ""
    recovered_s: float | None
    """From the blow, or the waking, to a version begun afterwards that every reader has read; None: not in time."""
    meanwhile: int
    """How many reads were committed while the victim was stopped."""
    errors: dict[str, int]
    """What callers got from the blow on, by error."""
    findings: int

    def __str__(self) -> str:
        recovered = "NOTHING GOT ON" if self.recovered_s is None else f"recovered in {self.recovered_s:5.2f} s"
        errors = ", ".join(f"{error} {count}" for error, count in self.errors.items()) or "no error"
        found = f"  {self.findings} FINDINGS" if self.findings else ""
        where = f"{self.transport:5} {self.victim:30} {self.blow:7} {self.moment:6}"
        return f"{where} {recovered}, {self.meanwhile:3} reads meanwhile; {errors}{found}"


@dataclass
class Scenario(ABC):
    """One run. A subclass has a script and says which workers there are."""

    directory: Path
    nbytes: int
    seed: int = 7
    findings: Findings = field(default_factory=Findings)
    log: LogVerdict = field(default_factory=LogVerdict)
    probes: int = 0
    hub: RunningHub = field(init=False)
    fleet: Fleet = field(init=False)

    job = "chaos"
    progress_s = 25.0
    """After a blow, or the waking, a version begun afterwards is published and read by every reader within this."""
    must_begin = True
    reads_log = True

    @abstractmethod
    def workers(self) -> Iterable[tuple[str, Config]]:
        """Return each worker's name and what it is to be."""

    @abstractmethod
    async def script(self) -> None:
        """Strike."""

    def config(self, replica: str, agent: str, **more: Any) -> Config:
        return Config(job=self.job, seed=self.seed, replica=replica, agent=agent, nbytes=self.nbytes, **more)

    async def play(self, **hub: Any) -> None:
        """Bring up a hub with these options, let the workers begin, run the script, and read the log at the end."""
        async with running_hub(self.directory, **hub) as self.hub, await self.hub.bus(self.hub.admin_key) as bus:
            prober = Prober(bus, self.job) if self.reads_log else None
            self.fleet = Fleet(self.directory, self.workers(), self.findings)
            self.fleet.start()
            try:
                began = await self.progress(time.monotonic(), "the beginning", FIRST_S)
                if began is not None or not self.must_begin:
                    await self.script()
            finally:
                await self.fleet.end()
                if prober is not None:
                    await prober.stop()
            if prober is not None:
                self.probes = len(prober.acknowledged)
                self.log = await read_whole_log(bus, self.job, self.directory / "logs" / "job.log")
                self.findings.wrongs += self.log.wrongs + self.log.lost(prober.acknowledged) + prober.wrongs

    # Striking.

    def pids(self) -> dict[str, int]:
        workers = {name: member.pid for name, member in self.fleet.members.items() if member.pid is not None}
        return self.hub.file.pids | workers

    def strike(self, name: str, blow: Blow) -> Callable[[], None]:
        member = self.fleet.members.get(name)
        if member is not None:
            member.kill() if blow is kill else member.stop()
            return member.wake
        pid = self.hub.pid(name)
        blow(pid)
        return lambda: wake(pid)

    async def struck(self, names: Iterable[str], blow: Blow, stop_s: float) -> tuple[float, int]:
        """Strike, and wake after a while what was stopped.

        Returns when it was over, and how many reads came while it was stopped.
        """
        wakes = [self.strike(name, blow) for name in names]
        reads = self.fleet.reads()
        if blow is stop:
            await self.watched(asyncio.sleep(stop_s))
        meanwhile = self.fleet.reads() - reads
        for each in wakes:
            each()
        return time.monotonic(), meanwhile if blow is stop else 0

    # Looking.

    async def watched(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=WATCH_S)
            self.findings.wrongs += self.fleet.late_calls()
        return task.result()

    async def progress(self, at: float, after: str, bound_s: float | None = None) -> float | None:
        """Wait for progress since a moment; return how long it took, or None, which is a finding."""
        bound = self.progress_s if bound_s is None else bound_s
        recovered = await self.watched(self.fleet.progress(at, bound))
        if recovered is not None:
            return recovered - at
        if self.must_begin:
            self.findings.wrong(f"{after}: no progress within {bound:g} s\n{self.fleet.state(at)}")
        return None

    def telling(self, **what: str) -> Callable[[float | None, int], Struck]:
        """Return what tells of a blow, by what callers got and what was found since now."""
        before, calls = len(self.findings.wrongs), self.findings.calls.copy()

        def told(recovered_s: float | None, meanwhile: int) -> Struck:
            errors = Counter[str]()
            for (_, outcome), count in sorted((self.findings.calls - calls).items()):
                errors[outcome] += count
            del errors["done"]
            found = len(self.findings.wrongs) - before
            return Struck(**what, recovered_s=recovered_s, meanwhile=meanwhile, errors=dict(errors), findings=found)

        return told


def trainer_and_readers(scenario: Scenario, agents: Iterable[str], **more: Any) -> list[tuple[str, Config]]:
    """Return a trainer on the first agent and a reader on each of the others, of one shard each."""
    names = [TRAINER, *(f"reader-{number}" for number in range(1, 100))]
    return [(name, scenario.config(name, agent, **more)) for name, agent in zip(names, agents, strict=False)]


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Read options from the command line, each of the type of its default; one whose default is False is a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def write_json(path: str, found: Sequence[msgspec.Struct]) -> None:
    if path:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def conclude(findings: Findings, directory: Path, *, keep: bool = False) -> int:
    """Print what was found; return the exit code. The directory is removed unless something was found."""
    for message, count in findings.messages.most_common(MESSAGES_MAX):
        print(f"  {count:4} × {message}")
    for wrong in findings.wrongs[:SHOWN_MAX]:
        print(f"- {wrong}")
    if findings.wrongs:
        print(f"\n{len(findings.wrongs)} FINDINGS (the logs are in {directory}/logs)")
        return 1
    print("\nno finding")
    if not keep:
        shutil.rmtree(directory)
    return 0
