"""Calls of a session, joined to trajectories. Pure.

Always true: the tokens of a trajectory are, from its first call's prompt to its last token, those of the prompt and the
response of its last call. Nothing is tokenised here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tensorhub._rollouts.responses import NO_VERSION, Response, SessionEnd, Turn
from tensorhub_common.errors import IntegrityError
from tensorhub_common.protocol.rollout.entries import RequestId


class Call(NamedTuple):
    """One call of a trajectory. The fields are those of `Turn`."""

    response: Response
    is_trained: bool
    forked: str | None


class EndedSession(NamedTuple):
    """A session that has ended: its trajectories, and the requests that are done with them."""

    session: str
    requests: tuple[RequestId, ...]
    trajectories: tuple[Response, ...]


def trajectory_of(
    session: str,
    index: int,
    calls: Sequence[Call],
    *,
    reward: float | None,
    end: SessionEnd,
    metadata: Any = None,  # noqa: ANN401 (anything that JSON has)
) -> Response:
    """Return the trajectory of calls, each of which goes on from the one before it.

    `index`: which of its session's trajectories it is. Raises `IntegrityError` where a call does not go on from the one
    before it, token for token.
    """
    first, last = calls[0].response, calls[-1].response
    behind = len(first.prompt_ids)
    token_ids = np.concatenate([last.prompt_ids[behind:], last.token_ids])
    logprobs, versions = np.zeros(len(token_ids), np.float32), np.full(len(token_ids), NO_VERSION, np.int64)
    turns, runs, whole = [], [], np.concatenate([last.prompt_ids, last.token_ids])
    for call in calls:
        made = call.response
        start = len(made.prompt_ids) - behind
        end_at = start + len(made.token_ids)
        if not (
            np.array_equal(whole[: len(made.prompt_ids)], made.prompt_ids)
            and np.array_equal(token_ids[start:end_at], made.token_ids)
        ):
            raise IntegrityError(f"call {made.turn} of session {session!r} is not what a later call goes on from")
        logprobs[start:end_at], versions[start:end_at] = made.logprobs, made.versions
        runs += [replace(run, start=start + run.start, end=start + run.end) for run in made.runs]
        turns.append(Turn(made.turn or 0, start, end_at, call.is_trained, call.forked, made))
    return Response(
        group=session,
        index=index,
        prompt_ids=first.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        runs=tuple(runs),
        finish_reason=last.finish_reason,
        error=last.error,
        seed=last.seed,
        sampling=last.sampling,
        metadata=metadata,
        age=max(call.response.age for call in calls),
        since_submit=first.since_submit,
        session=session,
        turns=tuple(turns),
        reward=reward,
        session_end=end,
    )
