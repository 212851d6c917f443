"""Which tokens of an open response a checkpoint has written: those that the log does not have yet. Pure."""

from tensorhub_common.protocol.rollout.entries import TokensKept
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES
from tensorhub_rollout.core.leader_events import StoreTokens
from tensorhub_rollout.core.placement import AttemptState, Placement
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.state import Request


def checkpoint(placement: Placement, response: Response | None, stored: Request | None) -> StoreTokens | None:
    """Return what to write of a response, as its leader has it; None: nothing. `stored`: what the log has of it."""
    if response is None or stored is None or response.attempt is None or placement.state is AttemptState.COMPLETE:
        return None
    start = _kept_of(response, placement, stored)
    if response.count <= start:
        return None
    part = TokensKept(placement.request, response.attempt, start, response.count)
    first = TOKEN_BYTES * start
    runs = tuple(run for run in response.runs if run.start >= start) or tuple(response.runs[-1:])
    return StoreTokens(placement.runner, part, bytes(response.tokens[first:]), bytes(response.logprobs[first:]), runs)


def _kept_of(response: Response, placement: Placement, stored: Request) -> int:
    """Return how many tokens of a response the log has."""
    if stored.attempt is None or stored.attempt == response.attempt:
        return stored.kept
    if response.dropped is not None and stored.attempt <= response.dropped:
        return 0
    # Behind the place where a later attempt began, the log has other tokens.
    return min(stored.kept, placement.began_at)
