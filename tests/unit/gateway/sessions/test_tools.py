"""Calls of tools in text, whole and as it comes."""

from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_gateway.sessions.messages import Reply, ToolCall, meaning_of, message_of
from tensorhub_gateway.sessions.tools import HeldText, HermesParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def parse(text: str) -> Reply:
    return HermesParser().parse(text, 3)


def test_calls_are_told_with_ids_of_their_own() -> None:
    assert parse(f"I look. \n{CALL}\n{CALL}") == Reply(
        "I look.", tuple(ToolCall(f"call_3_{number}", "look", '{"at": "x"}') for number in range(2))
    )


def test_what_is_no_call_is_text() -> None:
    for text in (
        "<tool_call>look</tool_call>",
        CALL.removesuffix("</tool_call>"),
        f"{CALL} and then",
        '<tool_call>{"arguments": {}}</tool_call>',
    ):
        assert parse(text) == Reply(text)


def test_brackets_without_end_are_text() -> None:
    text = '<tool_call>{"name":"x","arguments":' + "[" * 5000 + "]" * 5000 + "}</tool_call>"
    assert HermesParser().parse(text, 0) == Reply(text)


def test_messages_that_mean_the_same_have_one_digest() -> None:
    reply = parse(f"I look. {CALL}")
    again = {
        "role": "assistant",
        "content": " I look.",
        "tool_calls": [{"id": "else", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}],
    }
    assert meaning_of(again) == reply.meaning() == meaning_of(message_of(reply))
    again["content"] = "I look!"
    assert meaning_of(again) != reply.meaning()


PARTS = st.lists(st.sampled_from([CALL, "<", "<tool", " ", "\n", "a", "_call>", "<tool_call>", "é"]), max_size=6)


@example(["a", " ", CALL], [])
@example(["a", " ", "\n", CALL], [2, 3, 1])
@given(PARTS, st.lists(st.integers(1, 9), max_size=30))
def test_what_is_said_as_it_comes_is_what_the_whole_says(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    held, said, at = HeldText(HermesParser.marker), "", 0
    for count in [*cuts, len(text)]:
        said += held.take(text[at : at + count])
        at += count
    reply = parse(text)
    assert said + ("" if reply.tool_calls else held.rest()) == reply.content
