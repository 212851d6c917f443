"""The planner's answer to a request, from a catalog and layouts alone."""

import msgspec
import pytest

from tensorhub_common.catalog.state import root_key
from tensorhub_common.errors import BadCommand
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver
from tensorhub_simulator.drivers.planner import Known, Layouts, at_once


def half(first: int, rows: int) -> Layout:
    return layout_of([TensorEntry("w", "uint8", 1, (rows, 2), (4, 2), (first, 0))])


class Planner:
    """A trainer has published, and two engines that are cut otherwise want to read."""

    def __init__(self) -> None:
        log, layouts = CatalogDriver(), Layouts()
        for name, layout in {"trainer": half(0, 4), "upper": half(0, 2), "lower": half(2, 2)}.items():
            log.join(name)
            log.register(name, name, layout=layouts.add(layout))
        log.ready("trainer", 1)
        known = Known(layouts, lambda: CatalogReplica(log.catalog, log.catalog.seq), lambda: 0.0)
        self.answering = DemandPlanner("job", known, LoadLedger(PlanLimits()), PlanLimits())

    def asked(self, replica: str, **more: object) -> str:
        """Return the program of a plan."""
        demand = PlanRequest(model=MODEL, version=1, replica=replica, shard=0, agent=replica, root=None, at_seq=0)
        answer = at_once(self.answering.answer(msgspec.structs.replace(demand, **more)))
        assert isinstance(answer, Plan), answer
        assert answer.program is not None
        return answer.program


def test_a_reader_may_name_its_own_program_and_no_one_else_s() -> None:
    """By another one's program its memory would be filled with what belongs elsewhere."""
    planner = Planner()
    upper, lower = planner.asked("upper"), planner.asked("lower")
    assert planner.asked("upper", program=upper, pieces=((0, 1),)) == upper
    with pytest.raises(BadCommand, match="fills another layout than the reader's"):
        planner.asked("upper", program=lower, pieces=((0, 1),))


def test_what_is_mapped_names_no_program() -> None:
    planner = Planner()
    with pytest.raises(BadCommand, match="names no program"):
        planner.asked("upper", program=planner.asked("upper"), mapped=True)


class Stages:
    """A trainer has published four tensors; a replica whose shards have these of them wants to read."""

    def __init__(self, *stages: str, published: tuple[str, ...] = ("abcd",)) -> None:
        log, layouts = CatalogDriver(), Layouts()
        for shard, names in enumerate(published):
            agent = f"trainer-{shard}"
            log.join(agent)
            log.register(agent, "trainer", shard, len(published), layout=layouts.add(of(names)))
        self.log, self.count = log, len(stages)
        for shard, names in enumerate(stages):
            log.join(f"engine-{shard}")
            layout = layouts.add(of(names))
            log.register(f"engine-{shard}", "engine", shard=shard, shards=self.count, layout=layout)
        for shard in range(len(published)):
            log.ready("trainer", 1, shard)
        known = Known(layouts, lambda: CatalogReplica(log.catalog, log.catalog.seq), lambda: 0.0)
        self.answering = DemandPlanner("job", known, LoadLedger(PlanLimits()), PlanLimits())

    def root(self, shard: int) -> str | None:
        """Return what the log says that a shard must hold."""
        key = root_key(self.count, shard, self.log.shard("engine", shard).layout)
        return self.log.catalog.models[MODEL].versions[1].roots.get(key)

    def refusal(self, shard: int) -> Refusal:
        answer = self.ask(shard, None)
        assert isinstance(answer, Refusal), answer
        return answer

    def plan(self, shard: int, program: str | None = None) -> Plan:
        answer = self.ask(shard, program)
        assert isinstance(answer, Plan), answer
        return answer

    def ask(self, shard: int, program: str | None) -> PlanAnswer:
        demand = PlanRequest(
            model=MODEL,
            version=1,
            replica="engine",
            shard=shard,
            agent=f"engine-{shard}",
            root=self.root(shard),
            at_seq=0,
            program=program,
            pieces=None if program is None else ((0, 1),),
        )
        return at_once(self.answering.answer(demand))

    @property
    def unregistered(self) -> list[tuple[str, int]]:
        """Return what each shard is told of it."""
        plans = [self.plan(shard) for shard in range(self.count)]
        return [("".join(plan.unregistered), plan.unregistered_count) for plan in plans]


def of(names: str) -> Layout:
    return layout_of([TensorEntry(name, "uint8", 1, (4, 2), (4, 2), (0, 0)) for name in names])


@pytest.mark.parametrize(
    ("stages", "told"),
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
def test_the_first_shard_is_told_what_no_shard_of_its_replica_has(stages: list[str], told: tuple[str, int]) -> None:
    """A stage leaves out what others have; what all of them leave out was forgotten."""
    assert Stages(*stages).unregistered == [told, *[("", 0)] * (len(stages) - 1)]


def test_a_shard_that_is_cut_as_the_publisher_s_reads_its_pieces_and_another_one_is_told() -> None:
    """The last stage alone has forgotten something, as an engine with tied weights may."""
    planner = Stages("ab", "c", published=("ab", "cd"))
    assert planner.unregistered == [("", 0), ("d", 1)]
    assert Stages("ab", "cd", published=("ab", "cd")).unregistered == [("", 0), ("", 0)]


def test_a_replica_that_is_not_whole_lacks_nothing() -> None:
    planner = Stages("a", "b")
    planner.log.release("engine", 1)
    assert planner.plan(0).unregistered == ()


def test_what_is_missing_is_told_with_the_plan_that_names_the_program() -> None:
    planner = Stages("a", "b")
    first = planner.plan(0)
    assert first.unregistered == ("c", "d")
    assert planner.plan(0, first.program).unregistered == ()


def test_a_version_that_no_shard_has_is_refused_with_those_that_could_have_it() -> None:
    planner = Stages("ab")
    planner.log.expire("trainer-0")
    refusal = planner.refusal(0)
    assert refusal.error == "VersionUnavailable"
    assert refusal.reason.startswith(f"no source is left for version 1 of '{MODEL}' (trainer/0 on trainer-0 is lost)")


@pytest.mark.parametrize(("lost", "error"), [(False, "LayoutMismatch"), (True, "VersionUnavailable")])
def test_what_cannot_be_filled_is_refused_for_now_or_for_ever(*, lost: bool, error: str) -> None:
    """For now, where shards that are registered and lost would fill it."""
    planner = Stages("abe", published=("abcd", "e") if lost else ("abcd",))
    if lost:
        planner.log.expire("trainer-1")
    refusal = planner.refusal(0)
    assert refusal.error == error
    assert "can't fill shard 0 of 'engine'" in refusal.reason
    assert ("just now" in refusal.reason) is lost
    assert ("Register it with tensors of the same names" in refusal.reason) is not lost
