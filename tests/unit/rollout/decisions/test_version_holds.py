"""What a leader says of the versions that the hub is to hold: at once, again while it does not stand, and renewed."""

import pytest

from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Attach,
    Cancel,
    GroupSubmitted,
    Lead,
    Payload,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import EntryFolded, HubHold, VersionsSeen
from tensorhub_rollout.decisions.version_holds import AGAIN_S, RENEWALS, HoldWord, VersionHolds
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.retention import RetentionLimits

MODEL = "policy"
LIMITS = RetentionLimits(versions_max=2, hold_s=60)
RENEW_S = LIMITS.hold_s / RENEWALS


class Job:
    """A leader without an instance, and what the hub has."""

    def __init__(self) -> None:
        self.state, self.seq, self.n = RolloutState("job"), 0, 0
        self.take(Lead(3, "m"), Attach("main", MODEL, 0, "n"))
        self.leader = Leader(self.state, "log", LeaderLimits(gather_s=0.0), 0.0)
        self.holds = VersionHolds(LIMITS)
        self.see()

    def take(self, *entries: AnyEntry) -> None:
        for entry in entries:
            self.seq += 1
            outcome = fold(self.state, self.seq, entry).outcome
            if hasattr(self, "leader"):
                self.leader.handle(EntryFolded(outcome), 0.0)

    def submit(self, name: str, version: int | None) -> None:
        group = GroupSubmitted(name, "a" * 64, 2, 1, 4, version=version)
        self.take(Submit(self.by(), (group,), Payload(f"{self.seq:064x}", 1)))

    def by(self) -> SdkSender:
        self.n += 1
        return SdkSender(2, self.n)

    def see(
        self, *held: int, term: int = 0, copied: tuple[int, ...] = (), retired: tuple[tuple[int, int], ...] = ()
    ) -> None:
        versions = PublishedVersions(1, (5, 6, 7), retired)
        hold = HubHold(term, 1, held, frozenset(copied))
        self.leader.handle(VersionsSeen(MODEL, versions, frozenset({5, 6, 7}), hold=hold), 0.0)

    def look(self, now: float) -> HoldWord | None:
        return self.holds.look(self.leader, MODEL, now)

    def said(self, now: float) -> tuple[int, tuple[int, ...]]:
        word = self.look(now)
        assert word is not None
        return word.n, word.versions


@pytest.fixture
def job() -> Job:
    return Job()


def test_nothing_is_said_where_nothing_is_for_one_version_alone(job: Job) -> None:
    job.submit("any", None)
    assert job.look(1.0) is None


def test_it_is_said_at_once_again_while_it_does_not_stand_and_renewed_where_it_does(job: Job) -> None:
    job.submit("p", 6)
    assert job.said(1.0) == (1, (6,))
    assert job.look(1.0 + AGAIN_S - 0.1) is None
    assert job.said(1.0 + AGAIN_S) == (2, (6,))
    job.see(6, term=3)
    assert job.look(1.0 + RENEW_S) is None
    assert job.said(1.0 + AGAIN_S + RENEW_S) == (3, (6,))


def test_a_further_version_is_said_at_once_and_the_end_is_too(job: Job) -> None:
    job.submit("p", 6)
    job.look(1.0)
    job.see(6, term=3)
    job.submit("q", 5)
    assert job.said(1.1) == (2, (5, 6))
    job.see(5, 6, term=3)
    job.take(Cancel(job.by(), ("p", "q")))
    assert job.said(1.2) == (3, ())
    job.see()
    assert job.look(99.0) is None


def test_a_new_leader_states_what_stands_already_so_that_no_word_of_the_one_before_counts(job: Job) -> None:
    job.submit("p", 6)
    job.see(6, term=2)
    assert job.said(1.0) == (1, (6,))


def test_a_new_leader_ends_what_the_one_before_held_for_what_has_ended(job: Job) -> None:
    job.see(5, term=2)
    assert job.said(1.0) == (1, ())


def test_a_leader_whose_term_is_over_says_nothing(job: Job) -> None:
    job.submit("p", 6)
    job.see(term=4)
    assert job.look(1.0) is None


def test_a_retired_version_is_not_held(job: Job) -> None:
    job.submit("p", 6)
    job.see(6, term=3, retired=((6, 7),))
    assert job.said(1.0) == (1, ())


def test_below_the_level_of_holds_nothing_is_said(job: Job) -> None:
    job.submit("p", 6)
    job.leader.handle(VersionsSeen(MODEL, PublishedVersions(2, (5, 6, 7)), frozenset({6})), 0.0)
    assert job.look(1.0) is None
    assert job.holds.story(job.leader, MODEL, 6) is None


def test_it_is_told_how_safe_a_version_is(job: Job) -> None:
    job.see(5, 6, term=3, copied=(5,))
    stories = [job.holds.story(job.leader, MODEL, version) for version in (5, 6, 7)]
    assert stories == [
        "version 5 is held until its last request ends, and the hub has a copy of it",
        "version 6 is held until its last request ends; the hub has no copy of it yet",
        "version 7 is not held: 2 others are, which is the limit, until the requests for one of them have ended",
    ]
