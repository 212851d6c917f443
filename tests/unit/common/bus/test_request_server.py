"""Questions share what there is: a flood on one subject leaves half of the room, and of the turns, to others."""

import asyncio
from collections.abc import Mapping

from tests.bounds import WAIT_S

from tensorhub_common.bus.errors import MessageTooLarge
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import ERROR_HEADER, RequestServer
from tensorhub_common.runtime.supervision import Supervisor


async def test_a_flood_on_one_subject_leaves_room_for_others() -> None:
    begun: list[str] = []
    busy: list[str] = []
    going_on = asyncio.Event()

    async def handle(question: Message) -> bytes:
        begun.append(question.subject)
        await going_on.wait()
        return b""

    async def respond(question: Message, _: bytes, headers: Mapping[str, str]) -> None:
        if ERROR_HEADER in headers:
            busy.append(question.subject)

    answering = RequestServer(handle, respond, Supervisor("a test's questions"), concurrent_max=4, pending_max=10)
    for subject in ["flood"] * 100 + ["quiet"] * 4:
        answering.take(Message(subject, "_INBOX.a", {}, b""))
    await asyncio.sleep(0)
    assert begun == ["flood"] * 2 + ["quiet"] * 2
    assert busy == ["flood"] * 93
    going_on.set()
    while len(begun) < 11:  # noqa: ASYNC110 (turns of the loop are what it waits for)
        await asyncio.sleep(0)
    assert begun[4:8].count("quiet") == 2, "they take turns"
    await answering.stop()


async def test_an_answer_goes_to_an_inbox_alone() -> None:
    async def handle(question: Message) -> bytes:
        raise AssertionError(question)

    async def respond(question: Message, _: bytes, headers: Mapping[str, str]) -> None:
        raise AssertionError(question, headers)

    answering = RequestServer(handle, respond, Supervisor("a test's questions"), concurrent_max=1, pending_max=1)
    for reply in ("", "tensorhub.v1.j.cmd.publish", "$JS.API.STREAM.DELETE.x", "_INBOX", "_INBOX.>", "_INBOXES.a"):
        answering.take(Message("ask", reply, {}, b""))
    await answering.stop()


async def test_a_question_whose_asker_has_given_up_is_dropped_when_its_turn_comes() -> None:
    """The work would be for nobody, and whoever gave up has asked again behind it."""
    handled: list[str] = []
    said: list[str] = []
    release = asyncio.Event()

    async def handle(question: Message) -> bytes:
        handled.append(question.data.decode())
        await release.wait()
        return question.data

    async def respond(question: Message, body: bytes, headers: Mapping[str, str]) -> None:
        said.append(body.decode())

    answering = RequestServer(
        handle, respond, Supervisor("a test's questions"), concurrent_max=2, pending_max=10, age_s_max=0.05
    )
    for name in ("first", "late"):
        answering.take(Message("a.b", "_INBOX.x.y", {}, name.encode()))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun <= 0.06:
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)
    answering.take(Message("a.b", "_INBOX.x.y", {}, b"again"))
    release.set()
    async with asyncio.timeout(WAIT_S):
        while len(said) < 2:  # noqa: ASYNC110 (turns of the loop are what it waits for)
            await asyncio.sleep(0)
    assert (handled, said, answering.stale) == (["first", "again"], ["first", "again"], 1)
    await answering.stop()


async def test_who_can_not_be_answered_for_length_hears_of_that() -> None:
    """And would otherwise ask the same until its bound, and be told that nobody answers."""
    said: list[tuple[bytes, Mapping[str, str]]] = []

    async def handle(_: Message) -> bytes:
        return b"longer than NATS takes"

    async def respond(_: Message, body: bytes, headers: Mapping[str, str]) -> None:
        if ERROR_HEADER not in headers:
            raise MessageTooLarge("a message of 22 bytes is over the limit")
        said.append((body, headers))

    answering = RequestServer(handle, respond, Supervisor("a test's questions"), concurrent_max=1, pending_max=1)
    answering.take(Message("ask", "_INBOX.a", {}, b""))
    async with asyncio.timeout(WAIT_S):
        while not said:  # noqa: ASYNC110 (turns of the loop are what it waits for)
            await asyncio.sleep(0)
    assert said == [(b"a message of 22 bytes is over the limit", {ERROR_HEADER: "MessageTooLarge"})]
    await answering.stop()
