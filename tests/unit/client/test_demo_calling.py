"""The demo's processes call again where the hub's errors say so, and end where that does not help."""

import types
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from tensorhub import (
    AgentUnavailable,
    AsyncHub,
    NotPublished,
    RegistryUnavailable,
    ReplicaConflict,
    RoundTimeout,
    TensorHubError,
)
from tensorhub.demo import calling as module
from tensorhub.demo.calling import CALLS_MAX, calling
from tensorhub.demo.messages import AnyMessage, AnyOrder, Joined, Leave, Part, Published, Rest, Rested, Trouble
from tensorhub.demo.rollout import Rollout
from tensorhub.demo.size import Size
from tensorhub.demo.station import Station
from tensorhub.demo.trainer import Trainer

LOST = AgentUnavailable("the agent was taken for lost and has joined anew: call again")
SILENT = RegistryUnavailable("no registry answers")
LATE = RoundTimeout("shards [1] did not publish within the bound: publish again")


class FakeStation:
    """Keeps what is said, and gives these orders, then the one to leave."""

    def __init__(self, *orders: AnyOrder | None) -> None:
        self.orders, self.said = list(orders), list[AnyMessage]()

    def say(self, message: AnyMessage) -> None:
        self.said.append(message)

    def told(self) -> AnyOrder | None:
        return self.orders.pop(0) if self.orders else Leave()

    async def next(self) -> AnyOrder:
        return Leave()

    @property
    def troubles(self) -> list[str]:
        return [each.error for each in self.said if isinstance(each, Trouble)]


class Failing:
    """A call that fails with these errors in turn, and then does what it should."""

    def __init__(self, *errors: TensorHubError, result: object = None) -> None:
        self.errors, self.result, self.calls = list(errors), result, 0

    async def __call__(self, *_arguments: object, **_named: object) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.result


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


async def called(call: Callable[[], Awaitable[object]]) -> list[str]:
    station = FakeStation()
    await calling(call, cast("Station", station))
    return station.troubles


async def test_each_failure_is_told_and_the_call_made_again() -> None:
    call = Failing(LOST, SILENT, LATE)
    assert await called(call) == ["AgentUnavailable", "RegistryUnavailable", "RoundTimeout"]
    assert call.calls == 4


async def test_a_hub_that_stays_away_ends_it() -> None:
    call = Failing(*[SILENT] * (CALLS_MAX + 1))
    with pytest.raises(RegistryUnavailable):
        await called(call)
    assert call.calls == CALLS_MAX


async def test_what_calling_again_can_t_mend_is_raised_at_once() -> None:
    call = Failing(ReplicaConflict("it has a live worker"))
    with pytest.raises(ReplicaConflict):
        await called(call)
    assert call.calls == 1


def part(replica: str) -> Part:
    tiny = Size(width=64, layers=2, heads=2, hidden=128)
    return Part(replica=replica, job="job", agent="socket", size=tiny, steps=1, rows=1, row_tokens=8, tokens=2)


async def test_a_trainer_goes_on_when_its_agent_was_taken_for_lost() -> None:
    """At each of its calls; and an unpublish that happened, though it raised, is no fault."""
    shards = [
        types.SimpleNamespace(publish=Failing(LOST, result=1), unpublish=Failing(SILENT)),
        types.SimpleNamespace(publish=Failing(LATE, result=1), unpublish=Failing(SILENT, NotPublished("nothing is"))),
    ]
    station, register, replicas = FakeStation(None, Rest()), Failing(LOST), Failing(SILENT)
    registered = iter(shards)

    class Hub:
        async def register(self, *_arguments: object, **_named: object) -> object:
            await register()
            return next(registered)

        async def replicas(self, _model: str) -> list[object]:
            await replicas()
            published = [each.version for each in station.said if isinstance(each, Published)]
            return [types.SimpleNamespace(replica="rollout-1", version=published[-1], round=None)]

    await Trainer(part("trainer"), cast("Station", station)).run(cast("AsyncHub", Hub()))
    assert [each.version for each in station.said if isinstance(each, Published | Rested)] == [1, 2, 2]
    assert sorted(station.troubles) == [*["AgentUnavailable"] * 2, *["RegistryUnavailable"] * 3, "RoundTimeout"]


async def test_a_rollout_registers_again_when_its_agent_was_taken_for_lost() -> None:
    shard = types.SimpleNamespace(version=None)
    hub = types.SimpleNamespace(register=Failing(LOST, SILENT, result=shard))
    station = FakeStation()
    await Rollout(part("rollout-1"), cast("Station", station)).run(cast("AsyncHub", hub))
    assert station.troubles == ["AgentUnavailable", "RegistryUnavailable"]
    assert isinstance(station.said[-1], Joined)
