"""Calls of tools in what a model writes, in the form of Hermes and Qwen: JSON between `<tool_call>` and `</tool_call>`.

The tokens stay what they are: a parser only says what a client is told of them.
"""

from typing import Final, Protocol

import msgspec

from tensorhub_gateway.sessions.messages import Reply, ToolCall

CALLS_MAX: Final = 128
"""Limit of the calls in one reply; one with more is text."""
BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


class ToolParser(Protocol):
    """How a family of models writes calls of tools."""

    marker: str
    """What the first of them begins with: text from there on is not streamed as it comes."""

    def parse(self, text: str, turn: int) -> Reply:
        """Return what a text says; one that can't be read is content. `turn`: ids of calls have it."""


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class HermesParser:
    """Reads calls of Hermes and Qwen."""

    marker = BEGIN

    def parse(self, text: str, turn: int) -> Reply:
        """Return what a text says; one that can't be read is content."""
        content, *rest = text.split(BEGIN)
        calls = []
        for number, each in enumerate(rest):
            written, end, behind = each.partition(END)
            try:
                found = msgspec.json.decode(written.strip(), type=_Written)
            except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
                return Reply(text)
            if not end or behind.strip():
                return Reply(text)
            calls.append(ToolCall(f"call_{turn}_{number}", found.name, bytes(found.arguments).decode()))
        if not calls or len(calls) > CALLS_MAX:
            return Reply(text)
        return Reply(content.rstrip(), tuple(calls))


class NoTools:
    """Takes all for content: where the client named no tools."""

    marker = ""

    def parse(self, text: str, turn: int) -> Reply:  # noqa: ARG002 (as of every parser)
        """Return the text."""
        return Reply(text)


class HeldText:
    """Text as it comes, without what may become a call of a tool and spaces before one. What was held comes last."""

    def __init__(self, marker: str) -> None:
        self._marker, self._held = marker, ""

    def take(self, text: str) -> str:
        """Take more text and return what may be said now."""
        if not self._marker:
            return text
        self._held += text
        if self._marker in self._held:
            end = len(self._held.partition(self._marker)[0].rstrip())
        else:
            parts = range(min(len(self._marker) - 1, len(self._held)), 0, -1)
            kept = next((count for count in parts if self._held.endswith(self._marker[:count])), 0)
            end = len(self._held[: len(self._held) - kept].rstrip())
        said, self._held = self._held[:end], self._held[end:]
        return said

    def rest(self) -> str:
        """Return what was held."""
        held, self._held = self._held, ""
        return held
