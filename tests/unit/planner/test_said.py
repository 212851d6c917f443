"""What agents say of their readers, and how long it counts."""

from tests.unit.planner.given import holder, planned

from tensorhub_common.protocol.heartbeat import SERVED_MAX, Heartbeat, ReaderLoad, ServingLoad
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import AgentTransport, Load, ReaderId
from tensorhub_planner.load.reports import NBYTES_MAX, LoadReport, LoadReports, ReportedReader
from tensorhub_planner.primitives.limits import PlanLimits

KEPT_S = 3.0
A: AgentTransport = ("a", "ucxx")
B: AgentTransport = ("b", "ucxx")
READING = ReaderLoad("run-7", "policy", "rollout", 0, 4711, 3)


def beat(
    agent: str = "a", readers: int = 2, nbytes: int = 5, incarnation: int = 1, served: tuple[ReaderLoad, ...] = ()
) -> Heartbeat:
    serving = (ServingLoad("ucxx", readers, nbytes, served),) if readers else ()
    return Heartbeat(agent=agent, incarnation=incarnation, serving=serving)


def word(readers: int, nbytes: int, *named: ReportedReader, at: float = 0.0) -> LoadReport:
    return LoadReport(at, Load(readers, nbytes), named)


def said(*beats: Heartbeat) -> LoadReports:
    made = LoadReports(PlanLimits(said_s_max=KEPT_S))
    for each in beats:
        made.hear(each, 0.0)
        made.check()
    return made


def test_the_last_word_counts_for_a_while() -> None:
    known = said(beat(), beat(readers=1, nbytes=3))
    assert known.at(A, KEPT_S - 0.1) == word(1, 3)
    assert known.at(("a", "local"), 0.0) is None, "what it does not name it does not serve"
    assert known.at(A, KEPT_S) is None
    assert known.at(B, 0.0) is None


def test_who_reads_is_named() -> None:
    reading = ReportedReader(ReaderId("run-7", "policy", "rollout", 0), 4711, 3)
    assert said(beat(served=(READING,))).at(A, 0.0) == word(2, 5, reading)


def test_what_an_older_incarnation_still_says_does_not_count() -> None:
    known = said(beat(incarnation=2))
    known.hear(beat(readers=9, incarnation=1), 1.0)
    assert known.at(A, 1.0) == word(2, 5)
    known.hear(beat(readers=0, incarnation=3), 1.0)
    assert known.at(A, 1.0) is None


def test_a_lost_agent_serves_nobody() -> None:
    """Unless it came back meanwhile: the log may be read late."""
    known = said(beat("a", incarnation=1), beat("b", incarnation=2))
    for agent in ("a", "b", "unheard-of"):
        known.forget(agent, 1)
    assert known.at(A, 0.0) is None
    assert known.at(B, 0.0) == word(2, 5)


def test_who_has_not_spoken_is_named() -> None:
    known = said(beat("a"), beat("idle", readers=0))
    assert known.unheard(("a", "idle", "silent"), 0.0) == ["silent"]
    assert known.unheard(("a",), KEPT_S) == ["a"]


def test_nonsense_is_no_load() -> None:
    assert said(beat(readers=-3, nbytes=-1)).at(A, 0.0) is None
    endless = said(beat(readers=1, nbytes=1, served=(READING,) * 1000)).at(A, 0.0)
    assert endless is not None
    assert len(endless.named) == SERVED_MAX


def test_a_host_that_says_what_cant_be_is_busy_and_breaks_no_plan() -> None:
    """Numbers on the wire have any length, and plans of all its readers are computed with them."""
    for readers, nbytes in ((10**400, 1), (1, 10**400), (1, NBYTES_MAX)):
        ledger = LoadLedger(PlanLimits())
        ledger.hear(beat("a", readers, nbytes, served=(ReaderLoad("j", "m", "r", 10**400, 10**400, nbytes),)), 0.0)
        ledger.check()
        found = planned(holder("a"), holder("b"), load=ledger.at(0.1))
        assert {share.source.agent for share in found.shares} == {"b"}
        alone = planned(holder("a"), load=ledger.at(0.1))
        assert {share.source.agent for share in alone.shares} == {"a"}
