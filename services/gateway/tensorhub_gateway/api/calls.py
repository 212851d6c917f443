"""Bodies of calls, checked whole: what is not known, or can't be done, is refused and never left out."""

import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from tensorhub_gateway.api.refusals import bad, unsupported
from tensorhub_gateway.sessions.messages import Json
from tensorhub_gateway.sessions.session import Asked, ChatAsked, TextAsked

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
MESSAGES_MAX: Final = 8192
TOOLS_MAX: Final = 128
SESSION_CHARS_MAX: Final = 128
METADATA_BYTES_MAX: Final = 64 * 1024
TOKEN_ID_MAX: Final = 2**31 - 1
SEED_MAX: Final = 2**63 - 1
TEMPERATURE_MAX: Final = 100.0

_SESSION: Final = re.compile(r"[A-Za-z0-9._:@+-]+")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_IGNORED: Final = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)
"""Parameters of OpenAI's that change nothing of an answer."""
_SAME: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "suffix": ("",),
    "top_logprobs": (0,),
}
"""Parameters with the values, beside null, with which they change nothing."""
_INSTEAD: Final[Mapping[str, str]] = {
    "n": "call several times, at once if need be: each call of a session is a branch of its own",
    "best_of": "call several times",
    "stop": "give stop_token_ids, or end the answer in the client",
    "top_logprobs": "logprobs=true gives the log-probability of each token that was drawn",
}


class SamplingAsked(NamedTuple):
    """What a call says of sampling; None: as the rollouts have it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


class CallAsked(NamedTuple):
    """One call."""

    asked: Asked
    model: str
    sampling: SamplingAsked
    may_call_tools: bool
    """Whether what looks like a call of a tool is one."""
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with what was used."""
    has_logprobs: bool
    has_token_ids: bool


class RewardAsked(NamedTuple):
    """A reward of a session."""

    reward: float
    is_final: bool


def read_chat(data: bytes) -> CallAsked:
    """Read a body of /v1/chat/completions. Raises `Refusal`."""
    body = _Body(_read(data))
    messages = tuple(_message(number, each) for number, each in enumerate(body.items("messages", MESSAGES_MAX)))
    if not messages:
        raise bad("messages", "messages is empty: give one message at least")
    choice = body.take("tool_choice")
    tools = tuple(_tool(number, each) for number, each in enumerate(body.items("tools", TOOLS_MAX))) or None
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "tool_choice can be 'auto' or 'none': no engine here can be made to call one")
    has_logprobs = body.flag("logprobs")
    return body.call(
        ChatAsked.of(messages, tools), may_call_tools=tools is not None and choice != "none", has_logprobs=has_logprobs
    )


def read_completion(data: bytes) -> CallAsked:
    """Read a body of /v1/completions. Raises `Refusal`."""
    body = _Body(_read(data))
    prompt, logprobs = body.take("prompt"), body.take("logprobs")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if logprobs not in (None, False, 0, 1, True):
        raise unsupported("logprobs", "logprobs can be 0 or 1: only the token that was drawn has a log-probability")
    if isinstance(prompt, str) and prompt:
        asked = TextAsked(text=prompt)
    elif isinstance(prompt, list) and prompt:
        asked = TextAsked(token_ids=array("i", [_token("prompt", each) for each in prompt]))
    else:
        raise bad("prompt", "prompt is to be one text or one list of token ids, and not empty")
    return body.call(asked, may_call_tools=False, has_logprobs=logprobs not in (None, False))


def read_reward(data: bytes) -> RewardAsked:
    """Read a body of a session's reward. Raises `Refusal`."""
    body = _Body(_read(data))
    reward = body.number("reward", -1e30, 1e30)
    if reward is None:
        raise bad("reward", 'reward is missing: send {"reward": 1.0}')
    is_final = body.flag("final", default=True)
    body.end()
    return RewardAsked(reward, is_final)


class SessionAsked(NamedTuple):
    """A session that is opened before its first call."""

    id: str | None
    metadata: object


def read_session(data: bytes) -> SessionAsked:
    """Read a body of a session that is opened. Raises `Refusal`."""
    body = _Body(_read(data or b"{}"))
    id_, metadata = body.take("id"), body.take("metadata")
    body.end()
    if len(msgspec.json.encode(metadata)) > METADATA_BYTES_MAX:
        raise bad("metadata", f"metadata has more than {METADATA_BYTES_MAX} bytes")
    return SessionAsked(None if id_ is None else session_id(id_), metadata)


def session_id(given: object) -> str:
    """Return a session's id. Raises `Refusal` for what can be none."""
    if not isinstance(given, str) or len(given) > SESSION_CHARS_MAX or not _SESSION.fullmatch(given):
        raise bad(
            "X-TensorHub-Session",
            f"a session's id has 1 to {SESSION_CHARS_MAX} letters, digits and characters of . _ : @ + -",
        )
    return given


def _read(data: bytes) -> Json:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as why:
        raise bad(None, f"the body is no JSON: {why}", "invalid_json") from None
    if not isinstance(found, dict):
        raise bad(None, "the body is no JSON object", "invalid_json")
    return found


class _Body:
    """A body of which each parameter is taken once; what is left at the end is not known."""

    def __init__(self, body: Json) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:  # noqa: ANN401 (what JSON has)
        return self._left.pop(name, None)

    def flag(self, name: str, *, default: bool = False) -> bool:
        found = self.take(name)
        if found is not None and not isinstance(found, bool):
            raise bad(name, f"{name} is to be true or false")
        return default if found is None else found

    def items(self, name: str, count_max: int) -> Iterable[object]:
        found = self.take(name)
        if found is None:
            return []
        if not isinstance(found, list) or len(found) > count_max:
            raise bad(name, f"{name} is to be a list of {count_max} at most")
        return found

    def number(self, name: str, low: float, high: float) -> float | None:
        found = self.take(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high:
            raise bad(name, f"{name} is to be a number from {low:g} to {high:g}")
        return float(found)

    def whole(self, name: str, low: int, high: int) -> int | None:
        found = self.take(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise bad(name, f"{name} is to be a whole number from {low} to {high}")
        return found

    def call(self, asked: Asked, *, may_call_tools: bool, has_logprobs: bool) -> CallAsked:
        """Take what all calls have, and nothing may be left."""
        model = self.take("model")
        if not isinstance(model, str):
            raise bad("model", "model is to be the name of a model, as /v1/models has it")
        is_streamed, has_token_ids = self.flag("stream"), self.flag("return_token_ids")
        sampling = self._sampling()
        options = self.take("stream_options") or {}
        if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
            raise unsupported("stream_options", "stream_options can have include_usage alone")
        for name, same in _SAME.items():
            found = self.take(name)
            if found is not None and not any(_is_same(found, each) for each in same):
                raise unsupported(name, _why_not(name, same))
        for name in _IGNORED:
            self.take(name)
        self.end()
        return CallAsked(
            asked,
            model,
            sampling,
            may_call_tools,
            is_streamed,
            bool(options.get("include_usage")),
            has_logprobs,
            has_token_ids,
        )

    def _sampling(self) -> SamplingAsked:
        counts = [self.whole(name, 1, TOKEN_ID_MAX) for name in ("max_completion_tokens", "max_tokens")]
        ends = self.take("stop_token_ids")
        if ends is not None and not isinstance(ends, list):
            raise bad("stop_token_ids", "stop_token_ids is to be a list of token ids")
        temperature, top_p = self.number("temperature", 0, TEMPERATURE_MAX), self.number("top_p", 0, 1)
        if top_p == 0:
            raise bad("top_p", "top_p=0 is not possible: take temperature=0 for the likeliest token")
        return SamplingAsked(
            next((each for each in counts if each is not None), None),
            temperature,
            top_p,
            self.whole("top_k", 0, TOKEN_ID_MAX),
            self.whole("seed", 0, SEED_MAX),
            None if ends is None else tuple(_token("stop_token_ids", each) for each in ends),
        )

    def end(self) -> None:
        """Refuse what is left."""
        for name in self._left:
            raise unsupported(name, f"{name!r:.80} is not known here: leave it out")


def _is_same(given: object, same: object) -> bool:
    """Tell whether two values of JSON are equal; true is no number."""
    return given == same and isinstance(given, bool) == isinstance(same, bool)


def _why_not(name: str, same: tuple[object, ...]) -> str:
    instead = _INSTEAD.get(name, "leave it out")
    return f"{name} can only be {msgspec.json.encode(same[0]).decode()} here: {instead}"


def _token(name: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= TOKEN_ID_MAX:
        raise bad(name, f"{name} has {given!r:.40}, which is no token id")
    return given


def _message(number: int, given: object) -> Json:
    """Return one message in the form in which it is kept."""
    where = f"messages[{number}]"
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise bad(where, f"{where} is to have a role: {', '.join(_ROLES)}")
    # Of what a client says again of an answer, null and empty things say nothing.
    message = {name: value for name, value in given.items() if value not in (None, [], {})}
    message["content"] = _content(where, message.get("content", ""))
    allowed = (
        {"role", "content", "name", "tool_calls"}
        if given["role"] == "assistant"
        else {"role", "content", "name", "tool_call_id"}
    )
    for name in message.keys() - allowed:
        raise unsupported(where, f"{where} has {name!r:.80}, which is not known here: leave it out")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(where, each) for each in _listed(where, message["tool_calls"])]
    elif given["role"] != "assistant" and "content" not in given:
        raise bad(where, f"{where} has no content")
    return message


def _content(where: str, given: object) -> str:
    if isinstance(given, str):
        return given
    parts = []
    for each in _listed(where, given):
        text = each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None
        if not isinstance(text, str):
            raise unsupported(where, f"{where} has content that is no text, which no engine here reads")
        parts.append(text)
    return "".join(parts)


def _listed(where: str, given: object) -> list[Any]:
    if not isinstance(given, list):
        raise bad(where, f"{where} can't be read: give text, or lists as OpenAI has them")
    return given


def _tool_call(where: str, given: object) -> Json:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(where, f"{where} has a call of a tool that can't be read: give id, type and function")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str | dict):
        raise bad(where, f"{where} has a call of a tool whose arguments are no JSON")
    return {
        "id": str(given.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(number: int, given: object) -> Json:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(given, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"tools[{number}]", f'tools[{number}] is to be {{"type": "function", "function": {{"name": …}}}}')
    if function.get("strict"):
        raise unsupported(
            f"tools[{number}]", f"tools[{number}] is strict, and no engine here keeps to a schema: leave it out"
        )
    return given
