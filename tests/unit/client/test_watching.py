"""Where watching begins: what the log's state says, asked again while nobody answers."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest

from tensorhub._control.watch import Watched, _start, _watched
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing, NoAnswer
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry


class Answering:
    """A bus on which JetStream is silent for the first requests, as while a log's leader is elected."""

    server_info: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, answer: dict[str, Any], silent: int = 0) -> None:
        self._answer, self._silent = answer, silent

    async def request(self, subject: str, *_: object) -> bytes:
        if self._silent > 0:
            self._silent -= 1
            raise NoAnswer(f"no answer on {subject} within 5 s")
        return json.dumps(self._answer).encode()


async def begin(answering: Answering, after: int | None = None) -> int:
    bus = cast("Bus", answering)
    return await _start(bus, JobLog(bus, "run-7"), after)


STANDS = {"state": {"first_seq": 5, "last_seq": 9}}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_WAIT_S", 0.0)


@pytest.mark.parametrize("silent", [0, 1, api.ATTEMPTS_MAX - 1])
async def test_a_log_that_has_no_leader_for_a_while_is_asked_again(silent: int) -> None:
    assert await begin(Answering(STANDS, silent)) == 5


async def test_who_never_answers_is_named_in_the_end() -> None:
    with pytest.raises(NoAnswer, match=r"STREAM\.INFO\.TENSORHUB_run-7"):
        await begin(Answering(STANDS, api.ATTEMPTS_MAX))


async def test_it_goes_on_after_what_was_seen_or_says_that_it_can_not() -> None:
    assert await begin(Answering(STANDS), after=7) == 8
    assert await begin(Answering(STANDS), after=4) == 5
    with pytest.raises(LogGap, match="begins at 5 now"):
        await begin(Answering(STANDS), after=3)


async def test_a_job_that_nobody_has_begun_is_said_to_be_none() -> None:
    missing = {"error": {"code": 404, "err_code": api.STREAM_NOT_FOUND, "description": "stream not found"}}
    with pytest.raises(LogMissing, match="there is no job 'run-7'"):
        await begin(Answering(missing))


def entry_of(body: object) -> StoredEntry:
    return StoredEntry(7, 1000.5, "tensorhub.v1.run-7.event.policy.version.moved", {}, json.dumps(body).encode())


def test_a_kind_of_event_that_a_later_release_has_added_is_told_by_its_name() -> None:
    """What is known of it stands where it stands in all events."""
    body = {"kind": "version.moved", "cmd": 3, "i": 1, "k": 1, "time": 12.5, "version": 4, "to": {"site": "x"}}
    assert _watched(entry_of(body), "policy") == Watched(
        seq=7, time=12.5, kind="version.moved", model="policy", version=4
    )


def test_a_later_event_that_says_otherwise_what_is_known_is_passed_over() -> None:
    body = {"kind": "version.moved", "cmd": 3, "i": 1, "k": 1, "time": 12.5, "version": [4, 5]}
    assert _watched(entry_of(body), "policy") is None
