"""How the bound of a worker's call is divided between its agent and the worker. Pure.

The caller's bound is the bound: when it is over, the call returns or raises, whatever its agent does. So that the agent
can still say what became of it, the agent gives up a little earlier, asks the log for its word, and answers in any case
before the caller stops waiting.

Invariant: `gives_up_s` < `gives_up_s` + `outcome_s` < `end_s`, and `end_s` is the caller's bound, or `END_S_MIN` where
that is longer.
"""

from typing import Final, NamedTuple

END_S_MIN: Final = 2.0
"""The least time to wait for an answer: a bound of 0 means that readers are not waited for, not that there is no time
to answer."""

LAST_SHARE: Final = 0.25
"""The share of a bound that is left for the log's outcome and the answer, from `LAST_S_MIN` to `LAST_S_MAX`."""

LAST_S_MAX: Final = 2.5
LAST_S_MIN: Final = 0.5

OUTCOME_SHARE: Final = 0.8
"""Of that, what the log has for its word; the rest is for the answer's way."""

OUTCOME_S_MAX: Final = OUTCOME_SHARE * LAST_S_MAX
"""After giving up, a call waits so long for the log's word before it is fenced and raises `RegistryUnavailable`."""


class Bound(NamedTuple):
    """The seconds from a call's beginning until the agent gives up, the log's time after that, and the end."""

    gives_up_s: float
    outcome_s: float
    end_s: float


def bound_of(timeout_s: float) -> Bound:
    """Divide a caller's bound."""
    end_s = max(timeout_s, END_S_MIN)
    last_s = min(max(LAST_SHARE * timeout_s, LAST_S_MIN), LAST_S_MAX)
    gives_up_s = min(timeout_s, end_s - last_s)
    return Bound(gives_up_s, min(OUTCOME_SHARE * (end_s - gives_up_s), OUTCOME_S_MAX), end_s)
