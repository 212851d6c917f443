"""What is asked of a registry and of a log: bounds, where watching begins, and words about versions that are gone."""

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest

from tensorhub import AsyncHub
from tensorhub._control.lost_versions import explain
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub._control.watch import Watched, _start, _watched
from tensorhub.cli.commands import pull
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing, NoAnswer
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol.log.commands import Command, Retain
from tensorhub_common.protocol.queries import ReplicaInfo, ShardInfo, VersionInfo

LATE_S = 0.05
BOUND_S = 60.0


async def test_a_bound_holds_for_all_that_one_call_asks(hub: AsyncHub, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []

    async def late(*_: object) -> None:
        await asyncio.sleep(LATE_S)

    async def note(_: object, __: str | Command, timeout_s: float) -> tuple[Any, ...]:
        noted.append(timeout_s)
        return ()

    for name in ("open_job", "status"):
        monkeypatch.setattr(RegistryClient, name, late)
    for name in ("versions", "replicas", "_say"):
        monkeypatch.setattr(RegistryClient, name, note)
    registry = RegistryClient("run-7", NatsAddress("nats://127.0.0.1:1"))
    await registry.rule(Retain(model="policy", last=1), BOUND_S)
    await registry.delete_job(BOUND_S)
    await hub.versions("policy", timeout_s=BOUND_S)
    hub._job_is_open = False
    await hub.replicas("policy", timeout_s=BOUND_S)
    await hub.versions("policy", timeout_s=BOUND_S)
    assert [0 < bound <= BOUND_S - LATE_S / 2 for bound in noted] == [True, True, True, True, False]


# --------------------------------------------------------------------------------------------------------- watching


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

    async def begin(self, after: int | None = None) -> int:
        bus = cast("Bus", self)
        return await _start(bus, JobLog(bus, "run-7"), after)


async def test_watching_begins_after_what_was_seen_or_says_why_it_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_WAIT_S", 0.0)
    stands = {"state": {"first_seq": 5, "last_seq": 9}}
    missing = {"error": {"code": 404, "err_code": api.STREAM_NOT_FOUND, "description": "stream not found"}}
    assert [await Answering(stands, silent).begin() for silent in (0, 1, api.ATTEMPTS_MAX - 1)] == [5, 5, 5]
    assert [await Answering(stands).begin(after) for after in (7, 4)] == [8, 5]
    with pytest.raises(LogGap, match="begins at 5 now"):
        await Answering(stands).begin(after=3)
    with pytest.raises(NoAnswer, match=r"STREAM\.INFO\.TENSORHUB_run-7"):
        await Answering(stands, api.ATTEMPTS_MAX).begin()
    with pytest.raises(LogMissing, match="there is no job 'run-7'"):
        await Answering(missing).begin()


def test_a_kind_of_event_that_a_later_release_has_added_is_told_by_its_name_or_passed_over() -> None:
    """What is known of it stands where it stands in all events."""

    def told(version: object) -> Watched | None:
        body = {
            "kind": "version.moved",
            "cmd": 3,
            "i": 1,
            "k": 1,
            "time": 12.5,
            "version": version,
            "to": {"site": "x"},
        }
        subject = "tensorhub.v1.run-7.event.policy.version.moved"
        return _watched(StoredEntry(7, 1000.5, subject, {}, json.dumps(body).encode()), "policy")

    assert told(4) == Watched(seq=7, time=12.5, kind="version.moved", model="policy", version=4)
    assert told([4, 5]) is None


# ---------------------------------------------------------------------------------------------------- lost versions

NOW = 1_000.0


def version(number: int, state: str = "unavailable", gone: str = "lost") -> VersionInfo:
    holders = ("trainer",) if state == "available" else ()
    return VersionInfo(
        model="m", version=number, state=state, publisher="trainer", published_at=1.0, holders=holders, gone=gone
    )


def replica(name: str, agent: str, lost_at: float = 0.0, *, mapped: bool = False) -> ReplicaInfo:
    at: dict[str, Any] = {"shard": 0, "agent": agent, "host": "h", "live": not lost_at, "lost_at": lost_at}
    shard = ShardInfo(state="empty", version=None, nbytes=8, layout="0" * 64, **at)
    return ReplicaInfo(
        model="m", replica=name, version=None, shards=1, spot=False, mapped=mapped, round=None, members=(shard,)
    )


HERE, TRAINER = replica("reader", "agent-1"), replica("trainer", "agent-0", NOW - 12)
OLDER, MAPPED = replica("older", "agent-2", NOW - 600), replica("mapped", "agent-3", NOW, mapped=True)
REPLACED = [version(1, gone="replaced"), version(2, gone="replaced")]
ONE = "version 3 of model 'm' was published, but its last holder "
SEVERAL = "versions 1 to 3 of model 'm' were published, but the last holder of version 3"
UNTIL = "wait until a version is published again"
AGAIN = "publish again from a checkpoint"
AFTER_LOSS = f"start that agent again, which brings it back if its host has kept the memory, or {AGAIN}"


@pytest.mark.parametrize(
    ("versions", "replicas", "asked", "said"),
    [
        ([version(3)], [TRAINER, HERE], None, f"{ONE}is lost (trainer on agent-0, lost 12 s ago): {AFTER_LOSS}"),
        (
            [*REPLACED, version(3)],
            [OLDER, TRAINER, MAPPED, HERE],
            None,
            f"{SEVERAL} is lost (trainer on agent-0, lost 12 s ago, older on agent-2, lost 10 min ago): {AFTER_LOSS}",
        ),
        # A lost agent that is forgotten, or was back without its memory, is not waited for.
        ([version(3)], [HERE], None, f"{ONE}is lost: {AGAIN}"),
        ([version(3, gone="unpublished")], [TRAINER], None, f"{ONE}has unpublished it: {UNTIL}"),
        ([version(3), version(4, "available", "")], [HERE], 3, f"{ONE}is lost: {AGAIN}; available now: [4]"),
        # Nothing is claimed where one can be read, nothing was published, or an older registry does not say why.
        *(([version(3), version(4, "available", "")], [TRAINER], asked, "") for asked in (None, 4)),
        ([], [TRAINER], None, ""),
        ([version(3, gone="")], [TRAINER], None, ""),
        ([version(3, "retired", "")], [TRAINER], 3, ""),
    ],
)
def test_lost_versions(versions: list[VersionInfo], replicas: list[ReplicaInfo], asked: int | None, said: str) -> None:
    assert explain("m", versions, replicas, asked, NOW) == said


def test_pull_says_it_too() -> None:
    with pytest.raises(VersionUnavailable, match=r"was published, but its last holder is lost \(trainer on agent-0"):
        pull._choose([version(3)], [TRAINER], "m", None)
    with pytest.raises(VersionUnavailable, match="no version that anybody holds now"):
        pull._choose([], [], "m", None)
