"""Is what a command says well formed? Whatever the catalog keeps or repeats in an event has passed here.

A registry must be able to write every event that the fold makes of a command, whoever sent it: so names fit into
subjects, digests are short (one event names those of all shards), and numbers are what every JSON reader keeps exact.
"""

from typing import Final

from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.catalog.state import LANES_MAX
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import Sender
from tensorhub_common.protocol.names import is_name

NUMBER_MAX: Final = 2**53 - 1
"""The largest number that every JSON reader keeps exact."""

_LANE_CHARS_MAX: Final = len(str(LANES_MAX))


def is_hub(by: Sender) -> bool:
    """Tell whether the hub itself speaks (a registry): its names begin with `_`, which no agent's may."""
    return by.lane.startswith("_")


def is_sender(by: Sender) -> bool:
    """Tell whether the sender's word can be remembered: else its commands would count, and their repeats again."""
    process, slash, lane = by.lane.partition("/")
    named = is_name(process) and (not slash or (_is_lane(lane) and not is_hub(by)))
    return named and 0 <= by.incarnation <= NUMBER_MAX and 0 <= by.n <= NUMBER_MAX


def check_sender(by: Sender) -> None:
    """Refuse a sender that is none."""
    if not is_sender(by):
        raise Refused(
            BadCommand,
            f"({by.lane!r:.80}, {by.incarnation}, {by.n}) is no sender: take a process's name, or with '/' its lane "
            f"0 to {LANES_MAX - 1}, and numbers from 0 to {NUMBER_MAX}",
        )


def _is_lane(text: str) -> bool:
    short = 0 < len(text) <= _LANE_CHARS_MAX and text.isascii() and text.isdecimal()
    return short and text == str(int(text)) and int(text) < LANES_MAX


def checked_digest(what: str, text: str) -> str:
    """Return a digest (or what stands for one): 1 to 64 letters, digits, `_` or `-`."""
    if not is_name(text):
        raise Refused(BadCommand, f"{what} {text!r:.80} is no digest: send the hexadecimal digits of it")
    return text


def checked_number(what: str, number: int) -> int:
    """Return a number that can be counted, kept and written."""
    if not 0 <= number <= NUMBER_MAX:
        raise Refused(BadCommand, f"{what} {number} is out of range: take 0 to {NUMBER_MAX}")
    return number
