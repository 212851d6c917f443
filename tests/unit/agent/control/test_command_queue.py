"""A log that takes nothing is told once and so is its end, however many lanes wait and however often they try."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tensorhub_agent.control import command_queue
from tensorhub_agent.control.command_queue import CALLS_WAIT_MAX, WAITING_MAX, CommandQueue
from tensorhub_common.bus.errors import LogFull, LogMissing, MessageTooLarge, NoBus, NoResponder
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.log.commands import Drained, Sender
from tensorhub_common.runtime.supervision import Fault, Supervisor

LANES = 10
TRIES = 5
EVER = 10**9
BOUND_S = 60.0


class Log:
    """A job's log that refuses each lane's command a few times, the first lane's more often, and then takes it."""

    job = "run-7"

    def __init__(self, why: Exception, tries: int = TRIES, *, is_reachable: bool = True) -> None:
        self.why, self.tries, self.is_reachable = why, tries, is_reachable
        self.refused: Counter[str] = Counter()
        self.took_all = asyncio.Event()
        self._taken = 0

    async def append(self, _subject: str, _body: bytes, msg_id: str, *_: object) -> None:
        await asyncio.sleep(0)
        lane = msg_id.partition(":")[0]
        if self.refused[lane] < (3 * self.tries if lane == "0" else self.tries):
            self.refused[lane] += 1
            raise self.why
        self._taken += 1
        if self._taken == LANES:
            self.took_all.set()


@pytest.fixture
async def work(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    monkeypatch.setattr(command_queue, "AGAIN_S", 0.0)
    work = Supervisor("test")
    yield work
    await work.close()


async def no_registry() -> None:
    raise NoResponder("nobody listens on ask.open")


def command(lane: int, n: int = 1) -> Drained:
    return Drained(model="m", replica="r", shard=lane, by=Sender(str(lane), 1, n))


async def said(log: Any, work: Supervisor) -> None:
    """Say one command on each lane, and return once the log has all of them."""
    queue = CommandQueue(log, no_registry, work, lambda: None)
    for lane in range(LANES):
        queue.say(command(lane))
    async with asyncio.timeout(BOUND_S):
        await log.took_all.wait()
        while work.tasks:  # noqa: ASYNC110 (nothing tells of their end)
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (LogFull("maximum bytes exceeded"), "maximum bytes exceeded"),
        (LogMissing("gone"), "the job has no log, and no registry makes one: nobody listens on ask.open"),
    ],
)
async def test_many_lanes_and_many_retries_are_two_lines(
    why: Exception, told: str, work: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """That the log takes what other lanes say is no end of it while one is refused."""
    log = Log(why)
    await said(log, work)
    assert log.refused.total() == (LANES + 2) * TRIES
    lost, back = (record.getMessage() for record in caplog.records)
    assert lost == f"the log of job run-7 takes no commands from here, so they wait and are tried again: {told}"
    assert back.startswith("the log of job run-7 takes commands again after ")
    assert back.endswith(f" s; {log.refused.total()} attempts failed")


@pytest.mark.parametrize("why", [NoBus("there is no connection to NATS"), LogMissing("gone")])
async def test_while_nats_is_away_lanes_say_nothing(
    why: Exception, work: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """The bus has said it."""
    await said(Log(why, is_reachable=False), work)
    assert caplog.records == []


async def test_a_lane_without_room_gives_the_incarnation_up(work: Supervisor) -> None:
    """It never leaves out one command and says the next."""
    given_up = list[int]()
    queue = CommandQueue(Log(RegistryUnavailable("no"), EVER), None, work, lambda: given_up.append(1))  # type: ignore[arg-type]
    for n in range(WAITING_MAX):
        queue.say(command(1, n))
    assert given_up == []
    assert queue.waiting("1") == WAITING_MAX > CALLS_WAIT_MAX
    queue.say(command(1, WAITING_MAX))
    assert given_up == [1]
    queue.forget()
    assert queue.waiting("1") == 0


async def test_a_command_that_no_message_holds_is_a_fault() -> None:
    faults, came = list[Fault](), asyncio.Event()

    def fault(each: Fault) -> None:
        faults.append(each)
        came.set()

    log = Log(MessageTooLarge("2 MiB"), EVER)
    queue = CommandQueue(log, None, Supervisor("job run-7", fault), lambda: None)  # type: ignore[arg-type]
    for n in (1, 2):
        queue.say(command(1, n))
    async with asyncio.timeout(BOUND_S):
        await came.wait()
    assert (len(faults), log.refused.total()) == (1, 1), "the second was said although the first is missing"
