"""The nodes of a NATS cluster and the registries are struck while a trainer publishes and readers fetch: a table.

    python -m tests.chaos.cluster [--blows nats-0,leader,…] [--stop-s 10] [--json FILE]

A hub of three nodes, registries and agents. Nodes are killed and stopped: each, the log's leader, two, all; and so is
the registry that leads. After each blow a version begun afterwards must be published and read by both readers within a
bound; versions only rise; no agent is lost.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.chaos.content import MIB
from tests.chaos.scenario import Blow, Scenario, Struck, arguments, conclude, trainer_and_readers, write_json
from tests.chaos.worker import Config
from tests.kit.waiting import kill
from tests.stopping import stop

from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.queries import Status
from tensorhub_common.protocol.subjects import log_stream, query_subject

NODES: Final = 3
WHOLE_S: Final = 60.0
"""A node that was killed or woken has all of the log again within this."""

LEADS_S: Final = 15.0
ASK_S: Final = 1.0
LOOK_S: Final = 0.05


@dataclass(kw_only=True)
class Cluster(Scenario):
    blows: tuple[str, ...]
    stop_s: float
    verbose: bool = False
    struck_by: list[Struck] = field(default_factory=list)

    progress_s = 30.0
    """A cluster takes 4 to 9 s to elect another leader."""

    def workers(self) -> list[tuple[str, Config]]:
        return trainer_and_readers(self, ("agent-0", "agent-1", "agent-2"), think_s_max=0.1)

    async def go(self) -> None:
        await self.play(agents=3, registries=3, nats_nodes=NODES)
        if lost := self.log.kinds.get("agent.lost", 0):
            self.findings.wrong(f"{lost} agents were taken for lost, and none was struck")
        if list(self.log.roots) != sorted(self.log.roots):
            self.findings.wrong(f"versions did not only rise: {list(self.log.roots)}")

    async def script(self) -> None:
        """Strike each blow; a log that stays without a leader leaves nothing to strike."""
        for name in self.blows:
            blow, victims = await self._choose(name)
            told = self.telling(victim=f"{name} ({', '.join(victims)})", blow=blow.__name__)
            leader = await self._leader() if name == "registry-stopped" else ""
            at, meanwhile = await self.struck(victims, blow, self.stop_s)
            if leader and await self._leader() == leader:
                self.findings.wrong(f"{leader} slept for {self.stop_s:g} s, and leads as if it had not")
            recovered = await self.progress(at, name)
            whole = await self._replicas()
            self.struck_by.append(told(recovered, meanwhile))
            if self.verbose:
                print(self.struck_by[-1], flush=True)
            if not whole.get("leader"):
                return

    async def _choose(self, blow: str) -> tuple[Blow, list[str]]:
        log_leader = (await self._replicas())["leader"].replace("tensorhub", "nats")
        others = [name for name in (f"nats-{index}" for index in range(NODES)) if name != log_leader]
        registry = await self._leader() if "registry" in blow else ""
        victims = {
            "leader": [log_leader],
            "other": others[:1],
            "two": [log_leader, others[0]],
            "all": [log_leader, *others],
            "leader-and-registry": [log_leader, registry],
            "registry": [registry],
        }.get(blow.removesuffix("-stopped"), [blow])
        return stop if blow.endswith("-stopped") else kill, victims

    async def _leader(self) -> str:
        deadline = time.monotonic() + LEADS_S
        async with await self.hub.bus(self.hub.admin_key) as bus:
            while time.monotonic() < deadline:
                try:
                    answer = await bus.request(query_subject(self.job, "status"), b"", ASK_S)
                    return msgspec.json.decode(answer, type=Status).registry
                except (NoBus, NoAnswer, NoResponder, msgspec.MsgspecError):
                    await asyncio.sleep(LOOK_S)
        self.findings.wrong(f"no registry answered within {LEADS_S:g} s")
        return ""

    async def _replicas(self) -> dict[str, Any]:
        """Wait until all nodes have all of the log, and return what JetStream says of them."""
        deadline = time.monotonic() + WHOLE_S
        found: dict[str, Any] = {}
        async with await self.hub.bus(self.hub.admin_key) as bus:
            while time.monotonic() < deadline:
                try:
                    found = (await api.api(bus, f"STREAM.INFO.{log_stream(self.job)}", None, ASK_S))["cluster"]
                    peers = found.get("replicas") or []
                    if found.get("leader") and len(peers) == NODES - 1 and all(peer["current"] for peer in peers):
                        return found
                except TensorHubError:
                    found = {}
                await asyncio.sleep(LOOK_S)
        self.findings.wrong(f"the log is not on all nodes again within {WHOLE_S:g} s: {found}")
        return found


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
    args = arguments(__doc__, blows=",".join(ALL), stop_s=10.0, mib=16, json="")
    run = Cluster(
        directory=Path(tempfile.mkdtemp(prefix="tensorhub-cluster-")),
        nbytes=args.mib * MIB,
        blows=tuple(args.blows.split(",")),
        stop_s=args.stop_s,
        verbose=True,
    )
    await run.go()
    print(f"{run.findings.compared_in_all()}; {run.findings.slowest_calls()}")
    print(f"log: {run.log.last} entries, {len(run.log.commands)} commands, {len(run.log.roots)} versions")
    write_json(args.json, run.struck_by)
    print(f"{len(run.struck_by)} blows")
    return conclude(run.findings, run.directory)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
