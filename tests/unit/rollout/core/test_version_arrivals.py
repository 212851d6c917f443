"""When the newest version will be in an instance's memory."""

import pytest

from tensorhub_rollout.core.version_arrivals import LEAST_S, VersionArrivals


def after_two_versions() -> VersionArrivals:
    """Return arrivals after version 1, which `a` had after 4 s, and version 2, published at 100 s."""
    arrivals = VersionArrivals()
    arrivals.heard("a", None, 0, None, 5.0)
    arrivals.published(1, 10.0, is_new=True)
    arrivals.heard("a", 0, 1, None, 14.0)
    arrivals.published(2, 100.0, is_new=True)
    return arrivals


def test_an_instance_is_expected_to_take_as_long_as_before() -> None:
    arrivals = after_two_versions()
    assert arrivals.arrives_in_s("a", 1, 101.0) == pytest.approx(3.0)
    assert arrivals.arrives_in_s("a", 2, 101.0) is None


def test_one_of_which_nothing_is_known_takes_as_long_as_the_others() -> None:
    arrivals = after_two_versions()
    assert arrivals.arrives_in_s("b", 1, 101.0) == pytest.approx(3.0)
    # One without any version has not even begun.
    assert arrivals.arrives_in_s("b", None, 101.0) is None
    assert VersionArrivals().arrives_in_s("b", 1, 0.0) is None


def test_one_that_begins_to_run_long_after_a_version_was_published_tells_nothing_of_the_next_one() -> None:
    arrivals = after_two_versions()
    arrivals.heard("b", None, 2, None, 700.0)
    arrivals.published(3, 800.0, is_new=True)
    assert arrivals.arrives_in_s("b", 2, 800.0) == pytest.approx(4.0)
    # An engine has no version while it changes over.
    arrivals.heard("b", 2, None, None, 807.0)
    arrivals.heard("b", None, 3, None, 809.0)
    arrivals.published(4, 900.0, is_new=True)
    assert arrivals.arrives_in_s("b", 3, 900.0) == pytest.approx(9.0)


def test_what_a_runner_tells_counts_more_and_grows_old() -> None:
    arrivals = after_two_versions()
    arrivals.heard("a", 1, 1, 9.0, 101.0)
    arrivals.heard("b", None, None, 2.0, 101.0)
    assert arrivals.arrives_in_s("a", 1, 104.0) == pytest.approx(6.0)
    assert arrivals.arrives_in_s("b", None, 102.0) == pytest.approx(1.0)
    arrivals.heard("a", 1, 1, None, 105.0)
    assert arrivals.arrives_in_s("a", 1, 105.0) == LEAST_S


def test_one_that_kept_an_older_version_takes_as_long_as_from_when_it_is_to_go_on() -> None:
    arrivals = after_two_versions()
    arrivals.wanted("a", 1, 100.5)
    assert arrivals.arrives_in_s("a", 1, 101.0) is None, "it does not come while another one is to be kept"
    arrivals.wanted("a", None, 160.0)
    assert arrivals.arrives_in_s("a", 1, 161.0) == pytest.approx(3.0)
    arrivals.heard("a", 1, 2, None, 165.0)
    arrivals.published(3, 200.0, is_new=True)
    assert arrivals.arrives_in_s("a", 2, 200.0) == pytest.approx(5.0)


def test_one_that_is_to_have_the_newest_version_alone_has_it_as_soon_as_one_that_follows() -> None:
    arrivals = after_two_versions()
    arrivals.wanted("a", 2, 101.0)
    assert arrivals.arrives_in_s("a", 1, 101.0) == pytest.approx(3.0)
    arrivals.wanted("a", None, 102.0)
    assert arrivals.arrives_in_s("a", 1, 102.0) == pytest.approx(2.0)
    # A newer one is published before it has that.
    arrivals.wanted("a", 2, 103.0)
    arrivals.published(3, 104.0, is_new=True)
    assert arrivals.arrives_in_s("a", 1, 104.0) is None
    arrivals.wanted("a", 1, 105.0)
    arrivals.lost("a")
    assert arrivals.arrives_in_s("a", 1, 105.0) == pytest.approx(3.0)


def test_what_is_overdue_is_not_expected() -> None:
    arrivals = after_two_versions()
    assert arrivals.arrives_in_s("a", 1, 104.5) == LEAST_S
    assert arrivals.arrives_in_s("a", 1, 109.5) is None


def test_a_version_that_was_there_before_this_leader_has_no_beginning() -> None:
    arrivals = VersionArrivals()
    arrivals.published(5, 10.0, is_new=False)
    arrivals.heard("a", 4, 5, None, 11.0)
    arrivals.published(6, 20.0, is_new=True)
    assert arrivals.arrives_in_s("a", 5, 20.0) is None


def test_a_lost_runner_is_forgotten() -> None:
    arrivals = after_two_versions()
    arrivals.heard("a", 1, 1, 50.0, 101.0)
    arrivals.lost("a")
    assert arrivals.arrives_in_s("a", 1, 101.0) == pytest.approx(3.0)
