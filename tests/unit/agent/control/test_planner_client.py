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


class Bus:
    """Answers with one plan."""

    async def request(self, *_: object) -> bytes:
        return msgspec.json.encode(Plan(version=1, shares=(), why="", program="program"))


class Programs:
    """Has one program, which fills a layout from byte `to` on."""

    def __init__(self, fills: str = "mine", to: int = 0) -> None:
        cell = Cell(to, UnitSplit((4,), (1,), 1, 0, 4, 1), (SourceBox(0, 0, (1,), 1, ""),))
        program = TransferProgram(fills, ("theirs",), ((cell,),), (TensorGroup(0, (0,), (0,), ((0,),)),))
        self.execution = NumberedProgram(program, "program")

    async def get(self, digest: str) -> NumberedProgram:
        if digest != "program":
            raise LayoutMismatch("is none")
        return self.execution


def questions(programs: Programs, planner: PeerStatus | None = None) -> PlannerClient:
    bus: Any = Bus()
    known: Any = programs
    return PlannerClient("job", bus, bus, known, planner or PeerStatus("the planner"))


async def test_a_read_that_turns_to_a_program_gets_what_its_units_complete() -> None:
    found = await questions(Programs()).plan(DEMAND, {}, MINE)
    assert found.program is not None
    assert found.completion is not None
    assert found.completion.units_arrived([(0, 1)]) == [(0, 1)]


@pytest.mark.parametrize("body", [b"{", b'{"type":"plan","version":1,"shares":[],"why":"\xff"}', b"[" * 100_000])
async def test_what_is_no_answer_is_told_as_none(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(*_: object) -> bytes:
        return body

    monkeypatch.setattr(Bus, "request", request)
    found = await questions(Programs()).plan(DEMAND, {}, MINE)
    assert isinstance(found.answer, Refusal)
    assert found.answer.error == NO_ANSWER


async def test_who_reads_by_the_program_already_gets_no_other_completion() -> None:
    found = await questions(Programs()).plan(msgspec.structs.replace(DEMAND, program="program"), {}, MINE)
    assert found.program is not None
    assert found.completion is None


@pytest.mark.parametrize("target", [None, FillTarget("another", MINE.table)])
async def test_of_a_shard_that_it_does_not_fill_nothing_is_worked_out(target: FillTarget | None) -> None:
    found = await questions(Programs(to=10**9)).plan(DEMAND, {}, target)
    assert (found.program is not None, found.completion) == (True, None)


async def test_a_program_that_can_not_be_carried_out_is_as_good_as_no_answer() -> None:
    """The agent goes on, and asks again."""
    found = await questions(Programs(to=10**9)).plan(DEMAND, {}, MINE)
    assert isinstance(found.answer, Refusal)
    assert found.answer.error == NO_ANSWER
    assert "lies in no tensor" in found.answer.reason
    assert found.program is None


async def test_a_planner_that_does_not_answer_is_told_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many reads ask it. That NATS is away says nothing of the planner, and is the bus's to tell."""
    planner = PeerStatus("the planner")
    asking = questions(Programs(), planner)
    answered = Bus.request

    async def fails(why: Exception) -> None:
        async def request(*_: object) -> bytes:
            raise why

        monkeypatch.setattr(Bus, "request", request)
        for _ in range(2):
            refusal = (await asking.plan(DEMAND, {}, MINE)).answer
            assert isinstance(refusal, Refusal)
            assert refusal.error == NO_ANSWER

    await fails(NoBus("there is no connection to NATS"))
    assert caplog.records == []
    await fails(NoAnswer("no answer on plan within 1 s"))
    monkeypatch.setattr(Bus, "request", answered)
    await asking.plan(DEMAND, {}, MINE)
    assert planner.silent_s is None
    assert [record.getMessage().partition(":")[0][:26] for record in caplog.records] == [
        "the planner does not answe",
        "the planner answers again ",
    ]
