"""With which tokens a call goes on from an earlier one of its session.

Those that were made stay, and only text behind them is tokenised.

A template writes a chat as one text. In it stand the answers that were made, and between them the template's own text
with what users and tools said. The text between is found by rendering the chat with a mark in the place of each answer.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tensorhub_gateway.sessions.messages import Json, Reply, for_template, message_of
from tensorhub_gateway.sessions.session import ChatAsked, TextAsked, Turn

Render = Callable[[Sequence[Json], Sequence[Json] | None], str]
"""Messages and tools as one text, with what lets the model answer. It raises `Unrendered`."""
Parse = Callable[[str], Reply]

MARK: Final = "anSwer{number}iShEre{count}oF"
"""Stands for an answer. No number of it is the beginning of another one."""


class Unrendered(Exception):
    """The template does not take these messages."""


class Extension(NamedTuple):
    """What stands behind the answer of the call before."""

    written: str
    """All that the template writes there."""
    inserted: str
    """That without the stop token, which was made."""


class Fork(NamedTuple):
    """Why a call can't go on from an earlier one."""

    why: str


HISTORY: Final = Fork("its messages are not those of an earlier call and the answer to it")
TEXT: Final = Fork("its text does not begin with that of an earlier call")
TEMPLATE: Final = Fork("the template writes earlier messages otherwise once others follow")
ANSWER: Final = Fork("the template writes an earlier answer otherwise than it was made")
STOP: Final = Fork("an earlier answer ended with another stop token than the template writes")
MARKS: Final = Fork("the template does not take an earlier answer as it is")


def extended_chat(before: Turn, asked: ChatAsked, render: Render, parse: Parse) -> Extension | Fork:
    """Return how a chat goes on from a call whose messages and answer are its beginning."""
    path = before.path()
    messages = [for_template(each) for each in asked.messages]
    for turn in path:
        assert turn.digests is not None
        assert turn.reply is not None
        messages[len(turn.digests)] = message_of(turn.reply)
    try:
        whole = render(messages, asked.tools)
        parts = _parts(path, messages, whole, lambda marked: render(marked, asked.tools))
    except Unrendered:
        return MARKS
    if parts is None:
        return MARKS
    if [turn.written for turn in path] != parts[:-1]:
        return TEMPLATE
    if not _has_answers(path, parts, whole, parse):
        return ANSWER
    return _behind(before, parts[-1])


def _parts(
    path: Sequence[Turn], messages: Sequence[Json], whole: str, render: Callable[[Sequence[Json]], str]
) -> list[str] | None:
    """Return the text before, between and behind the answers; None: the template does not keep marks."""
    marks = [MARK.format(number=number, count=len(whole)) for number in range(len(path))]
    marked = list(messages)
    for turn, mark in zip(path, marks, strict=True):
        assert turn.digests is not None
        marked[len(turn.digests)] = {"role": "assistant", "content": mark}
    text, parts = render(marked), []
    for mark in marks:
        part, found, text = text.partition(mark)
        # Who says a mark makes a fork.
        if not found or mark in text or mark in whole:
            return None
        parts.append(part)
    return [*parts, text]


def _has_answers(path: Sequence[Turn], parts: Sequence[str], whole: str, parse: Parse) -> bool:
    """Tell whether the template writes each answer so that it means what was made."""
    if not whole.startswith(parts[0]) or not whole.endswith(parts[-1]):
        return False
    at = len(parts[0])
    last = len(whole) - len(parts[-1])
    for turn, part in zip(path, parts[1:], strict=True):
        end = last if turn is path[-1] else whole.find(part, at)
        if end < at:
            return False
        text = whole[at:end]
        if text != turn.text and parse(text).meaning() != parse(turn.text).meaning():
            return False
        at = end + len(part)
    return True


def extended_text(before: Turn, asked: TextAsked) -> Extension | Fork:
    """Return how text goes on from a call with which it begins."""
    assert asked.text is not None
    return _behind(before, asked.text[len(before.text_so_far()) :])


def _behind(before: Turn, written: str) -> Extension | Fork:
    if not written.startswith(before.stop_text):
        return STOP
    return Extension(written, written[len(before.stop_text) :])
