"""The nodes of a NATS cluster and the registries are struck while a trainer publishes and readers fetch: a table.

    python -m tests.chaos.cluster [--blows nats-0,leader,…] [--stop-s 10] [--json FILE]

A hub of three nodes (each log on all three), three registries and three agents. Each node in turn is killed, the one
that leads the job's log in particular; one is stopped for ten seconds, and so is that leader; two are stopped, so that
there is no majority; all are killed at once. The registry that leads is killed, by itself and with the log's leader,
and stopped for far longer than its lease. After each blow a version that is begun afterwards must be published and read
by both readers within a bound. Nobody may hold a wrong byte, read an older version than before or be answered late;
each command that was acknowledged stands in the log once and has one whole outcome; versions only rise; no agent is
lost. Exit code 1 and the story of each finding otherwise.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.chaos.content import MIB
from tests.chaos.fleet import TRAINER, Findings, Fleet
from tests.chaos.prober import Prober
from tests.chaos.two_holders import kill, wake
from tests.chaos.verdict import LogVerdict
from tests.chaos.whole_log import read_whole_log
from tests.stopping import stop

from tensorhub._control import hub_file
from tensorhub.local.hub import LocalHub
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.queries import Status
from tensorhub_common.protocol.subjects import log_stream, query_subject

JOB: Final = "cluster"
SEED: Final = 11
NODES: Final = 3
WORKERS: Final = {TRAINER: "agent-0", "reader-1": "agent-1", "reader-2": "agent-2"}

PROGRESS_S: Final = 30.0
"""After a blow, or the waking, a version that was begun afterwards has been published and read within this. A cluster
takes 4 to 9 s to elect another leader."""

WHOLE_S: Final = 60.0
"""A node that was killed or woken has all of the log again within this."""

LEADS_S: Final = 15.0
ASK_S: Final = 1.0
LOOK_S: Final = 0.05
THINK_S_MAX: Final = 0.1

_unanswered: Final = (NoBus, NoAnswer, NoResponder)


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one blow. `recovered_s`: from the blow or the waking; None if nothing got on within the bound."""

    blow: str
    recovered_s: float | None
    meanwhile: int
    """How many reads were committed while the victim was stopped."""
    errors: dict[str, int]
    findings: int


@dataclass(slots=True)
class Cluster:
    """One run of the script."""

    directory: Path
    blows: tuple[str, ...]
    nbytes: int
    stop_s: float
    verbose: bool = False
    findings: Findings = field(default_factory=Findings)
    struck: list[Struck] = field(default_factory=list)
    log: LogVerdict = field(default_factory=LogVerdict)

    async def go(self) -> None:
        """Strike each blow, and read the log at the end. What was found stands in `findings.wrongs`."""
        async with AsyncExitStack() as stack:
            up = LocalHub(self.directory, agents=3, registries=3, nats_nodes=NODES, environment=dict(os.environ))
            hub = await stack.enter_async_context(up)
            key = Path(hub.hub.credentials).with_name("admin.nk")
            bus = await stack.enter_async_context(await connect(hub.hub.nats_all, name="chaos", credentials=key))
            prober = await stack.enter_async_context(Prober(bus, JOB))
            fleet = self._fleet()
            await fleet.start()
            stack.push_async_callback(fleet.end)
            if await fleet.progress(time.monotonic(), PROGRESS_S) is None:
                self.findings.wrong(f"nothing was published and read at the beginning:\n{fleet.story(0)}")
                return
            for blow in self.blows:
                await self._strike(blow, fleet, bus)
                if not (await self._replicas(bus)).get("leader"):
                    # A log that stays without a leader is a finding, and leaves nothing to strike or to read.
                    return
            await fleet.end()
            await prober.stop()
            self.log = await read_whole_log(bus, JOB, self.directory / "logs" / "job.log")
        self.findings.wrongs += self.log.wrongs + self.log.lost(prober.acknowledged) + prober.wrongs
        if lost := self.log.kinds.get("agent.lost", 0):
            self.findings.wrong(f"{lost} agents were taken for lost, and none was struck")
        if list(self.log.roots) != sorted(self.log.roots):
            self.findings.wrong(f"versions did not only rise: {list(self.log.roots)}")

    def _fleet(self) -> Fleet:
        fleet = Fleet(self.directory, self.findings)
        for name, agent in WORKERS.items():
            fleet.add_single(name, agent, job=JOB, seed=SEED, nbytes=self.nbytes, think_s_max=THINK_S_MAX)
        return fleet

    # Striking.

    async def _strike(self, blow: str, fleet: Fleet, bus: Bus) -> None:
        before, errors = len(self.findings.wrongs), self.findings.calls.copy()
        how, victims = await self._choose(blow, bus)
        leader = await self._leader(bus) if blow == "registry-stopped" else ""
        pids = [self._pids()[victim] for victim in victims]
        meanwhile = 0
        for pid in pids:
            how(pid)
        if how is stop:
            reads = fleet.reads()
            await self._watched(fleet, asyncio.sleep(self.stop_s))
            meanwhile = fleet.reads() - reads
            for pid in pids:
                wake(pid)
        at = time.monotonic()
        if leader and await self._leader(bus) == leader:
            self.findings.wrong(f"{leader} slept for {self.stop_s:g} s, and leads as if it had not")
        recovered = await self._watched(fleet, fleet.progress(at, PROGRESS_S))
        if recovered is None:
            self.findings.wrong(f"{blow}: nothing got on within {PROGRESS_S:g} s\n{fleet.story(at)}")
        await self._whole(bus)
        told = self.findings.calls - errors
        struck = Struck(
            blow=f"{blow} ({', '.join(victims)}): {how.__name__}",
            recovered_s=None if recovered is None else recovered - at,
            meanwhile=meanwhile,
            errors={f"{call} {out}": count for (call, out), count in sorted(told.items()) if out != "done"},
            findings=len(self.findings.wrongs) - before,
        )
        self.struck.append(struck)
        if self.verbose:
            print(line_of(struck), flush=True)

    async def _choose(self, blow: str, bus: Bus) -> tuple[Callable[[int], None], list[str]]:
        """Return what a blow's name means now."""
        log_leader = (await self._replicas(bus))["leader"].replace("tensorhub", "nats")
        others = [name for name in (f"nats-{index}" for index in range(NODES)) if name != log_leader]
        match blow:
            case "leader":
                return kill, [log_leader]
            case "leader-stopped":
                return stop, [log_leader]
            case "other-stopped":
                return stop, others[:1]
            case "two-stopped":
                return stop, [log_leader, others[0]]
            case "all":
                return kill, [log_leader, *others]
            case "leader-and-registry":
                return kill, [log_leader, await self._leader(bus)]
            case "registry":
                return kill, [await self._leader(bus)]
            case "registry-stopped":
                return stop, [await self._leader(bus)]
            case _:
                return kill, [blow]

    def _pids(self) -> dict[str, int]:
        return hub_file.read(self.directory).pids

    # Looking.

    async def _watched(self, fleet: Fleet, work: Awaitable[Any]) -> Any:
        """Do something, and look meanwhile whether anybody waits for too long."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            self.findings.wrongs += fleet.late_calls()
        return task.result()

    async def _leader(self, bus: Bus) -> str:
        """Return the registry that answers."""
        deadline = time.monotonic() + LEADS_S
        while time.monotonic() < deadline:
            try:
                return msgspec.json.decode(
                    await bus.request(query_subject(JOB, "status"), b"", ASK_S), type=Status
                ).registry
            except (*_unanswered, msgspec.MsgspecError):
                await asyncio.sleep(LOOK_S)
        self.findings.wrong(f"no registry answered within {LEADS_S:g} s")
        return ""

    async def _replicas(self, bus: Bus) -> dict[str, Any]:
        """Wait until all nodes have all of the log, and return what JetStream says of them."""
        deadline = time.monotonic() + WHOLE_S
        while True:
            try:
                info = await api.api(bus, f"STREAM.INFO.{log_stream(JOB)}", None, ASK_S)
                found: dict[str, Any] = info["cluster"]
                peers = found.get("replicas") or []
                if found.get("leader") and len(peers) == NODES - 1 and all(peer["current"] for peer in peers):
                    return found
            except TensorHubError:
                found = {}
            if time.monotonic() > deadline:
                self.findings.wrong(f"the log is not on all nodes again within {WHOLE_S:g} s: {found}")
                return found
            await asyncio.sleep(LOOK_S)

    async def _whole(self, bus: Bus) -> None:
        await self._replicas(bus)


def line_of(struck: Struck) -> str:
    """Say what became of a blow, in one line."""
    recovered = "NOTHING GOT ON" if struck.recovered_s is None else f"recovered in {struck.recovered_s:5.2f} s"
    errors = ", ".join(f"{error} {count}" for error, count in struck.errors.items()) or "no error told"
    found = f"  {struck.findings} FINDINGS" if struck.findings else ""
    return f"{struck.blow:42} {recovered}, {struck.meanwhile:3} reads meanwhile; {errors}{found}"


ALL: Final = (
    *(f"nats-{index}" for index in range(NODES)),
    "leader",
    "leader-stopped",
    "other-stopped",
    "two-stopped",
    "all",
    "leader-and-registry",
    "registry",
    "registry-stopped",
)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blows", default=",".join(ALL), help="separated by commas")
    parser.add_argument("--stop-s", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-cluster-"))
    run = Cluster(directory, tuple(args.blows.split(",")), args.mib * MIB, args.stop_s, verbose=True)
    await run.go()
    found = run.findings
    print(f"{found.compared_in_all()}; {found.slowest_calls()}")
    print(f"log: {run.log.last} entries, {len(run.log.commands)} commands, {len(run.log.roots)} versions")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(run.struck), indent=1) + b"\n")
    for message, count in found.messages.most_common(20):
        print(f"  {count:4} × {message}")
    for wrong in found.wrongs[:50]:
        print(f"- {wrong}")
    print(f"{len(run.struck)} blows, " + (f"{len(found.wrongs)} FINDINGS" if found.wrongs else "no finding"))
    if found.wrongs:
        print(f"the logs are in {directory}/logs")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
