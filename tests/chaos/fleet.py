"""The worker processes of a chaos run: started, started again when they were killed, and listened to.

Whatever a worker tells is judged as it comes in: wrong bytes, late answers, errors that no kill excuses, and memory
that a worker does not find as it left it.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from tests.chaos import reports
from tests.chaos.nursery import Order
from tests.chaos.worker import THINK_S_MAX, Config

from tensorhub.local import tether

TRAINER: Final = "trainer"
"""The role of who publishes; the others are called "rollout"."""

LINE_BYTES_MAX: Final = 1 << 20
END_S: Final = 60.0
LOOK_S: Final = 0.01
"""How often the script looks how far the workers are."""

SLACK_S: Final = 0.5
"""What the worker's own process may lose on a machine with two busy cores before it looks at the clock."""

EXCUSED: Final = frozenset(
    {
        "AgentUnavailable",
        "RegistryUnavailable",
        "RoundTimeout",
        "VersionUnavailable",
        "VersionConflict",
        "ReplicaConflict",
        "NotPublished",
    }
)
"""What a call may raise while processes are killed around it. Anything else is a finding."""

_reports: Final = msgspec.json.Decoder(reports.AnyReport)


@dataclass(slots=True)
class Findings:
    """Everything that should not be, in sentences, and what was counted on the way."""

    excused: frozenset[str] = EXCUSED
    wrongs: list[str] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    messages: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    unequal: int = 0
    attached_again: int = 0
    found_unchanged: int = 0

    def wrong(self, sentence: str) -> None:
        self.wrongs.append(sentence)

    def compared_in_all(self) -> str:
        return f"{sum(self.compared.values())} comparisons, {self.nbytes / 1e9:.1f} GB, {self.unequal} unequal"

    def slowest_calls(self) -> str:
        return "slowest calls: " + ", ".join(
            f"{call} {took_s:.2f} s" for call, took_s in sorted(self.slowest_s.items())
        )


@dataclass(slots=True)
class Life:
    """One process of a worker."""

    pid: int
    open: dict[int, reports.Begun] = field(default_factory=dict)
    found: reports.Found | None = None
    closed: bool = False
    killed: bool = False
    over: bool = False
    stopped_at: float | None = None
    slept_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By call for how long the process was stopped meanwhile; it is answered as much later."""


class Member:
    """One worker, through all its processes."""

    def __init__(
        self, name: str, config: Config, log: Path, findings: Findings, start: Callable[["Member"], None]
    ) -> None:
        self.name, self.config, self.log = name, config, log
        self.life: Life | None = None
        self.published: list[reports.Published] = []
        self.newest: dict[int, tuple[int, float]] = {}
        """By shard the newest version that a read has returned, and when."""
        self.commits = 0
        """How many reads have returned a version, over all shards."""
        self.ending = False
        self.gone = asyncio.Event()
        """The worker has ended and is not started again."""
        self._held: dict[int, int | None] | None = None
        self._unsure: set[int] = set()
        """Shards about which a call that failed or was cut short leaves open what they hold."""
        self._findings, self._start = findings, start

    @property
    def pid(self) -> int | None:
        """The living process, or None."""
        return None if self.life is None or self.life.over else self.life.pid

    @property
    def is_attached(self) -> bool:
        return self.pid is not None and self.life is not None and self.life.found is not None

    def kill(self) -> None:
        assert self.life is not None
        self.life.killed = True
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Put the process to sleep."""
        assert self.life is not None
        self.life.stopped_at = time.monotonic()
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Wake the process."""
        life = self.life
        if life is not None and life.stopped_at is not None:
            for number in life.open:
                life.slept_s[number] += time.monotonic() - life.stopped_at
            life.stopped_at = None
        self._signal(signal.SIGCONT)

    def calls_under_way(self, call: str) -> bool:
        """Tell whether the worker waits for such a call just now."""
        life = self.life
        return life is not None and not life.over and any(each.call == call for each in life.open.values())

    async def end(self) -> None:
        """Ask the worker to end in good order, and wait for it."""
        self.ending = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await self.gone.wait()
        except TimeoutError:
            self._findings.wrong(f"{self.name} did not end within {END_S:g} s of SIGTERM")
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def late_calls(self, at: float) -> list[str]:
        """Name the calls under way that have run out of their bound."""
        life = self.life
        if life is None or life.over or life.stopped_at is not None:
            return []
        return [
            f"{self.name}: {call.call} has been under way for {at - call.at:.1f} s, with a bound of {call.bound_s:g} s"
            for call in life.open.values()
            if at - call.at > call.bound_s + call.margin_s + SLACK_S + life.slept_s[call.number]
        ]

    async def live(self, pid: int, lines: asyncio.StreamReader) -> None:
        """Listen to a process to its end, and order another."""
        life = self.life = Life(pid)
        if self.ending:
            self._signal(signal.SIGTERM)
        with self.log.with_suffix(".jsonl").open("ab") as story:
            while line := await lines.readline():
                if line.endswith(b"\n"):
                    story.write(line)
                    self._take(life, _reports.decode(line))
        life.over = True
        if not life.killed and not life.closed:
            self._findings.wrong(f"{self.name} ended by itself: see {self.log}")
        if life.found is not None:
            self._unsure |= {call.shard for call in life.open.values() if call.shard is not None}
        if self.ending:
            self.gone.set()
        else:
            self._start(self)

    def _take(self, life: Life, report: reports.AnyReport) -> None:
        findings = self._findings
        match report:
            case reports.Begun():
                life.open[report.number] = report
            case reports.Ended():
                del life.open[report.number]
                self._judge(report, life.slept_s[report.number])
            case reports.Found():
                life.found = report
                self._judge_found(report)
            case reports.Compared():
                findings.compared[report.moment] += 1
                findings.nbytes += report.nbytes
                if report.wrong is not None:
                    findings.unequal += 1
                    where = f"{self.name}: shard {report.shard} at version {report.version} ({report.moment})"
                    findings.wrong(f"{where}: {report.wrong}")
                self._know(report.shard, report.version)
                if report.moment == "commit":
                    if report.version < (before := self.newest.get(report.shard, (0, 0.0))[0]):
                        findings.wrong(f"{self.name}: shard {report.shard} read {report.version} after {before}")
                    self.newest[report.shard] = (report.version, report.at)
                    self.commits += 1
            case reports.Published():
                self.published.append(report)
            case reports.Closed():
                life.closed = True

    def _judge(self, report: reports.Ended, slept_s: float) -> None:
        findings = self._findings
        findings.calls[report.call, report.outcome] += 1
        findings.slowest_s[report.call] = max(findings.slowest_s.get(report.call, 0.0), report.took_s)
        if report.outcome != "done":
            findings.messages[f"{report.call}: {report.outcome}: {report.message}"[:300]] += 1
        if report.took_s > report.bound_s + report.margin_s + SLACK_S + slept_s:
            findings.wrong(f"{self.name}: {report.call} was answered after {report.took_s:.2f} s: {report}")
        if report.outcome not in {"done", *findings.excused}:
            findings.wrong(f"{self.name}: {report.call} raised {report.outcome}: {report.message}")
        if report.shard is not None and self._held is not None:
            if report.call == "unpublish" and report.outcome in {"done", "NotPublished"}:
                self._know(report.shard, None)
            elif report.outcome != "done":
                # What a failed call has left is told by the next comparison.
                self._unsure.add(report.shard)

    def _know(self, shard: int, version: int | None) -> None:
        if self._held is not None:
            self._held[shard] = version
            self._unsure.discard(shard)

    def _judge_found(self, found: reports.Found) -> None:
        """A worker that comes back finds what it left; one that was killed within a call may find its result."""
        findings, before, unsure = self._findings, self._held, self._unsure
        self._held, self._unsure = dict(found.versions), set()
        if before is None:
            return
        findings.attached_again += 1
        if found.fresh:
            findings.wrong(f"{self.name} came back and found new memory instead of its own")
        for index, version in found.versions.items():
            left = before[index]
            if version == left:
                findings.found_unchanged += 1
            elif index not in unsure:
                findings.wrong(f"{self.name} left shard {index} at version {left} and found version {version}")
            elif version is not None and left is not None and version < left:
                findings.wrong(f"{self.name} left shard {index} at version {left} and found the older {version}")


class Fleet:
    """All workers of a run, and the nursery that they come from."""

    def __init__(self, directory: Path, findings: Findings) -> None:
        self.members: dict[str, Member] = {}
        self._directory, self._findings = directory, findings
        self._nursery: asyncio.subprocess.Process | None = None
        self._server: asyncio.Server | None = None

    def add(self, name: str, config: Config) -> None:
        log = self._directory / "logs" / f"worker-{name}.log"
        self.members[name] = Member(name, config, log, self._findings, self._order)

    def add_single(
        self,
        name: str,
        agent: str,
        *,
        job: str,
        seed: int,
        nbytes: int,
        think_s_max: float = THINK_S_MAX,
        netns: str = "",
    ) -> None:
        """Add a worker whose replica is one shard and has its name; who is called "trainer" trains."""
        config = Config(
            job=job,
            seed=seed,
            role=TRAINER if name == TRAINER else "rollout",
            replica=name,
            indexes=(0,),
            shards=1,
            nbytes=nbytes,
            agent=agent,
            think_s_max=think_s_max,
            netns=netns,
        )
        self.add(name, config)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._hear, self._socket, limit=LINE_BYTES_MAX)
        self._nursery = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid())),
            *(sys.executable, "-m", "tests.chaos.nursery"),
            # One thread each: the machine is shared by all.
            env={**os.environ, "TENSORHUB_DIR": str(self._directory), "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
        )
        for member in self.members.values():
            self._order(member)

    async def end(self) -> None:
        await asyncio.gather(*(member.end() for member in self.members.values()))
        if self._nursery is not None and self._nursery.stdin is not None:
            self._nursery.stdin.close()
            await self._nursery.wait()
        if self._server is not None:
            self._server.close()

    @property
    def _socket(self) -> str:
        return str(self._directory / "fleet.sock")

    def _order(self, member: Member) -> None:
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        order = Order(name=member.name, config=member.config, socket=self._socket, log=str(member.log))
        self._nursery.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _hear(self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            born = _reports.decode(await lines.readline())
            assert isinstance(born, reports.Born)
            await self.members[born.name].live(born.pid, lines)
        except Exception as why:  # noqa: BLE001 (a fault of the script must not pass for a quiet worker)
            self._findings.wrong(f"the script failed: {why!r}")
        finally:
            writer.close()

    async def progress(self, after: float, bound_s: float) -> float | None:
        """Wait for a version whose publication began after a moment, and which everybody has read since.

        Returns when that was, or None when it was not within the bound.
        """
        deadline = after + bound_s
        while True:
            if self.has_progressed(after):
                return time.monotonic()
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(LOOK_S)

    def has_progressed(self, after: float) -> bool:
        """Tell whether everybody has read a version whose publication began after a moment."""
        version = self.version_after(after)
        return version is not None and all(
            member.newest.get(index, (0, 0.0))[0] >= version
            for member in self.members.values()
            if member.config.role != TRAINER
            for index in member.config.indexes
        )

    def version_after(self, after: float) -> int | None:
        """Return the first version whose publication began after a moment."""
        all_published = (each for member in self.members.values() for each in member.published)
        return min((each.version for each in all_published if each.began_at > after), default=None)

    def reads(self) -> int:
        """Return how many reads have returned a version."""
        return sum(member.commits for member in self.members.values() if member.config.role != TRAINER)

    def late_calls(self) -> list[str]:
        return [late for member in self.members.values() for late in member.late_calls(time.monotonic())]

    def story(self, after: float) -> str:
        """Say who is how far, for a run that makes no progress."""
        lines = [f"a version published since the kill: {self.version_after(after)}"]
        for member in self.members.values():
            life = member.life
            calls = (
                [f"{call.call} for {time.monotonic() - call.at:.1f} s" for call in life.open.values()] if life else []
            )
            lines.append(
                f"{member.name} (pid {member.pid}, attached {member.is_attached}): newest {member.newest}, "
                f"in calls: {', '.join(calls) or 'none'}"
            )
        return "\n".join(lines)
