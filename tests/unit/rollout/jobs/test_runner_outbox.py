"""What the leader asks a runner comes in requests that NATS takes."""

import asyncio
from typing import Any, Final

import msgspec

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    STOP_TOKEN_IDS_MAX,
    Assign,
    AssignAnswer,
    AssignRequest,
    AssignResult,
    PublishedVersions,
    Sampling,
    TokenRun,
    VersionRule,
)
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_rollout.jobs.runner_outbox import RunnerOutbox

MESSAGE_BYTES_MAX: Final = 1_048_576
"""What NATS takes."""
ATTEMPTS: Final = 200


class Bus:
    """Takes what NATS would take, and answers for the runner."""

    def __init__(self) -> None:
        self.held: list[Attempt] = []
        self.all_came = asyncio.Event()

    async def request(self, _subject: str, body: bytes, _timeout_s: float) -> bytes:
        assert len(body) <= MESSAGE_BYTES_MAX
        came = msgspec.msgpack.decode(body, type=AssignRequest).assigns
        self.held += [each.attempt for each in came]
        if len(self.held) >= ATTEMPTS:
            self.all_came.set()
        return msgspec.msgpack.encode(AssignAnswer(tuple(AssignResult(each.attempt, 0) for each in came)))


async def test_stop_tokens_and_runs_count_as_what_a_request_has() -> None:
    bus: Any = Bus()
    work = Supervisor("test")
    outbox = RunnerOutbox(bus, "job", "runner-0", work.group(), lambda _: None)
    sampling = Sampling(8, 7, stop_token_ids=tuple(range(100_000, 100_000 + STOP_TOKEN_IDS_MAX)))
    runs = tuple(TokenRun(at, at, "r" * 64, "runner-1", Attempt(1, 1)) for at in range(100))
    assigns = tuple(
        Assign(RequestId(3, n), Attempt(1, n), bytes(4), sampling, VersionRule(), runs=runs) for n in range(ATTEMPTS)
    )
    outbox.assign(AssignRequest("log", 1, 1, PublishedVersions(1), assigns))
    await asyncio.wait_for(bus.all_came.wait(), 10)
    assert bus.held == [each.attempt for each in assigns]
    await work.close()
