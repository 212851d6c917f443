"""The rows of a runner's frame: new tokens of its attempts.

Nearly all rows are of attempts that have made tokens and go on, and begin where the last one ended: these only grow
their response, here and at once. All others are handed on, each in its turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Frame, attempt_of
from tensorhub_rollout.core.instance import Instance


@dataclass(slots=True)
class Row:
    """Tokens of an attempt from `start` on, counted from the response's first token."""

    attempt: Attempt
    start: int
    count: int
    tokens: memoryview
    logprobs: memoryview


def rows_to_judge(instance: Instance, frame: Frame) -> Iterator[Row]:
    """Take the rows that only grow their responses, and yield the others before those behind them are taken."""
    streaming = instance.streaming
    tokens, logprobs, at = memoryview(frame.tokens), memoryview(frame.logprobs), 0
    columns = (memoryview(column).cast("q") for column in (frame.attempts, frame.starts, frame.counts))
    for key, start, count in zip(*columns, strict=True):
        end = at + TOKEN_BYTES * count
        stream = streaming.get(key)
        if stream is not None:
            response, tokens_max = stream
            if TOKEN_BYTES * start == len(response.tokens) and start + count <= tokens_max:
                response.tokens += tokens[at:end]
                response.logprobs += logprobs[at:end]
                instance.tokens += count
                at = end
                continue
        yield Row(attempt_of(key), start, count, tokens[at:end], logprobs[at:end])
        at = end
