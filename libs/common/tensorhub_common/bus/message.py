"""A message as it came from NATS, with nothing of nats-py about it."""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

_LINE: Final = b"NATS/1.0"


_STATUS_DIGITS: Final = 3


STREAM: Final = "Nats-Stream"
"""Marks a message that the server read out of a stream: its other headers are then those of the writer."""


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


NO_HEADERS: Final[Mapping[str, str]] = {}


class Headers(Mapping[str, str]):
    """A message's headers, read when somebody looks at them, which few do."""

    __slots__ = ("_parsed", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._parsed: dict[str, str] | None = None

    def __getitem__(self, key: str) -> str:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        # Whether there is a header block at all: who only wants to know that has nothing read for it.
        return bool(self._raw)

    def __repr__(self) -> str:
        return repr(self._read())

    def count(self, name: bytes) -> int:
        """Count the headers of this name, which the mapping hides; a value with the same text counts too."""
        return self._raw.count(b"\r\n" + name + b":")

    def _read(self) -> dict[str, str]:
        if self._parsed is None:
            self._parsed = parse_headers(self._raw)
        return self._parsed


def parse_headers(raw: bytes) -> dict[str, str]:
    """Read a header block; what can't be a header is left out. The server's status is under "Status"."""
    parsed: dict[str, str] = {}
    first, *lines = raw.split(b"\r\n")
    status = first.removeprefix(_LINE).strip()
    code, _, description = status.partition(b" ")
    if first.startswith(_LINE) and len(code) == _STATUS_DIGITS and code.isdigit():
        parsed["Status"] = code.decode()
        if description:
            parsed["Description"] = description.decode(errors="replace").strip()
    for line in lines:
        name, colon, value = line.partition(b":")
        key = name.decode(errors="replace").strip()
        if colon and key and key.isascii() and " " not in key:
            parsed[key] = value.strip().decode(errors="replace")
    return parsed
