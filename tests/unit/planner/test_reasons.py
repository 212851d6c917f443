"""The sentences that go with plans and refusals."""

from tests.unit.planner.given import MIB, SIZES, TOPOLOGY, answer, demand, holder, planned, refused

from tensorhub_planner.catalog_view.holders import ABSENT_MAX, HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.explain import CHOICES_TOLD_MAX, why_refusal
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import Topology

HOST = Topology({**TOPOLOGY.places, "neighbour": TOPOLOGY.places["me"]})


def test_one_source() -> None:
    found = planned(holder("a"))
    assert found.why == "256 pieces (1 GiB); 1 of 1 source on the same site"
    assert found.shares[0].why == "the same site; number 1 of 1 there by load (0 readers, 0 B assigned)"


def test_why_not_more_sources() -> None:
    assert "more would hardly be faster than 43.9 ms by the model" in planned(holder("a"), holder("b")).why
    beside = planned(holder("beside"), holder("neighbour"), topology=HOST)
    assert "the reader's own copying or the link is the bound there: more would gain nothing" in beside.why


def test_small_things_are_told_in_bytes() -> None:
    found = planned(holder("a"), sizes=PieceSizes([7]), load={("a", "ucxx"): Load(1, 2048)})
    assert "1 piece (7 B)" in found.why
    assert "1 reader, 2 KiB assigned" in found.shares[0].why
    assert "(3 MiB)" in planned(holder("a"), sizes=PieceSizes([3 * MIB])).why


def test_why_so_many_sources() -> None:
    """Of two with one reader each: in milliseconds, which 1 GiB takes from both and would take from one."""
    load: LoadView = {(agent, "ucxx"): Load(1, 1) for agent in "ab"}
    assert planned(holder("a"), holder("b"), load=load).why == (
        "256 pieces (1 GiB); 2 of 2 sources on the same site, which by the model takes 44.9 ms instead of 86.9 from one"
    )


def test_who_was_left_out_is_all_that_is_told_of_it() -> None:
    found = planned(holder("a"), holder("b"), wants=demand(avoid=["b"]))
    assert found.why == "256 pieces (1 GiB); 1 of 1 source on the same site; left out: on-b/0 on b failed this read"


def test_many_choices_are_cut_short() -> None:
    parts = [holder(name, pieces=((n * 10, 10),)) for n, name in enumerate("abcde")]
    found = planned(*parts, holder("far"), sizes=SIZES)
    assert f"and {6 - CHOICES_TOLD_MAX} more groups of pieces" in found.why
    all_told = planned(*parts[: CHOICES_TOLD_MAX - 1], holder("far"), sizes=SIZES)
    assert all_told.why.count("; ") == CHOICES_TOLD_MAX
    assert "more groups" not in all_told.why


def test_many_reasons_are_counted() -> None:
    left_out = [f"shard {n} failed" for n in range(ABSENT_MAX + 4)]
    assert why_refusal("it", left_out, (), HolderSet((), (), 2)).count("failed") == ABSENT_MAX
    assert "and 6 more" in why_refusal("it", left_out, (), HolderSet((), (), 2))


def test_a_refusal_says_what_to_do() -> None:
    assert refused(answer(holder("a"), wants=demand(avoid=["a"]))).reason == (
        "no source is left for version 12 of 'policy' (on-a/0 on a failed this read): "
        "wait for another holder, and ask again"
    )
