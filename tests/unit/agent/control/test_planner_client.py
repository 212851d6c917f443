"""What an agent makes of a planner's answer: the program that it names comes with it, or it stands for no answer."""

from typing import Any

import msgspec
import pytest

from tensorhub_agent.control.planner_client import FillTarget, PlannerClient
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.bus.errors import NoAnswer, NoBus
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit
from tensorhub_common.protocol.plans import Plan, PlanRequest, Refusal
from tensorhub_common.runtime.peer_status import PeerStatus

DEMAND = PlanRequest(model="m", version=1, replica="engine", shard=0, agent="a", root=None, at_seq=0)
LAYOUT = layout_of([TensorEntry("w", "int8", 1, (4,), (4,), (0,))])
MINE = FillTarget("mine", pieces(LAYOUT))
PLAN = msgspec.json.encode(Plan(version=1, shares=(), why="", program="program"))
BROKEN = 10**9
"""A place in no tensor."""


class Planner:
    """Answers with one plan, and has one program, which fills a layout from byte `to` on."""

    def __init__(self, answer: bytes | Exception = PLAN, to: int = 0) -> None:
        self.answer = answer
        cell = Cell(to, UnitSplit((4,), (1,), 1, 0, 4, 1), (SourceBox(0, 0, (1,), 1, ""),))
        program = TransferProgram("mine", ("theirs",), ((cell,),), (TensorGroup(0, (0,), (0,), ((0,),)),))
        self.execution = NumberedProgram(program, "program")
        self.status = PeerStatus("the planner")

    async def request(self, *_: object) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def get(self, digest: str) -> NumberedProgram:
        if digest != "program":
            raise LayoutMismatch("is none")
        return self.execution

    async def plans(self, demand: PlanRequest = DEMAND, target: FillTarget | None = MINE) -> Any:
        it: Any = self
        return await PlannerClient("job", it, it, it, self.status).plan(demand, {}, target)


def is_none(found: Any) -> bool:
    """Tell whether this stands for no answer."""
    return isinstance(found.answer, Refusal) and found.answer.error == NO_ANSWER and found.program is None


async def test_a_read_that_turns_to_a_program_gets_what_its_units_complete() -> None:
    found = await Planner().plans()
    assert found.program is not None
    assert found.completion.units_arrived([(0, 1)]) == [(0, 1)]


@pytest.mark.parametrize(
    ("demand", "target", "to"),
    [
        pytest.param(msgspec.structs.replace(DEMAND, program="program"), MINE, 0, id="reads-by-it-already"),
        pytest.param(DEMAND, None, BROKEN, id="fills-nothing"),
        pytest.param(DEMAND, FillTarget("another", MINE.table), BROKEN, id="fills-another"),
    ],
)
async def test_of_a_shard_that_it_does_not_fill_nothing_is_worked_out(
    demand: PlanRequest, target: FillTarget | None, to: int
) -> None:
    found = await Planner(to=to).plans(demand, target)
    assert (found.program is not None, found.completion) == (True, None)


@pytest.mark.parametrize("body", [b"{", b'{"type":"plan","version":1,"shares":[],"why":"\xff"}', b"[" * 100_000, PLAN])
async def test_what_is_no_answer_is_told_as_none(body: bytes) -> None:
    """Nor is a program that can't be carried out: the agent goes on, and asks again."""
    found = await Planner(body, BROKEN).plans()
    assert is_none(found)
    assert body != PLAN or "lies in no tensor" in found.answer.reason


async def test_a_planner_that_does_not_answer_is_told_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many reads ask it. That NATS is away says nothing of the planner, and is the bus's to tell."""
    planner = Planner()
    for why in (NoBus("there is no connection to NATS"), NoAnswer("no answer on plan within 1 s")):
        assert caplog.records == []
        planner.answer = why
        for _ in range(2):
            assert is_none(await planner.plans())
    planner.answer = PLAN
    await planner.plans()
    assert planner.status.silent_s is None
    silent, back = (record.getMessage() for record in caplog.records)
    assert silent.startswith("the planner does not answer")
    assert back.startswith("the planner answers again ")
