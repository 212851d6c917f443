"""What an agent says with its beats of who reads from it."""

from typing import Any

import msgspec
import pytest

from tensorhub_agent.leases.reader_load import reader_loads, reader_of
from tensorhub_common.protocol.heartbeat import SERVED_MAX, Heartbeat, ReaderLoad, ServingLoad
from tensorhub_common.protocol.leases import LeaseRequest
from tensorhub_common.protocol.plans import ReadPriority, SourceId, Transport

ASK = LeaseRequest(
    job="run-7",
    model="policy",
    source=SourceId("agent-0", 1, "trainer", 0),
    version=12,
    root=None,
    reader=SourceId("agent-9", 1, "rollout", 3),
    turn=ReadPriority(decided=4711, round=4699),
    nbytes=5,
)
ONE = ReaderLoad("run-7", "policy", "rollout", 3, 4711, 5)


LONG = SourceId("agent-9", 1, "r" * 100_000, 3)


@pytest.mark.parametrize(
    ("more", "served"),
    [pytest.param({}, (ONE,), id="named"), pytest.param({"turn": None}, (), id="says no turn"),
     pytest.param({"reader": LONG}, (), id="no such name can be")],
)  # fmt: skip
def test_a_lease_says_whose_it_is_and_where_in_the_log_that_was_decided(
    more: dict[str, Any], served: tuple[ReaderLoad, ...]
) -> None:
    """Whom the log could not end is only counted; nor would a beat with any name in it fit into a message."""
    reader = reader_of(msgspec.structs.replace(ASK, **more))
    assert reader_loads([("ucxx", reader)]) == (ServingLoad("ucxx", 1, 5, served),)


def test_readers_of_all_jobs_come_together_by_their_way() -> None:
    other, near = ReaderLoad("run-8", "policy", "rollout", 3, 9, 1), ReaderLoad("run-7", "policy", "near", 0, 4711, 2)
    found = reader_loads([("ucxx", ONE), ("local", near), ("ucxx", other)])
    assert found == (ServingLoad("ucxx", 2, 6, (ONE, other)), ServingLoad("local", 1, 2, (near,)))


def test_a_reader_with_several_leases_is_one() -> None:
    """On several shards of one agent, or in several streams: planners count readers as well. Its last round counts."""
    again = msgspec.structs.replace(ONE, decided=4800, nbytes=7)
    together = msgspec.structs.replace(ONE, decided=4800, nbytes=12)
    for leases in ((ONE, again), (again, ONE)):
        assert reader_loads([("ucxx", each) for each in leases]) == (ServingLoad("ucxx", 1, 12, (together,)),)


def test_no_more_are_named_than_fit_into_a_beat() -> None:
    """The others are counted: a beat with the longest names that there can be is far below a message's limit."""
    transports: tuple[Transport, ...] = ("ucxx", "local")
    longest = "x" * 64
    many = [
        (transport, ReaderLoad(longest, longest, longest, shard, 2**62, 2**62))
        for transport in transports
        for shard in range(SERVED_MAX + 3)
    ]
    found = reader_loads(many)
    assert [(each.readers, len(each.served)) for each in found] == [(SERVED_MAX + 3, SERVED_MAX)] * 2
    assert len(msgspec.json.encode(Heartbeat(agent=longest, incarnation=2**62, serving=found))) < 2**17


class _Serving(msgspec.Struct, frozen=True, array_like=True):
    """As a release before this one has it."""

    transport: Transport
    readers: int
    nbytes: int


def test_the_release_before_understands_it_and_is_understood() -> None:
    now = ServingLoad("ucxx", 1, 5, (ONE,))
    assert msgspec.json.decode(msgspec.json.encode(now), type=_Serving) == _Serving("ucxx", 1, 5)
    assert msgspec.json.decode(msgspec.json.encode(_Serving("ucxx", 1, 5)), type=ServingLoad) == ServingLoad(
        "ucxx", 1, 5
    )
