"""The planner's answer to a request, from a catalog and layouts alone: of its own program, and of fp8 blocks.

A block that no single shard has whole gets its scale from *partials*: units that bring the amax of one shard's part.
"""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_common.catalog.state import root_key
from tensorhub_common.errors import BadCommand
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_common.protocol.ranges import Range, intersect_ranges, merge_ranges, subtract_ranges
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.plan import make_plan
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.planning.verifier import PlanError
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver
from tensorhub_simulator.drivers.planner import Known, Layouts, at_once


class Planner:
    """A trainer has published; the other replicas, whose shards have these layouts, want to read."""

    def __init__(self, published: list[Layout], *, far: bool = False, **readers: list[Layout]) -> None:
        """`far`: the trainer stands in another site, and publishes when the others wait for it."""
        self.log, layouts = CatalogDriver(), Layouts()
        self.counts = {name: len(shards) for name, shards in readers.items()}
        for name, shards in {"trainer": published, **readers}.items():
            for shard, layout in enumerate(shards):
                agent = f"{name}-{shard}"
                self.log.join(agent)
                self.log.register(agent, name, shard, len(shards), layout=layouts.add(layout))
        for name in readers if far else ():
            self.log.want_all(name)
        for shard in range(len(published)):
            if far:
                self.log.catalog.agents[f"trainer-{shard}"].site = "far"
            self.log.ready("trainer", 1, shard)
        self.known = Known(layouts, lambda: CatalogReplica(self.log.catalog, self.log.catalog.seq), lambda: 0.0)

    def ask(self, replica: str = "engine", shard: int = 0, **more: Any) -> PlanAnswer:
        """Ask for a version; its root is what the log says that the shard must hold, and its turn is as in the log."""
        key = root_key(self.counts[replica], shard, self.log.shard(replica, shard).layout)
        current = self.log.replica(replica).round
        demand = PlanRequest(
            model=MODEL,
            version=1,
            replica=replica,
            shard=shard,
            agent=f"{replica}-{shard}",
            root=self.log.catalog.models[MODEL].versions[1].roots.get(key),
            at_seq=0,
            turn=None if current is None else ReadPriority(current.decided, current.number),
        )
        answering = DemandPlanner("job", self.known, LoadLedger(PlanLimits()), PlanLimits())
        return at_once(answering.answer(msgspec.structs.replace(demand, **more)))

    def plan(self, replica: str = "engine", shard: int = 0, **more: Any) -> Plan:
        answer = self.ask(replica, shard, **more)
        assert isinstance(answer, Plan), answer
        return answer

    def refusal(self) -> Refusal:
        answer = self.ask()
        assert isinstance(answer, Refusal), answer
        return answer

    @property
    def unregistered(self) -> list[tuple[str, int]]:
        """Return what each shard of the engine is told of it."""
        plans = [self.plan(shard=shard) for shard in range(self.counts["engine"])]
        return [("".join(plan.unregistered), plan.unregistered_count) for plan in plans]


def half(first: int, rows: int) -> list[Layout]:
    return [layout_of([TensorEntry("w", "uint8", 1, (rows, 2), (4, 2), (first, 0))])]


def test_a_reader_may_name_its_own_program_and_no_one_else_s() -> None:
    """By another one's program its memory would be filled with what belongs elsewhere; what is mapped names none."""
    planner = Planner(half(0, 4), upper=half(0, 2), lower=half(2, 2))
    upper, lower = (planner.plan(name).program for name in ("upper", "lower"))
    assert planner.plan("upper", program=upper, pieces=((0, 1),)).program == upper
    with pytest.raises(BadCommand, match="fills another layout than the reader's"):
        planner.ask("upper", program=lower, pieces=((0, 1),))
    with pytest.raises(BadCommand, match="names no program"):
        planner.ask("upper", program=upper, mapped=True)


def test_a_reader_turns_to_a_program_when_no_holder_of_its_own_layout_is_left() -> None:
    """None stands any more, or the one that there is has failed; a mapping can't go by a program."""
    planner = Planner(half(0, 2) + half(2, 2), twin=half(0, 4), engine=half(0, 4))
    planner.log.fetch("twin")
    own = planner.plan()
    assert (own.program, [share.source.replica for share in own.shares]) == (None, ["twin"])
    failed = (own.shares[0].source,)
    assert isinstance(planner.ask(avoid=failed, mapped=True), Refusal)
    others = [planner.plan(avoid=failed)]
    planner.log.empty("twin")
    others.append(planner.plan())
    assert [[share.source.replica for share in plan.shares] for plan in others] == [["trainer", "trainer"]] * 2


def crosses(planner: Planner, replica: str) -> bool:
    """Tell whether a reader gets anything from another site, by itself or from those who bring it over."""
    return any(share.far or share.crosses for share in planner.plan(replica, promises=True).shares)


def test_of_replicas_of_several_layouts_that_of_the_first_turn_crosses() -> None:
    """The others read from it."""
    planner = Planner(half(0, 2) + half(2, 2), far=True, a=half(0, 4), b=half(0, 4), c=half(0, 3), d=half(0, 3))
    assert [crosses(planner, replica) for replica in "abcd"] == [True, True, False, False]


def stages(*engine: str, published: tuple[str, ...] = ("abcd",)) -> Planner:
    """A trainer has published these tensors, by default in one shard; the shards of an engine have these of them."""

    def of(names: str) -> Layout:
        return layout_of([TensorEntry(name, "uint8", 1, (4, 2), (4, 2), (0, 0)) for name in names])

    return Planner([of(names) for names in published], engine=[of(names) for names in engine])


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (["abc"], ("d", 1)),
        (["abd", "abd"], ("c", 1)),
        (["a", "a"], ("bcd", 3)),
        (["a", "bcd"], ("", 0)),
        (["ab", "cd"], ("", 0)),
        (["ab", "bc", "c"], ("d", 1)),
        (["a", "abcd"], ("", 0)),
        (["abcd", "a"], ("", 0)),
    ],
)
def test_the_first_shard_is_told_what_no_shard_of_its_replica_has(engine: list[str], told: tuple[str, int]) -> None:
    """A stage leaves out what others have; what all of them leave out was forgotten."""
    assert stages(*engine).unregistered == [told, *[("", 0)] * (len(engine) - 1)]


def test_who_else_is_told_what_is_missing_and_when() -> None:
    """Where the first one is cut as the publisher's, the next; with the plan that names the program, if all are here.

    The last stage alone may have forgotten something, as an engine with tied weights does.
    """
    assert stages("ab", "c", published=("ab", "cd")).unregistered == [("", 0), ("d", 1)]
    assert stages("ab", "cd", published=("ab", "cd")).unregistered == [("", 0), ("", 0)]
    planner = stages("a", "b")
    first = planner.plan()
    assert first.unregistered == ("c", "d")
    assert planner.plan(program=first.program, pieces=((0, 1),)).unregistered == ()
    planner.log.release("engine", 1)
    assert planner.plan().unregistered == ()


def test_a_version_that_no_shard_has_is_refused_with_those_that_could_have_it() -> None:
    planner = stages("ab")
    planner.log.expire("trainer-0")
    refusal = planner.refusal()
    assert refusal.error == "VersionUnavailable"
    assert refusal.reason.startswith(f"no source is left for version 1 of '{MODEL}' (trainer/0 on trainer-0 is lost)")


@pytest.mark.parametrize(("lost", "error"), [(False, "LayoutMismatch"), (True, "VersionUnavailable")])
def test_what_cannot_be_filled_is_refused_for_now_or_for_ever(*, lost: bool, error: str) -> None:
    """For now, where shards that are registered and lost would fill it."""
    planner = stages("abe", published=("abcd", "e") if lost else ("abcd",))
    if lost:
        planner.log.expire("trainer-1")
    refusal = planner.refusal()
    assert refusal.error == error
    assert "can't fill shard 0 of 'engine'" in refusal.reason
    assert ("just now" in refusal.reason) is lost
    assert ("Register it with tensors of the same names" in refusal.reason) is not lost


def test_another_reader_that_lacks_the_same_tensor_is_not_waited_for() -> None:
    wanted = layout_of([TensorEntry(name, "uint8", 1, (4, 2), (4, 2), (0, 0)) for name in "abe"])
    planner = Planner([layout_of(wanted.tensors[:2])], engine=[wanted], other=[wanted])
    refusal = planner.refusal()
    assert refusal.error == "LayoutMismatch"
    assert "no holder has" in refusal.reason or "nothing of that name" in refusal.reason


# --------------------------------------------------------------------------------------------------------- fp8 blocks


def pieces_of(plan: Plan) -> tuple[Range, ...]:
    return merge_ranges(run for share in plan.shares for run in share.pieces)


def parts(program: NumberedProgram) -> list[tuple[Range, ...]]:
    """Return the numbers of partials, scales and values."""
    edges = (0, program.partials, program.scales, program.values)
    return [((a, b - a),) for a, b in pairwise(edges)]


@pytest.fixture
def blocks() -> Planner:
    """A trainer's shards end within blocks."""
    return Planner(list(sources(70, 200, 300, 390).values()), first=[reader("first")], second=[reader("second")])


def test_the_first_reader_asks_for_partials_and_what_a_replica_has_quantised_is_read_from_it(blocks: Planner) -> None:
    """It computes the scales of cut blocks itself, of one partial from each shard that has a part of the block.

    What is quantised is read also by a read that avoids another holder. One that avoids it goes by partials again.
    """
    plan = blocks.plan("second")
    assert plan.program is not None
    partials, scales, values = parts(asyncio.run(blocks.known.program(plan.program)).execution)
    assert partials
    assert pieces_of(plan) == merge_ranges([*partials, *values])
    blocks.log.fetch("first")
    plan = blocks.plan("second")
    assert pieces_of(plan) == merge_ranges([*scales, *values])
    avoid = (SourceId("first-0", 1, "first", 0),)
    rest = blocks.plan("second", program=plan.program, pieces=((0, 1), *values), avoid=avoid)
    assert pieces_of(rest) == merge_ranges([(0, 1), *values])
    assert all(share.source != avoid[0] for share in rest.shares)
    assert pieces_of(blocks.plan("second", program=plan.program, pieces=values)) == values, "it needs no partial"


def test_a_half_filled_replica_gives_scales_that_no_ready_shard_has(blocks: Planner) -> None:
    """They follow from partials that ready shards have."""
    for replica in ("first", "second"):
        blocks.log.want_all(replica)
    program = blocks.plan("second").program
    assert program is not None
    partials, scales, _ = parts(asyncio.run(blocks.known.program(program)).execution)
    rest = blocks.plan("second", program=program, pieces=(*partials, *scales))
    assert [share.pieces for share in rest.shares if share.source.replica == "first"] == [scales]


def test_what_is_computed_is_brought_over_by_each_reader_for_itself() -> None:
    """Amax values are in no shard's memory, so nobody can give them to the others."""
    planner = Planner(list(sources(70, 200, 300, 390).values()), far=True, first=[reader()], second=[reader()])
    assert not any(share.crosses for share in planner.plan("first", promises=True).shares)


def test_a_plan_that_lacks_a_partial_or_a_scale_is_an_error(blocks: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the choice: the proof raises before a reader acts on it."""

    def lacking(*given: Any) -> Any:
        plan = make_plan(*given)
        assert isinstance(plan, Plan)
        left = [subtract_ranges(share.pieces, ((0, 1),)) for share in plan.shares]
        shares = map(lambda share, pieces: msgspec.structs.replace(share, pieces=pieces), plan.shares, left)
        return msgspec.structs.replace(plan, shares=tuple(shares))

    assert intersect_ranges(pieces_of(blocks.plan("second")), ((0, 1),))
    monkeypatch.setattr("tensorhub_planner.planning.decision.make_plan", lacking)
    with pytest.raises(PlanError):
        blocks.plan("second")
