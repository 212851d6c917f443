"""Is what a command says well formed? Whatever the catalog keeps or repeats in an event has passed here.

A registry must be able to write every event that the fold makes of a command, whoever sent it: so names fit into
subjects, digests are short (one event names those of all shards), and numbers are what every JSON reader keeps exact.
"""

from typing import Final

from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.errors import BadCommand
from tensorhub_common.names import is_name

NUMBER_MAX: Final = 2**53 - 1
"""The largest number that every JSON reader keeps exact."""


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
