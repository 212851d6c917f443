"""The log's rules are judged from commands and events alone: each is broken once here."""

from collections.abc import Sequence
from typing import Any

import pytest

from tensorhub_common.protocol.log.commands import AnyCommand, Drained, Expire, Join, Sender
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    AnyEvent,
    CommandRejected,
    ReplicaReady,
    RoundDecided,
    ShardDrained,
    ShardFilled,
    ShardRegistered,
    VersionPublished,
)
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.invariants.log_rules import LogRules

PLACE: dict[str, Any] = {"model": "m", "replica": "r"}


def joined(incarnation: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Join(by=Sender("a", incarnation, 1), host="h", site="s")
    return command, [AgentJoined(agent="a", incarnation=incarnation, host="h", site="s")]


def drained(incarnation: int, n: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Drained(by=Sender("a/1", incarnation, n), shard=0, **PLACE)
    return command, [ShardDrained(shard=0, version=1, **PLACE)]


def expired(term: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Expire(by=Sender("_registry", term, 1), agent="b", incarnation=1, term=term)
    return command, [AgentLost(agent="b", incarnation=1, term=term)]


def after(*steps: tuple[AnyCommand, Sequence[AnyEvent]]) -> str | None:
    """Say which invariant breaks, if any."""
    rules = LogRules()
    try:
        for seq, (command, events) in enumerate(steps, start=1):
            rules.see(seq, command, tuple(events))
    except Violation as broken:
        return broken.invariant
    return None


def shard(index: int) -> AnyEvent:
    return ShardRegistered(shard=index, shards=2, spot=False, agent="a", layout=f"l{index}", **PLACE)


def published(version: int, *roots: str) -> AnyEvent:
    return VersionPublished(version=version, roots=roots, **PLACE)


def filled(index: int, root: str = "x") -> AnyEvent:
    return ShardFilled(shard=index, version=1, round=5, root=root, **PLACE)


DECIDED = RoundDecided(round=5, attempt=1, version=1, roots=("x", "y"), **PLACE)
READY = ReplicaReady(version=1, round=5, **PLACE)


def said(*events: AnyEvent) -> tuple[tuple[AnyCommand, list[AnyEvent]], ...]:
    """Let a live agent say one command for each event."""
    return (joined(1), *((drained(1, n)[0], [event]) for n, event in enumerate(events, start=2)))


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([joined(1), drained(1, 1), joined(3), drained(3, 1)], None),
        ([joined(3), drained(1, 1)], "the live incarnation alone counts"),
        ([joined(3), joined(2)], "incarnations only rise"),
        ([joined(1), drained(1, 1), drained(1, 1)], "each command counts once"),
        ([expired(2), expired(1)], "terms only rise"),
        (said(shard(0), shard(1), published(1, "x", "y"), published(2, "z", "y")), None),
        (said(shard(0), shard(1), published(2, "x", "y"), published(2, "x", "y")), "versions only rise"),
        (said(shard(0), shard(1), published(1, "x", "y"), filled(0, "z")), "a root stands for ever"),
        (said(shard(0), shard(1), DECIDED, filled(0, "x"), filled(1, "y"), READY), None),
        (said(shard(0), shard(1), DECIDED, filled(0, "x"), READY), "all shards are ready"),
    ],
)
def test_a_rule_that_is_broken_is_named(
    steps: Sequence[tuple[AnyCommand, Sequence[AnyEvent]]], broken: str | None
) -> None:
    assert after(*steps) == broken


def test_a_word_that_was_refused_breaks_nothing() -> None:
    refused = CommandRejected(verb="drained", error="StaleSender", message="over", model="m")
    assert after(joined(3), (drained(1, 1)[0], [refused])) is None
