"""Errors that escape in an agent's own parts: each has an owner, and none ends unnoticed what others wait for."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.control import heartbeat as beats
from tensorhub_agent.control.command_queue import CALLS_WAIT_MAX, WAITING_MAX, CommandQueue
from tensorhub_agent.control.heartbeat import HeartbeatThread
from tensorhub_agent.runtime.troubles import TOLD_S, TROUBLES, TroubleKind, TroubleTracker
from tensorhub_agent.storage.incarnation import IncarnationCounter
from tensorhub_common.bus.errors import MessageTooLarge
from tensorhub_common.config.settings import load
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.log.commands import Drained, Sender
from tensorhub_common.runtime.supervision import Fault, Supervisor, set_last_resort

WAIT_S = 10.0


class LastResort:
    """Stands for the program's `main`: what comes here ends the process."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.came = asyncio.Event()

    def take(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.came.set()

    async def wait(self) -> Fault:
        async with asyncio.timeout(WAIT_S):
            await self.came.wait()
        return self.faults[0]


@pytest.fixture
def last_resort() -> Iterator[LastResort]:
    resort = LastResort()
    set_last_resort(resort.take)
    yield resort
    set_last_resort(None)


async def test_a_beat_that_ends_ends_the_process(last_resort: LastResort, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(beats, "connect", fails)
    thread = HeartbeatThread(load({"TENSORHUB_NATS": "nats://127.0.0.1:1", "TENSORHUB_AGENT_ID": "a"}))
    thread.start()
    assert "the beat: tensorhub-beat failed: ArithmeticError('planted')" in str(await last_resort.wait())
    thread.stop()


async def test_a_thread_of_the_copy_pool_that_ends_ends_the_process(last_resort: LastResort) -> None:
    class Broken:
        def run_task(self, _: object) -> bool:
            raise ArithmeticError("planted")

    pool = CopyPool(1)
    await pool.background(lambda: None)
    pool._turns.put(Broken())  # type: ignore[arg-type]
    assert (await last_resort.wait()).owner == "copying"
    pool.close()


# Lanes.


@pytest.fixture
def faults() -> list[str]:
    return []


class Log:
    """A job's log that takes nothing."""

    job = "run-7"

    def __init__(self, why: Exception) -> None:
        self.why = why
        self.asked = 0

    async def append(self, *_: Any) -> None:
        self.asked += 1
        raise self.why


def command(n: int) -> Drained:
    return Drained(model="m", replica="r", shard=0, by=Sender("agent-0/1", 1, n))


async def test_a_lane_without_room_gives_the_incarnation_up(faults: list[str]) -> None:
    """It never leaves out one command and says the next."""
    work, given_up = Supervisor("test", lambda fault: faults.append(str(fault))), list[int]()
    lanes = CommandQueue(Log(RegistryUnavailable("no")), None, work, lambda: given_up.append(1))  # type: ignore[arg-type]
    for n in range(WAITING_MAX):
        lanes.say(command(n))
    assert given_up == []
    assert lanes.waiting("agent-0/1") == WAITING_MAX > CALLS_WAIT_MAX
    lanes.say(command(WAITING_MAX))
    assert given_up == [1]
    lanes.forget()
    assert lanes.waiting("agent-0/1") == 0
    await work.close()
    assert faults == []


async def test_a_command_that_no_message_holds_is_a_fault(faults: list[str]) -> None:
    came = asyncio.Event()

    def fault(each: Fault) -> None:
        faults.append(str(each))
        came.set()

    log = Log(MessageTooLarge("2 MiB"))
    lanes = CommandQueue(log, None, Supervisor("job run-7", fault), lambda: None)  # type: ignore[arg-type]
    lanes.say(command(1))
    lanes.say(command(2))
    async with asyncio.timeout(WAIT_S):
        await came.wait()
    assert (len(faults), log.asked) == (1, 1), "the second was said although the first is missing"


# A full disk.


def test_a_full_disk_keeps_no_agent_from_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incarnation = IncarnationCounter(tmp_path)
    first = incarnation.next()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        second = incarnation.next()
        (trouble,) = TROUBLES.told()
    assert second > first
    assert (trouble.kind, "make room there" in trouble.why) == ("no-room-for-state", True)
    assert incarnation.next() > second
    assert TROUBLES.told() == ()


def test_a_trouble_is_told_until_it_is_over_or_long_ago() -> None:
    now = [1000.0]
    troubles = TroubleTracker(lambda: now[0])
    troubles.note(TroubleKind.MEMORY, "first")
    now[0] += 1
    troubles.note(TroubleKind.MEMORY, "second")
    troubles.note(TroubleKind.COPY, "third")
    assert [(each.kind, each.why, each.since) for each in troubles.told()] == [
        ("no-memory", "second", 1000.0),
        ("no-copy", "third", 1001.0),
    ]
    troubles.over(TroubleKind.COPY)
    troubles.over(TroubleKind.STATE)
    now[0] += TOLD_S - 1
    assert [each.kind for each in troubles.told()] == ["no-memory"]
    now[0] += 1
    assert troubles.told() == ()
    troubles.note(TroubleKind.MEMORY, "again")
    assert troubles.told()[0].since == now[0]
