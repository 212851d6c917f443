"""Agents that behave otherwise than they should, or are held where a test wants to meet them.

    python -m tests.kit.agents KIND

Of the tests over processes this file alone knows the agent's inner names.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import xxhash
from tests.partition.namespaces import LINKS, enter

from tensorhub_agent.app.main import main
from tensorhub_agent.compute.pool import CopyBatch
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import AnyCall, AnyEffect, CallPublish
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.runtime.supervision import Supervisor

FAULTY_MODEL: Final = "fault"
UNOWNED_FAULT_MODEL: Final = "fault-of-no-job"
FAULT: Final = "a planted fault"
TORN: Final = "a piece is torn"
"""What an agent without the drain writes to stderr for each."""

LOOK_S: Final = 0.01
FAR_HOST: Final = "host-1"

_planted: Final = ExitStack()
"""It is never closed: what is planted stays for the whole life of the process."""


def _host() -> int:
    return int(os.environ["TENSORHUB_HOST"].rpartition("-")[2])


def _is_first_life(mark: str) -> bool:
    path = Path(os.environ["TENSORHUB_STATE_DIR"]) / mark
    if path.exists():
        return False
    path.touch()
    return True


def _once() -> None:
    """The agent that MORTAL names has no second life, as on a machine that does not come back."""
    if os.environ["TENSORHUB_AGENT_ID"] == os.environ["MORTAL"] and not _is_first_life("lived"):
        signal.pause()


def _faulty() -> None:
    """When a shard is to be published: of one model the job's core fails; of another, once, a part that no job owns."""
    called = AgentCore.called

    def fail() -> None:
        raise ArithmeticError(FAULT)

    def fails(self: AgentCore, key: ShardKey, call: AnyCall, now: float) -> list[AnyEffect]:
        if key.model == FAULTY_MODEL and isinstance(call, CallPublish):
            fail()
        if key.model == UNOWNED_FAULT_MODEL and isinstance(call, CallPublish) and _is_first_life("failed"):
            Supervisor("a part").call_soon(fail, what="its work")
        return called(self, key, call, now)

    AgentCore.called = fails  # type: ignore[method-assign]


def _without_drain() -> None:
    """`unpublish` neither waits for readers nor breaks their leases, and torn pieces that readers meet are reported."""
    count = Verification.count

    def counted(self: Verification, ranges: Iterable[Range], digests: bytes) -> list[Range]:
        wrong = count(self, ranges, digests)
        if wrong:
            os.write(2, f"{TORN}: {wrong}\n".encode())
        return wrong

    Verification.count = counted  # type: ignore[method-assign]
    from tensorhub_simulator.faultsim.mutants.planting import planted  # noqa: PLC0415 (no other kind needs it)

    _planted.enter_context(planted("no-drain"))


def _held_copying() -> None:
    """The reader's agent copies a part, makes the file `held`, and goes on once there is a file `go-on`.

    The source's begins no second life before there is a file `may-return`.
    """
    folder, works = Path(os.environ["HELD_DIR"]), CopyBatch._do

    def wait_for(file: str) -> None:
        while not (folder / file).exists():
            time.sleep(LOOK_S)

    def held(self: CopyBatch, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        works(self, first, last, hasher)
        if self._from_address is not None:
            (folder / "held").touch()
            wait_for("go-on")

    if os.environ["TENSORHUB_AGENT_ID"] == "agent-1":
        CopyBatch._do = held  # type: ignore[method-assign]
    elif (folder / "held").exists():
        wait_for("may-return")


def _two_sites() -> None:
    """The first NEAR_HOSTS hosts are in the trainer's site, all others in another one."""
    os.environ["TENSORHUB_SITE"] = "near" if _host() < int(os.environ["NEAR_HOSTS"]) else "far"


def _two_namespaces() -> None:
    """Agents of host-1 move into the network namespace FAR_NAMESPACE first. Bytes have a link of their own."""
    side = int(os.environ["TENSORHUB_HOST"] == FAR_HOST)
    if side:
        enter(os.environ["FAR_NAMESPACE"])
    os.environ["TENSORHUB_ADDRESS"] = LINKS["bytes"].address(side)


KINDS: Final[dict[str, Callable[[], None]]] = {
    "once": _once,
    "faulty": _faulty,
    "without-drain": _without_drain,
    "held-copying": _held_copying,
    "two-sites": _two_sites,
    "two-namespaces": _two_namespaces,
}

if __name__ == "__main__":
    # The agent reads its own command line.
    kind = sys.argv.pop(1)
    KINDS[kind]()
    main()
