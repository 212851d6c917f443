"""What a reader that maps is told: the memory of one ready holder on its own host, or why there is none."""

import msgspec
from tests.unit.planner.given import LAYOUT, SIZES, TOPOLOGY, agents, answer, demand, holder, planned, refused, source

from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import PlanRequest
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.primitives.topology import Topology


def mapped(*avoid: str) -> PlanRequest:
    return msgspec.structs.replace(demand(avoid=avoid), mapped=True)


def test_all_of_a_holder_on_the_readers_host_is_mapped() -> None:
    found = planned(holder("a"), holder("beside"), wants=mapped())
    [share] = found.shares
    assert (share.source, share.transport) == (source("beside"), "local")
    assert (share.pieces, share.nbytes) == (((0, len(SIZES)),), SIZES.of(((0, len(SIZES)),)))
    assert found.why == share.why == "mapped from the same host (0 readers): nothing is copied"
    assert found.version == 12


def test_the_nearest_comes_first_and_then_who_has_fewest_readers() -> None:
    own = holder("me")
    assert agents(planned(holder("beside"), own, wants=mapped())) == ["me"]
    load: LoadView = {("me", "local"): Load(readers=5, nbytes=0)}
    assert agents(planned(holder("beside"), own, wants=mapped(), load=load)) == ["me"]
    there = Topology({**TOPOLOGY.places, "neighbour": TOPOLOGY.places["me"]})
    for busy, idle in (("beside", "neighbour"), ("neighbour", "beside")):
        load = {(busy, "local"): Load(readers=1, nbytes=0)}
        found = planned(holder("beside"), holder("neighbour"), wants=mapped(), load=load, topology=there)
        assert agents(found) == [idle]


def test_no_memory_of_another_host_and_none_that_is_being_filled_is_mapped() -> None:
    said = refused(answer(holder("a"), holder("far"), holder("beside", turn=1), wants=mapped()))
    assert said.error == VersionUnavailable.__name__
    assert "no holder of version 12 of 'policy' stands ready on the host of agent 'me' with this layout" in said.reason
    assert "on a stands on another host, " in said.reason
    assert "on far stands on another site, " in said.reason
    assert "on beside is still being filled" in said.reason


def test_another_layout_or_a_failed_holder_is_not_mapped_and_both_are_named() -> None:
    other = holder("beside", layout="m" * len(LAYOUT))
    assert "has another layout" in refused(answer(other, wants=mapped())).reason
    assert "failed this read" in refused(answer(holder("beside"), wants=mapped("beside"))).reason
