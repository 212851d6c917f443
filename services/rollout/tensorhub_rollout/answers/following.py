"""Which tokens are new of the responses that somebody follows while they are made. Pure.

The asker says how many tokens it has of each, so an answer that was lost is asked for again, of another leader as well.
"""

from collections.abc import Mapping
from typing import Final

from tensorhub_common.errors import StaleSender
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES
from tensorhub_common.protocol.rollout.questions import (
    FOLLOW_BYTES_MAX,
    FollowAnswer,
    FollowedTokens,
    FollowQuestion,
)
from tensorhub_rollout.answers.sdk import REPLACED, consumer_of
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.state import RolloutState

BYTES_OF_TOKEN: Final = 2 * TOKEN_BYTES
"""With its log-probability."""


class Following:
    """One question: its places are looked up once, and then looked at until one has something new."""

    def __init__(self, state: RolloutState, question: FollowQuestion) -> None:
        self._state, self._attachment = state, question.attachment
        self._places: list[tuple[int, RequestId, int]] = []
        """Number in the question, request, bytes of tokens that the asker has."""
        consumer = consumer_of(state, question.attachment)
        if consumer is None:
            return
        for number, place in enumerate(question.places):
            found = consumer.ids.get(place.group)
            if found is not None:
                group = state.submissions[found[0]].groups[found[1]]
                if place.index < group.size:
                    of = RequestId(found[0], group.first + place.index)
                    self._places.append((number, of, TOKEN_BYTES * place.tokens))

    def answer(self, responses: Mapping[RequestId, Response]) -> FollowAnswer:
        """Return what is new now. `responses`: those that the leader holds."""
        if consumer_of(self._state, self._attachment) is None:
            return FollowAnswer(error=StaleSender.__name__, message=REPLACED)
        rows, room = list[FollowedTokens](), FOLLOW_BYTES_MAX
        for number, of, at in self._places:
            response = responses.get(of)
            if response is None or len(response.tokens) <= at:
                continue
            nbytes = min(len(response.tokens) - at, max(room // 2, TOKEN_BYTES) // TOKEN_BYTES * TOKEN_BYTES)
            if rows and room < BYTES_OF_TOKEN:
                break
            end = at + nbytes
            rows.append(FollowedTokens(number, bytes(response.tokens[at:end]), bytes(response.logprobs[at:end])))
            room -= 2 * nbytes
        return FollowAnswer(tuple(rows))
