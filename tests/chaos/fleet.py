"""The worker processes of a scenario: started again when they were killed, listened to, and judged by what they say."""

import asyncio
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from tests.chaos import reports
from tests.chaos.worker import Config
from tests.kit.processes import Peer, conversing, forked
from tests.kit.waiting import wake
from tests.stopping import stop

PROGRAM: Final = "from tests.chaos.worker import main; main()"
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
    peer: Peer
    open: dict[int, reports.Begun] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Calls under way that were reported as late."""
    found: reports.Found | None = None
    begun: bool = False
    """It has reported something, so SIGTERM lets it end in good order."""
    closed: bool = False
    killed: bool = False
    stopped_at: float | None = None
    slept_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By call for how long the process was stopped meanwhile; it is answered as much later."""


class Member:
    """One worker, through all its processes."""

    def __init__(self, name: str, config: Config, directory: Path, findings: Findings) -> None:
        self.name, self.config, self._directory, self._findings = name, config, directory, findings
        self.life: Life | None = None
        self.published: list[reports.Published] = []
        self.newest: dict[int, tuple[int, float]] = {}
        """By shard the newest version that a read has returned, and when."""
        self.commits = 0
        """How many reads have returned a version, over all shards."""
        self._ending = False
        self._held: dict[int, int | None] | None = None
        self._unsure: set[int] = set()
        """Shards about which a call that failed or was cut short leaves open what they hold."""

    @property
    def pid(self) -> int | None:
        return None if self.life is None else self.life.peer.pid

    async def run(self) -> None:
        environment = {**os.environ, "TENSORHUB_DIR": str(self._directory), "OMP_NUM_THREADS": "1"}
        start = forked(PROGRAM, (msgspec.json.encode(self.config).decode(),), environment)
        log = self._directory / "logs" / f"worker-{self.name}.log"
        while not self._ending:
            async with conversing(self.name, start, log) as peer:
                await self._listen(peer, log)

    async def _listen(self, peer: Peer, log: Path) -> None:
        life = self.life = Life(peer)
        with log.with_suffix(".jsonl").open("ab") as story:
            while line := await peer.read():
                # The last line of a process that was killed may lack its end.
                if line.endswith(b"\n"):
                    story.write(line)
                    self._take(life, _reports.decode(line))
        self.life = None
        if not life.killed and not life.closed:
            self._findings.wrong(f"{self.name} ended by itself: see {log}")
        if life.found is not None:
            self._unsure |= {call.shard for call in life.open.values() if call.shard is not None}

    def kill(self) -> None:
        assert self.life is not None
        self.life.killed = True
        self.life.peer.signal(signal.SIGKILL)

    def stop(self) -> None:
        assert self.life is not None
        self.life.stopped_at = time.monotonic()
        stop(self.life.peer.pid)

    def wake(self) -> None:
        life = self.life
        if life is not None and life.stopped_at is not None:
            for number in life.open:
                life.slept_s[number] += time.monotonic() - life.stopped_at
            life.stopped_at = None
            wake(life.peer.pid)

    def is_calling(self, call: str) -> bool:
        return self.life is not None and any(each.call == call for each in self.life.open.values())

    def ask_to_end(self) -> None:
        self._ending = True
        if self.life is not None:
            self.life.peer.signal(signal.SIGTERM)

    def late_calls(self, at: float) -> list[str]:
        """Name the calls under way that have run out of their bound, each once."""
        life = self.life
        if life is None or life.stopped_at is not None:
            return []
        late = [
            call
            for call in life.open.values()
            if at - call.at > call.bound_s + call.margin_s + SLACK_S + life.slept_s[call.number]
            and call.number not in life.late
        ]
        life.late |= {call.number for call in late}
        return [
            f"{self.name}: {call.call} has been under way for {at - call.at:.1f} s, with a bound of {call.bound_s:g} s"
            for call in late
        ]

    def _take(self, life: Life, report: reports.AnyReport) -> None:
        findings = self._findings
        life.begun = True
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
                # The next comparison says what a failed call has left.
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
    def __init__(self, directory: Path, configs: Iterable[tuple[str, Config]], findings: Findings) -> None:
        self._findings = findings
        self.members = {name: Member(name, config, directory, findings) for name, config in configs}
        self._runs: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._runs = {name: asyncio.create_task(member.run()) for name, member in self.members.items()}

    async def end(self) -> None:
        for name, member in self.members.items():
            while not self._runs[name].done() and (member.life is None or not member.life.begun):  # noqa: ASYNC110 (only its reports show it)
                await asyncio.sleep(LOOK_S)
            member.ask_to_end()
        if not self._runs:
            return
        _, late = await asyncio.wait(self._runs.values(), timeout=END_S)
        for name, run in self._runs.items():
            if run in late:
                self._findings.wrong(f"{name} did not end within {END_S:g} s of SIGTERM")
                run.cancel()
        for end in await asyncio.gather(*self._runs.values(), return_exceptions=True):
            if isinstance(end, Exception):
                # A fault of the script must not pass for a quiet worker.
                self._findings.wrong(f"the script failed: {end!r}")

    @property
    def readers(self) -> list[Member]:
        return [member for member in self.members.values() if not member.config.trains]

    async def progress(self, after: float, bound_s: float) -> float | None:
        """Wait for a version whose publication began after a moment, and which every reader has read since.

        Returns when that was, or None when it was not within the bound.
        """
        while not self.has_progressed(after):
            if time.monotonic() >= after + bound_s:
                return None
            await asyncio.sleep(LOOK_S)
        return time.monotonic()

    def has_progressed(self, after: float) -> bool:
        version = self.version_after(after)
        return version is not None and all(
            member.newest.get(index, (0, 0.0))[0] >= version
            for member in self.readers
            for index in member.config.indexes
        )

    def version_after(self, after: float) -> int | None:
        all_published = (each for member in self.members.values() for each in member.published)
        return min((each.version for each in all_published if each.began_at > after), default=None)

    def reads(self) -> int:
        return sum(member.commits for member in self.readers)

    def late_calls(self) -> list[str]:
        return [late for member in self.members.values() for late in member.late_calls(time.monotonic())]

    def state(self, after: float) -> str:
        """Describe how far each worker is, for a run that makes no progress."""
        lines = [f"a version published since the blow: {self.version_after(after)}"]
        for member in self.members.values():
            calls = [] if member.life is None else member.life.open.values()
            under_way = ", ".join(f"{call.call} for {time.monotonic() - call.at:.1f} s" for call in calls)
            lines.append(f"{member.name} (pid {member.pid}): newest {member.newest}, in calls: {under_way or 'none'}")
        return "\n".join(lines)
