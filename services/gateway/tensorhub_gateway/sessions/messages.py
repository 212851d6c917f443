"""Messages of a chat in one form, so that two that mean the same are equal."""

import hashlib
from typing import Any, Final

import msgspec

Json = dict[str, Any]
DIGEST_BYTES: Final = 16


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool by the model. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True):
    """What the model said in one call."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def meaning(self) -> bytes:
        """Return a digest that two replies have in common exactly where they mean the same.

        Ids of calls, spaces around the content and the form of JSON count nothing.
        """
        return digest_of(
            ["assistant", self.content.strip(), [[each.name, _value(each.arguments)] for each in self.tool_calls]]
        )


def reply_of(message: Json) -> Reply | None:
    """Return what an assistant's message says, of a checked message; None: it is no assistant's."""
    if message["role"] != "assistant":
        return None
    calls = message.get("tool_calls") or ()
    return Reply(
        message.get("content") or "",
        tuple(
            ToolCall(str(each.get("id", "")), each["function"]["name"], _text(each["function"].get("arguments", "")))
            for each in calls
        ),
    )


def message_of(reply: Reply) -> Json:
    """Return a reply as a template reads it: arguments as a value, where they are one."""
    message: Json = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": _value(each.arguments)}}
            for each in reply.tool_calls
        ]
    return message


def for_template(message: Json) -> Json:
    """Return a checked message as a template reads it."""
    reply = reply_of(message)
    return message if reply is None else {**message, **message_of(reply)}


def meaning_of(message: Json) -> bytes:
    """Return a digest that two checked messages have in common exactly where they mean the same."""
    reply = reply_of(message)
    return digest_of(message) if reply is None else reply.meaning()


def digest_of(value: object) -> bytes:
    """Return a digest of what JSON has."""
    said = msgspec.json.encode(value, order="deterministic")
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES).digest()


def _value(arguments: str) -> object:
    """Return what arguments mean: JSON's value, or the text where it is none."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
