"""Bodies of answers, as OpenAI's clients read them."""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from tensorhub_gateway.sessions.messages import Reply

Json = dict[str, Any]
UNFINISHED: Final = "\ufffd"
Finish = Literal["stop", "length", "tool_calls"]


class Token(NamedTuple):
    """A token that was made, for who asked for log-probabilities."""

    text: str
    logprob: float


class Answered(NamedTuple):
    """What all of an answer's bodies say."""

    id: str
    created: int
    """In seconds since the epoch."""
    model: str
    is_chat: bool
    session: str
    turn: int
    forked: str | None


class Usage(NamedTuple):
    """Tokens of one call."""

    prompt: int
    made: int

    def body(self) -> Json:
        """Return it as OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.made,
            "total_tokens": self.prompt + self.made,
        }


class Ids(NamedTuple):
    """Token ids, for who asked for them."""

    prompt: Sequence[int]
    made: Sequence[int]


def whole(
    of: Answered,
    reply: Reply,
    finish: Finish,
    usage: Usage,
    *,
    tokens: Sequence[Token] | None,
    ids: Ids | None,
) -> Json:
    """Return the body of a call that is not streamed."""
    if of.is_chat:
        message: Json = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.tool_calls:
            message["tool_calls"] = _tool_calls(reply)
            message["content"] = reply.content or None
        choice: Json = {"index": 0, "message": message, "logprobs": _logprobs(of, tokens), "finish_reason": finish}
    else:
        choice = {"index": 0, "text": reply.content, "logprobs": _logprobs(of, tokens), "finish_reason": finish}
    body = {**_head(of, "chat.completion"), "choices": [choice], "usage": usage.body()}
    if ids is not None:
        body["prompt_token_ids"], choice["token_ids"] = [*ids.prompt], [*ids.made]
    return body


def chunk(
    of: Answered,
    text: str,
    *,
    is_first: bool = False,
    reply: Reply | None = None,
    finish: Finish | None = None,
    tokens: Sequence[Token] | None = None,
    ids: Ids | None = None,
) -> Json:
    """Return the body of a part of a stream. `reply`: its calls of tools are in this part."""
    if of.is_chat:
        delta: Json = {"role": "assistant", "content": text} if is_first else {"content": text} if text else {}
        if reply is not None and reply.tool_calls:
            delta["tool_calls"] = [{"index": number, **each} for number, each in enumerate(_tool_calls(reply))]
        choice: Json = {"index": 0, "delta": delta, "logprobs": _logprobs(of, tokens), "finish_reason": finish}
    else:
        choice = {"index": 0, "text": text, "logprobs": _logprobs(of, tokens), "finish_reason": finish}
    body = {**_head(of, "chat.completion.chunk"), "choices": [choice]}
    if ids is not None:
        choice["token_ids"] = [*ids.made]
        if is_first:
            body["prompt_token_ids"] = [*ids.prompt]
    return body


def usage_chunk(of: Answered, usage: Usage) -> Json:
    """Return the last part of a stream whose client asked for what was used."""
    return {**_head(of, "chat.completion.chunk"), "choices": [], "usage": usage.body()}


def _head(of: Answered, kind: str) -> Json:
    return {
        "id": of.id,
        "object": kind if of.is_chat else "text_completion",
        "created": of.created,
        "model": of.model,
        "tensorhub": {"session": of.session, "turn": of.turn, "forked": of.forked},
    }


def _tool_calls(reply: Reply) -> list[Json]:
    return [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in reply.tool_calls
    ]


def _logprobs(of: Answered, tokens: Sequence[Token] | None) -> Json | None:
    if tokens is None:
        return None
    if of.is_chat:
        content = [
            {"token": each.text, "logprob": each.logprob, "bytes": _bytes(each.text), "top_logprobs": []}
            for each in tokens
        ]
        return {"content": content, "refusal": None}
    offsets, at = [], 0
    for each in tokens:
        offsets.append(at)
        at += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _bytes(text: str) -> list[int] | None:
    """Return a token's bytes; None: it is a part of a character, of which the text says nothing."""
    return None if UNFINISHED in text else [*text.encode()]
