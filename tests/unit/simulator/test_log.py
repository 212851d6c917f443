"""The modelled log keeps one order, knows ids for a while, and refuses a stale publisher."""

from random import Random

import pytest

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.events import ShardReleased
from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.faultsim.models.job_log import Follower, JobLogModel, WrongLast

EVENT = encode(ShardReleased(model="m", replica="r", shard=0, cmd=1, i=1, k=1))


def test_an_id_is_known_within_the_window_only() -> None:
    clock = Clock()
    log = JobLogModel(clock, 2.0, Node("nats", Random(1)))
    assert log.append("t.v1.j.cmd.x", b"{}", "id") == log.append("t.v1.j.cmd.x", b"{}", "id") == 1
    clock.now = 3.0
    assert log.append("t.v1.j.cmd.x", b"{}", "id") == 2


def test_an_event_stands_only_behind_the_one_that_was_expected() -> None:
    log = JobLogModel(Clock(), 2.0, Node("nats", Random(1)))
    assert log.append("t.v1.j.event.m.shard.released", EVENT, "a", 0) == 1
    assert log.append("t.v1.j.event.m.shard.released", EVENT, "a", 0) == 1, "its own answer got lost"
    with pytest.raises(WrongLast):
        log.append("t.v1.j.event.m.shard.released", EVENT, "b", 0)


def test_a_follower_reads_in_order_and_not_while_it_is_stopped() -> None:
    clock = Clock()
    log = JobLogModel(clock, 2.0, Node("nats", Random(1)))
    node = Node("reader", Random(2))
    node.up = True
    seen: list[int] = []
    Follower(log, node, 0, lambda entry: seen.append(entry.seq), events=False)
    node.state.paused = True
    for number in range(3):
        log.append("t.v1.j.cmd.x", b"{}", str(number))
    while clock.step():
        pass
    assert seen == []
    clock.resume(node)
    while clock.step():
        pass
    assert seen == [1, 2, 3]
