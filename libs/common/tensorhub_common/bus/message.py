"""A message as it came from NATS, with nothing of nats-py about it."""

from collections.abc import Mapping
from typing import Final

import msgspec

STREAM: Final = "Nats-Stream"
"""Stands on what the server reads out of a stream for somebody: the other headers are then those of its writer."""


class Message(msgspec.Struct, frozen=True):
    """One message. `reply` is where an answer is wanted, or "" when none is."""

    subject: str
    reply: str
    headers: Mapping[str, str]
    data: bytes

    @property
    def status(self) -> str | None:
        """The number in the status line of what the server itself wrote ("503"); None for everybody else's messages."""
        if self.reply or self.data or STREAM in self.headers:
            return None
        return self.headers.get("Status")


def header_bytes(headers: Mapping[str, str]) -> int:
    """Return how many bytes headers take in a message; they count against the server's limit as the data do."""
    if not headers:
        return 0
    lines = sum(len(key) + len(value.encode()) + len(": \r\n") for key, value in headers.items())
    return len("NATS/1.0\r\n") + lines + len("\r\n")
