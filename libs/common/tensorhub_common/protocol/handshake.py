"""How two processes of different releases agree on a protocol, or say in one sentence which of them is too old. Pure.

A process speaks all protocols from `OLDEST_PROTOCOL` to `PROTOCOL`. The first frame of a connection names the oldest as
`protocol`, which is all that a release with one protocol looks at, and the newest beside it. Both take the newest that
the two have in common.

A protocol changes only for what no default can bridge. A field with a default, and a frame that is sent only to who has
asked for it, are no change.
"""

from typing import Final, NamedTuple

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import PROTOCOL

OLDEST_PROTOCOL: Final = 1
"""The oldest protocol that this release still speaks."""


class Speaks(NamedTuple):
    """What a process speaks, as it says itself."""

    who: str
    """As a sentence names it, such as "agent node-1-0"."""
    oldest: int
    newest: int = 0
    """0: of a release with one protocol, which says no more than `oldest`."""
    release: str = ""

    @property
    def last(self) -> int:
        """The newest protocol that it speaks."""
        return max(self.newest, self.oldest)

    def __str__(self) -> str:
        numbers = str(self.oldest) if self.oldest == self.last else f"{self.oldest} to {self.last}"
        return f"{self.who} ({f'release {self.release}, ' if self.release else ''}protocol {numbers})"


def speaks(who: str, release: str = "") -> Speaks:
    """Return what this process speaks."""
    return Speaks(who, OLDEST_PROTOCOL, PROTOCOL, release)


def agreed(here: Speaks, there: Speaks) -> int:
    """Return the newest protocol that both speak. Raises `BadCommand`, which says what to upgrade."""
    common = min(here.last, there.last)
    if common >= max(here.oldest, there.oldest):
        return common
    behind, ahead = sorted((here, there), key=lambda each: each.last)
    raise BadCommand(f"{behind} is too old for {ahead}: upgrade tensorhub where {behind.who} runs")
