"""Reading NATS's protocol, where what has come is whole messages, which is nearly always.

nats-py wakes a task for all that comes, copies it twice and tries regular expressions on it. `take_messages` reads the
messages at the beginning of what has come where it stands, and leaves the rest to nats-py: a message of which a part is
still on its way, the server's pings, errors and news, and whatever can't be understood.
"""

from collections.abc import Callable
from typing import Final

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

Deliver = Callable[[int, bytes, bytes, bytes, bytes], None]
"""Takes the subscription's number, the subject, the reply subject or b"", the header block or b"", and the data."""

_LINE_END: Final = b"\r\n"
_PLAIN: Final = (b"MSG", 4)
_WITH_HEADERS: Final = (b"HMSG", 5)
"""How a message begins, and of how many words its line is where no reply is wanted."""


def take_messages(came: bytes, deliver: Deliver) -> int:
    """Deliver the whole messages that stand at the beginning, and return how many bytes they are."""
    at, length = 0, len(came)
    while at < length:
        line_end = came.find(_LINE_END, at)
        if line_end < 0:
            break
        words = came[at:line_end].split()
        verb, count = words[0] if words else b"", len(words)
        least = _WITH_HEADERS[1] if verb == _WITH_HEADERS[0] else _PLAIN[1]
        if verb not in (_WITH_HEADERS[0], _PLAIN[0]) or not least <= count <= least + 1:
            break
        try:
            number, size = int(words[2]), int(words[-1])
            header_size = int(words[-2]) if verb == _WITH_HEADERS[0] else 0
        except ValueError:
            break
        data, end = line_end + len(_LINE_END) + header_size, line_end + len(_LINE_END) + size
        if not 0 <= header_size <= size or end + len(_LINE_END) > length:
            break
        deliver(number, words[1], words[3] if count > least else b"", came[data - header_size : data], came[data:end])
        at = end + len(_LINE_END)
    return at


class SlowParser(Parser):
    """nats-py's own, which tells whether it is in the middle of something."""

    def __init__(self, client: object) -> None:
        super().__init__(client)
        self._busy = False

    @property
    def is_idle(self) -> bool:
        """Whether all that was given to it is read, so that what comes next may be read elsewhere."""
        return not self._busy and not self.buf and self.state == AWAITING_CONTROL_LINE

    async def parse(self, data: bytes = b"") -> None:
        """Read what has come, and do what it asks."""
        self._busy = True
        try:
            await super().parse(data)
        finally:
            self._busy = False
