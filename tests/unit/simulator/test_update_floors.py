"""An update that goes back is found by the log's own words."""

from collections.abc import Sequence

import pytest

from tensorhub_common.protocol.log.commands import AnyCommand, Granted, Join, Sender, VersionRequest, Want
from tensorhub_common.protocol.log.events import (
    AgentLost,
    AnyEvent,
    Event,
    ModelRewound,
    ReplicaReady,
    RoundDecided,
    RoundJoined,
    RoundStarted,
    ShardDraining,
)
from tensorhub_common.protocol.log.levels import Level
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.invariants.log_rules import UpdateFloors

BY = Sender("a/1", 1, 1)
ROUND = 20
ABOUT = {"model": "m", "replica": "engine", "i": 1, "k": 1, "time": 0.0, "by": BY}

Step = tuple[AnyCommand, AnyEvent]


def event(kind: type[Event], cmd: int = ROUND, **fields: object) -> AnyEvent:
    return kind(**{"cmd": cmd, **ABOUT, **fields})  # type: ignore[return-value,arg-type]


def joined(wish: VersionRequest = "newer") -> Step:
    want = Want(by=BY, model="m", replica="engine", shard=0, want=wish)
    return want, event(RoundJoined, round=ROUND, shard=0, missing=())


def other(happened: AnyEvent) -> Step:
    return Granted(by=BY, model="m", replica="engine", shard=0, round=ROUND, attempt=1), happened


READY = other(event(ReplicaReady, cmd=10, version=12))
STARTED = other(event(RoundStarted, cmd=21, round=ROUND, attempt=1, version=13))
OLDER = other(event(RoundDecided, cmd=22, round=ROUND, attempt=2, version=11, roots=()))
SAME = other(event(RoundDecided, cmd=22, round=ROUND, attempt=2, version=12, roots=()))
DRAINED = other(event(ShardDraining, cmd=11, shard=0, version=12))
LOST = (Join(by=BY, host="h", site="s"), AgentLost(agent="a", incarnation=1, term=1, cmd=11, i=1, k=1, time=0.0, by=BY))
REWOUND = other(ModelRewound(model="m", to=11, last=12, cmd=21, i=1, k=1, time=0.0, by=BY))


def goes_back(*steps: Step, level: Level = Level.NEVER_OLDER) -> bool:
    floors = UpdateFloors(level)
    try:
        for command, happened in steps:
            floors.see(command, (happened,))
    except Violation as broken:
        return broken.invariant == "updates never go back"
    return False


@pytest.mark.parametrize(
    ("steps", "back"),
    [
        ([READY, joined(), STARTED, OLDER], True),
        ([READY, joined(), STARTED, SAME], False),
        ([READY, joined("latest"), STARTED, OLDER], False),
        ([READY, DRAINED, joined(), STARTED, OLDER], False),
        ([READY, LOST, joined(), STARTED, OLDER], False),
        ([READY, joined(), STARTED, REWOUND, OLDER], False),
        ([joined(), STARTED, OLDER], False),
    ],
    ids=["older", "the same again", "latest", "drained before", "lost before", "rewound", "held nothing"],
)
def test_what_goes_back_is_found(steps: Sequence[Step], *, back: bool) -> None:
    assert goes_back(*steps) is back


def test_below_its_level_nothing_is_demanded() -> None:
    assert not goes_back(READY, joined(), STARTED, OLDER, level=Level.FORGETTING)
