"""Bodies of calls: what can be done is read whole, and what can't is refused by its name."""

import json
from typing import Any

import pytest

from tensorhub_gateway.api.calls import SamplingAsked, read_chat, read_completion, read_reward, session_id
from tensorhub_gateway.api.refusals import Refusal
from tensorhub_gateway.sessions.session import ChatAsked, TextAsked

HI: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HI, **more}).encode()


def test_a_whole_call_is_read() -> None:
    asked = read_chat(
        chat(
            max_completion_tokens=5,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=7,
            stop_token_ids=[4],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            tools=[{"type": "function", "function": {"name": "look"}}],
            tool_choice="auto",
            n=1,
            frequency_penalty=0.0,
            user="me",
        )
    )
    assert asked.sampling == SamplingAsked(5, 0.0, 0.5, 3, 7, (4,))
    assert (asked.is_streamed, asked.has_usage, asked.has_logprobs, asked.may_call_tools) == (True,) * 4
    assert isinstance(asked.asked, ChatAsked)
    assert asked.asked.messages == (HI[0],)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("n", 2, "unsupported_parameter"),
        ("n", True, "unsupported_parameter"),
        ("stop", ["x"], "unsupported_parameter"),
        ("presence_penalty", 0.5, "unsupported_parameter"),
        ("frequency_penalty", -1, "unsupported_parameter"),
        ("logit_bias", {"5": 1}, "unsupported_parameter"),
        ("response_format", {"type": "json_object"}, "unsupported_parameter"),
        ("tool_choice", "required", "unsupported_parameter"),
        ("parallel_tool_calls", False, "unsupported_parameter"),
        ("top_logprobs", 3, "unsupported_parameter"),
        ("min_p", 0.1, "unsupported_parameter"),
        ("reasoning_effort", "high", "unsupported_parameter"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", 1.5, "invalid_value"),
        ("temperature", -1, "invalid_value"),
        ("temperature", "hot", "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("seed", -1, "invalid_value"),
        ("stop_token_ids", [-1], "invalid_value"),
        ("stream", 1, "invalid_value"),
        ("model", 5, "invalid_value"),
        ("messages", [], "invalid_value"),
    ],
)
def test_what_would_change_sampling_and_can_not_is_refused_by_name(name: str, value: Any, code: str) -> None:
    with pytest.raises(Refusal) as error:
        read_chat(chat(**{name: value}))
    assert (error.value.status, error.value.param, error.value.code) == (400, name, code)
    assert error.value.body()["error"]["param"] == name


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"content": "hi"},
        {"role": "boss", "content": "hi"},
        {"role": "user"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "hi", "audio": {"id": "x"}},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
    ],
)
def test_a_message_that_can_not_be_read_is_refused_by_its_number(message: Any) -> None:
    with pytest.raises(Refusal) as error:
        read_chat(chat(messages=[*HI, message]))
    assert error.value.param == "messages[1]"


def test_an_answer_comes_back_as_clients_send_it() -> None:
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    asked = read_chat(chat(messages=[*HI, said, {"role": "user", "content": [{"type": "text", "text": "more"}]}])).asked
    assert isinstance(asked, ChatAsked)
    assert asked.messages[1:] == ({"role": "assistant", "content": "a"}, {"role": "user", "content": "more"})


def test_completions_take_text_or_ids() -> None:
    def asked(prompt: object) -> TextAsked:
        found = read_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).asked
        assert isinstance(found, TextAsked)
        return found

    assert asked("x").text == asked(["x"]).text == "x"
    assert [*(asked([1, 2]).token_ids or ())] == [*(asked([[1, 2]]).token_ids or ())] == [1, 2]
    for prompt in ("", [], ["x", "y"], [[1], [2]], None, [True], [-1]):
        with pytest.raises(Refusal, match="prompt"):
            asked(prompt)


def test_rewards_are_numbers() -> None:
    assert read_reward(b'{"reward": 1}') == (1.0, True)
    assert read_reward(b'{"reward": -0.5, "final": false}') == (-0.5, False)
    for body in (
        b"{}",
        b'{"reward": "1"}',
        b'{"reward": true}',
        b'{"reward": 1, "more": 2}',
        b"[]",
        b"{",
        b'{"reward": 1e999}',
    ):
        with pytest.raises(Refusal):
            read_reward(body)


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", None, 5, "a/b"])
def test_ids_of_sessions_have_a_form(given: object) -> None:
    assert session_id("run-7.a:b@c+d_e") == "run-7.a:b@c+d_e"
    with pytest.raises(Refusal, match="session"):
        session_id(given)
