"""Where the time of a read goes, by the job's own log: every stage of every read stands there with JetStream's time.

round   from when the version exists and the shard wants it, to the decision which version it reads
lease   to the shard's word that it has been planned and holds a lease on its source
start   to the log's word that all shards have theirs
wire    to the shard's word that it is filled and verified
ready   to the log's word that the replica is ready
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.fleet import JOB
from tensorhub_common.bus.connection import connect
from tensorhub_common.bus.entry import Entry
from tensorhub_common.bus.joblog import JobLog
from tensorhub_common.subjects import CommandSubject, EventSubject, parse

STAGES: Final = ("round", "lease", "start", "wire", "ready")
_AT: Final = ("decided", "granted", "started", "filled", "ready")


@dataclass(slots=True)
class Timeline:
    """What a part of a log says: the stages of each read, and of each publication how long the log took over it."""

    stages: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in STAGES})
    published: list[float] = field(default_factory=list)
    entries: int = 0

    def medians_ms(self) -> dict[str, float]:
        """Return the median of each stage, in ms."""
        return {stage: statistics.median(times) * 1000 for stage, times in self.stages.items() if times}


async def end_of_log(nats: str) -> int:
    """Return the number of the log's last entry."""
    async with await connect(nats, name="bench") as bus:
        return await JobLog(bus, JOB).last_seq()


async def timeline(nats: str, after: int) -> Timeline:
    """Read the log behind entry `after` up to its present end."""
    async with await connect(nats, name="bench") as bus:
        log = JobLog(bus, JOB)
        last = await log.last_seq()
        entries: list[Entry] = []
        if last > after:
            async with aclosing(log.follow(after + 1)) as following:
                async for entry in following:
                    entries.append(entry)
                    if entry.seq >= last:
                        break
    return of(entries)


def of(entries: Iterable[Entry]) -> Timeline:
    """Sort entries into stages."""
    found = Timeline()
    times: dict[str, dict[str, float]] = {}
    offered = available = 0.0
    for entry in entries:
        found.entries += 1
        body: Mapping[str, Any] = json.loads(entry.data)
        of_replica = times.setdefault(str(body.get("replica", "")), {})
        match parse(entry.subject):
            case CommandSubject(verb="ready"):
                offered = entry.time
            case CommandSubject(verb="want"):
                of_replica.clear()
                of_replica["wanted"] = entry.time
            case CommandSubject(verb=verb) if verb in _AT:
                of_replica[verb] = entry.time
            case EventSubject(noun="version", what="published"):
                found.published.append(entry.time - offered)
                available = entry.time
            case EventSubject(noun="round" | "replica", what=what) if what in _AT:
                of_replica[what] = entry.time
                if what == "ready" and "wanted" in of_replica:
                    _add(found, of_replica, available)
    return found


def _add(found: Timeline, at: dict[str, float], available: float) -> None:
    begin = max(at["wanted"], available)
    for stage, end in zip(STAGES, _AT, strict=True):
        if end in at:
            found.stages[stage].append(at[end] - begin)
            begin = at[end]
    at.clear()
