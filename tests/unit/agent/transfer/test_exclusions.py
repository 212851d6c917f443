"""Which sources a read leaves out, and which of them it takes back."""

from tensorhub_agent.transfer.exclusions import FORGIVEN_MAX, Exclusions
from tensorhub_common.protocol.plans import SourceId

SUSPECT, FAILED = (SourceId(name, 1, "trainer", 0) for name in "ab")


def test_a_suspect_is_readmitted_a_bounded_number_of_times_and_a_failed_source_never() -> None:
    exclusions = Exclusions()
    exclusions.fail(FAILED)
    for _ in range(FORGIVEN_MAX):
        exclusions.exclude_for_now(SUSPECT)
        assert exclusions.left_out() == (FAILED, SUSPECT)
        assert exclusions.readmit_suspects()
        assert exclusions.has_forgiven(SUSPECT)
    assert exclusions.left_out() == (FAILED,)
    exclusions.exclude_for_now(SUSPECT)
    assert exclusions.has_failed(SUSPECT)
    assert not exclusions.readmit_suspects()


def test_a_source_that_failed_is_no_suspect_any_more() -> None:
    exclusions = Exclusions()
    exclusions.exclude_for_now(SUSPECT)
    exclusions.fail(SUSPECT)
    exclusions.exclude_for_now(SUSPECT)
    assert exclusions.left_out() == (SUSPECT,)
    assert not exclusions.readmit_suspects()
