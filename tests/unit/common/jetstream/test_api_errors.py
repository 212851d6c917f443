"""What JetStream's errors mean: nothing was done and won't be, or nobody could answer just now."""

import pytest

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogFull, NoAnswer, StreamFailure, WrongLastSequence
from tensorhub_common.jetstream import api


class Refusing:
    """A bus on which every request is refused."""

    def __init__(self, code: int, text: str) -> None:
        self._body = f'{{"error": {{"code": 500, "err_code": {code}, "description": "{text}"}}}}'.encode()

    async def request(self, *_: object) -> bytes:
        return self._body


def refusing(code: int, text: str = "no") -> Bus:
    return Refusing(code, text)  # type: ignore[return-value]


@pytest.mark.parametrize("code", [10004, 10006, 10008, 10009])
async def test_a_node_that_can_not_answer_now_is_no_refusal(code: int) -> None:
    """Whoever waits for an answer asks again, and says so to people where it was asked in vain."""
    with pytest.raises(NoAnswer, match=r"temporarily unavailable\. More than half of its nodes must run"):
        await api.api(refusing(code, "JetStream system temporarily unavailable"), "STREAM.INFO.x")
    with pytest.raises(NoAnswer):
        await api.store(refusing(code), "subject", b"")


@pytest.mark.parametrize(
    ("code", "error"), [(10071, WrongLastSequence), (10077, LogFull), (10059, StreamFailure), (10158, StreamFailure)]
)
async def test_a_refusal_is_one(code: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        await api.store(refusing(code, "wrong last sequence: 7"), "subject", b"")


async def test_replicas_without_a_cluster_are_told_with_what_to_do() -> None:
    with pytest.raises(StreamFailure, match="Run a NATS cluster, or set TENSORHUB_LOG_REPLICAS=1"):
        await api.api(refusing(10074, "replicas > 1 not supported in non-clustered mode"), "STREAM.CREATE.x")
