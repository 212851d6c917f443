"""The last question of a read: each answer goes to its own question, and an end or a silence is never a yes."""

import asyncio
from functools import partial

import pytest

from tensorhub_agent.primitives.lease_messages import ConfirmReply
from tensorhub_agent.transports import lease_session
from tensorhub_agent.transports.lease_session import PendingConfirmations


async def asked(confirmations: PendingConfirmations) -> tuple[int, "asyncio.Task[bool]"]:
    """Ask, and wait for the answer in a task."""
    question = confirmations.ask()
    task = asyncio.create_task(confirmations.answer(question))
    await asyncio.sleep(0)
    return question.number, task


async def test_each_answer_reaches_the_question_that_it_names() -> None:
    confirmations = PendingConfirmations()
    one, first = await asked(confirmations)
    two, second = await asked(confirmations)
    assert one != two
    confirmations.answered(ConfirmReply(two, holds=True))
    confirmations.answered(ConfirmReply(one, holds=False))
    assert (await first, await second) == (False, True)


async def test_it_is_known_whether_an_answer_is_still_to_come() -> None:
    confirmations = PendingConfirmations()
    assert not confirmations
    number, task = await asked(confirmations)
    assert confirmations
    confirmations.answered(ConfirmReply(number, holds=True))
    assert await task
    assert not confirmations


async def test_what_is_said_twice_or_to_nobody_changes_nothing() -> None:
    confirmations = PendingConfirmations()
    number, task = await asked(confirmations)
    confirmations.answered(ConfirmReply(number + 1, holds=False))
    confirmations.answered(ConfirmReply(number, holds=True))
    confirmations.answered(ConfirmReply(number, holds=False))
    assert await task
    confirmations.answered(ConfirmReply(number, holds=False))


async def test_at_the_end_of_the_session_whoever_waits_is_told_no_and_who_was_answered_keeps_it() -> None:
    confirmations = PendingConfirmations()
    number, told = await asked(confirmations)
    _, waiting = await asked(confirmations)
    confirmations.answered(ConfirmReply(number, holds=True))
    confirmations.end()
    assert (await told, await waiting) == (True, False)


async def test_silence_is_an_error_in_words_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_session, "CONFIRM_S", 0.001)
    confirmations = PendingConfirmations()
    ask = partial(confirmations.answer, confirmations.ask())
    with pytest.raises(TimeoutError, match=r"has not said within 0\.001 s whether the lease holds"):
        await ask()
    assert not confirmations
