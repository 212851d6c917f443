"""Questions share what there is: a flood on one subject leaves half of the room, and of the turns, to others."""

import asyncio
from collections.abc import Mapping

from tests.bounds import WAIT_S

from tensorhub_common.bus.errors import MessageTooLarge
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import ERROR_HEADER, RequestServer
from tensorhub_common.runtime.supervision import Supervisor

BODY_BYTES_MAX = 10
TOO_LARGE = "a message of 11 bytes is over the limit"


class Asked:
    """A server of questions that are answered once the test lets it, with what was said."""

    def __init__(self, concurrent_max: int = 1, pending_max: int = 1, age_s_max: float = 60.0) -> None:
        self.begun: list[Message] = []
        self.said: list[tuple[str, bytes, dict[str, str]]] = []
        self.going_on = asyncio.Event()
        self.server = RequestServer(
            self._handle,
            self._respond,
            Supervisor("a test's questions"),
            concurrent_max=concurrent_max,
            pending_max=pending_max,
            age_s_max=age_s_max,
        )

    def ask(self, subject: str, data: bytes = b"", reply: str = "_INBOX.a") -> None:
        self.server.take(Message(subject, reply, {}, data))

    async def until_said(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.said) < count:  # noqa: ASYNC110 (turns of the loop are what it waits for)
                await asyncio.sleep(0)

    async def _handle(self, question: Message) -> bytes:
        self.begun.append(question)
        await self.going_on.wait()
        return question.data

    async def _respond(self, question: Message, body: bytes, headers: Mapping[str, str]) -> None:
        if len(body) > BODY_BYTES_MAX and ERROR_HEADER not in headers:
            raise MessageTooLarge(TOO_LARGE)
        self.said.append((question.subject, body, dict(headers)))


async def test_a_flood_on_one_subject_leaves_room_for_others() -> None:
    asked = Asked(concurrent_max=4, pending_max=10)
    for subject in ["flood"] * 100 + ["quiet"] * 4:
        asked.ask(subject)
    await asyncio.sleep(0)
    assert [each.subject for each in asked.begun] == ["flood"] * 2 + ["quiet"] * 2
    assert [subject for subject, _, headers in asked.said if ERROR_HEADER in headers] == ["flood"] * 93
    asked.going_on.set()
    await asked.until_said(93 + 11)
    assert [each.subject for each in asked.begun[4:8]].count("quiet") == 2, "they take turns"
    await asked.server.stop()


async def test_an_answer_goes_to_an_inbox_alone() -> None:
    asked = Asked()
    for reply in ("", "tensorhub.v1.j.cmd.publish", "$JS.API.STREAM.DELETE.x", "_INBOX", "_INBOX.>", "_INBOXES.a"):
        asked.ask("ask", reply=reply)
    await asyncio.sleep(0)
    assert (asked.begun, asked.said) == ([], [])
    await asked.server.stop()


async def test_a_question_whose_asker_has_given_up_is_dropped_when_its_turn_comes() -> None:
    """The work would be for nobody, and whoever gave up has asked again behind it."""
    asked = Asked(concurrent_max=2, pending_max=10, age_s_max=0.05)
    for name in (b"first", b"late"):
        asked.ask("a.b", name)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun <= 0.06:
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.01)
    asked.ask("a.b", b"again")
    asked.going_on.set()
    await asked.until_said(2)
    assert [each.data for each in asked.begun] == [body for _, body, _ in asked.said] == [b"first", b"again"]
    assert asked.server.stale == 1
    await asked.server.stop()


async def test_who_can_not_be_answered_for_length_hears_of_that() -> None:
    """And would otherwise ask the same until its bound, and be told that nobody answers."""
    asked = Asked()
    asked.going_on.set()
    asked.ask("ask", bytes(BODY_BYTES_MAX + 1))
    await asked.until_said(1)
    assert asked.said == [("ask", TOO_LARGE.encode(), {ERROR_HEADER: "MessageTooLarge"})]
    await asked.server.stop()
