"""How soon a connection whose server is silent counts as gone, though its socket be open.

A server that is pinged counts as gone when it owes `PINGS_OUTSTANDING_MAX` answers and another is due. Always true of
connections that agents' beats go by: a server that stops is left long before an agent would be lost by it.
"""

from typing import Final

PING_EVERY_S: Final = 1.0
PINGS_OUTSTANDING_MAX: Final = 2
"""A server that answers no ping for about three seconds counts as gone."""

KEEPALIVE_SHARE_MAX: Final = 0.5
"""Of the time after which a silent agent is lost, so much may pass before a connection counts as gone that beats go by:
else a node of a NATS cluster that stops would cost agents their place."""


def ping_every_s(lost_after_s: float) -> float:
    """Return how often NATS is to be pinged on a connection that beats go by."""
    return min(PING_EVERY_S, KEEPALIVE_SHARE_MAX * lost_after_s / (PINGS_OUTSTANDING_MAX + 1))
