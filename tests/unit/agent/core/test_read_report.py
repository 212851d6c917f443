"""The report of a finished read."""

from tensorhub_agent.core.operations.read_report import report_of, stages_of
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, Share, SourceId
from tensorhub_common.protocol.worker import ReadStages, SourceReport


def test_names_each_source_and_what_it_gave() -> None:
    transfer = Transfer(
        version=1,
        root=NO_ROOT,
        nbytes=[5, 7],
        verify=False,
        limits=DEFAULT_LIMITS,
        first_number=1,
        now=0.0,
    )
    transfer.tick(0.0)
    share = Share(source=SourceId("a", 1, "trainer", 0), transport="local", pieces=((0, 2),), nbytes=12, why="nearest")
    transfer.planned(Plan(version=1, shares=(share,), why=""), 0.25)
    transfer.opened(1, b"", 0.5)
    transfer.start(1.0)
    [(source, batch, _)] = transfer.take_actions().post
    transfer.batch_done(source, batch, b"", 2.0)
    transfer.confirmed(source, holds=True, now=3.0)
    report = report_of(transfer, [5, 7], total_s=4.0)
    assert (report.nbytes, report.pieces, report.kept, report.retried) == (12, 2, 0, 0)
    assert (report.wire_s, report.total_s) == (2.0, 4.0)
    assert (report.got_bytes, report.wasted_bytes, report.plans) == (12, 0, 1)
    assert report.sources == (
        SourceReport(agent="a", replica="trainer", transport="local", nbytes=12, pieces=2, why="nearest"),
    )
    assert stages_of(transfer, began=-1.0, waited_s=1.0, now=5.0) == ReadStages(
        round_s=1.0, plan_s=0.25, lease_s=0.25, start_s=0.5, first_s=1.0, wire_s=0.0, verify_s=1.0, ready_s=2.0
    )
