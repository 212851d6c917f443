"""A model whose tokens tell who made them: a response that mixes attempts wrongly is seen at once. Pure."""

from hashlib import sha256
from typing import Final

from tensorhub_common.protocol.rollout.entries import Attempt

TOKENS_MAX: Final = 40
STOP: Final = 2
STOPS_AFTER: Final = 24
"""The mean number of tokens until a response stops, wherever it was begun: another attempt has another length."""


def token_of(seed: int, position: int, attempt: Attempt) -> int:
    """Return the token that an attempt makes there."""
    text = f"{seed}/{position}/{attempt.term}/{attempt.n}"
    drawn = int.from_bytes(sha256(text.encode()).digest()[:3])
    return STOP if drawn % STOPS_AFTER == 0 else STOP + 1 + drawn
