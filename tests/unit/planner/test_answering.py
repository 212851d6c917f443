"""Demands that contradict themselves or the log get an error that says so, and no plan."""

import msgspec
import pytest
from tests.unit.common.catalog_world import MODEL, World

from tensorhub_common.errors import BadCommand
from tensorhub_common.layout import Layout, TensorEntry, layout_of
from tensorhub_common.wire.transfer import Demand, Plan
from tensorhub_planner.answering import Answering
from tensorhub_planner.fold import Fold
from tensorhub_planner.limits import Limits
from tensorhub_planner.load import Ledger
from tensorhub_simulator.planner import Known, at_once
from tensorhub_simulator.tensors import Layouts


def half(first: int, rows: int) -> Layout:
    return layout_of([TensorEntry("w", "uint8", 1, (rows, 2), (4, 2), (first, 0))])


class Planner:
    """A trainer has published, and two engines that are cut otherwise want to read."""

    def __init__(self) -> None:
        log, layouts = World(), Layouts()
        for name, layout in {"trainer": half(0, 4), "upper": half(0, 2), "lower": half(2, 2)}.items():
            log.join(name)
            log.register(name, name, layout=layouts.add(layout))
        log.ready("trainer", 1)
        known = Known(layouts, lambda: Fold(log.catalog, log.catalog.seq), lambda: 0.0)
        self.answering = Answering("job", known, Ledger(Limits()), Limits())

    def asked(self, replica: str, **more: object) -> str:
        """Return the program of a plan."""
        demand = Demand(model=MODEL, version=1, replica=replica, shard=0, agent=replica, root=None, at_seq=0)
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
