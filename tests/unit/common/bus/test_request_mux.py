"""Questions under way: each gets its own answer, and whoever can't get one is told."""

import asyncio
import gc
from typing import Any

import pytest

from tensorhub_common.bus.errors import NoBus, NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_mux import RequestMux


def answer_on(subject: str, body: bytes) -> Message:
    return Message(subject=subject, data=body, reply="", headers={})


async def test_each_question_gets_its_own_answer_and_only_the_first_one_and_only_in_time() -> None:
    awaited = RequestMux("_INBOX.a")
    (inbox, answer), (other_inbox, other) = awaited.begin("one"), awaited.begin("two")
    assert inbox.startswith("_INBOX.a.")
    assert inbox != other_inbox
    awaited.take(answer_on(other_inbox, b"second"))
    awaited.take(answer_on(other_inbox, b"again"))
    awaited.end(inbox)
    awaited.take(answer_on(inbox, b"late"))
    awaited.give_up()
    assert other.result().data == b"second"
    assert not answer.done()


async def test_who_asked_what_is_not_permitted_is_told() -> None:
    awaited = RequestMux("_INBOX.a")
    (_, refused), (_, other) = awaited.begin("tensorhub.V1.one"), awaited.begin("two")
    awaited.refuse("tensorhub.v1.one", NotPermitted("no"))
    assert isinstance(refused.exception(), NotPermitted)
    assert not other.done()


async def test_when_the_connection_breaks_all_are_told() -> None:
    awaited = RequestMux("_INBOX.a")
    (inbox, answered), (_, waiting) = awaited.begin("one"), awaited.begin("two")
    awaited.take(answer_on(inbox, b"in time"))
    awaited.give_up()
    assert answered.result().data == b"in time"
    with pytest.raises(NoBus, match="whether it was done is unknown"):
        waiting.result()


async def test_a_question_that_was_still_being_sent_leaves_no_error_behind() -> None:
    """It waited for room in the socket when the connection broke, so its asker never looks at the answer."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    awaited = RequestMux("_INBOX.a")
    inbox, answer = awaited.begin("one")
    awaited.give_up()
    awaited.end(inbox)
    del answer
    gc.collect()
    assert complaints == []
