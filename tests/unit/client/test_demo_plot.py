"""When the demo does what: the blow, the return, the late one, the end."""

from tensorhub.demo.happenings import Ended, Killed, Missed, Wreck
from tensorhub.demo.messages import (
    TRAINER,
    Begin,
    Held,
    Leave,
    Prove,
    Proved,
    Published,
    Rest,
    Rested,
    Sealed,
    Standby,
    Unpublished,
)
from tensorhub.demo.plot import (
    BLOWS_MAX,
    FOLLOWERS,
    LATECOMER,
    ROLLOUTS,
    VICTIM,
    Act,
    Arm,
    Blow,
    Plot,
    Script,
    Start,
    Tell,
)

ALL = (TRAINER, *ROLLOUTS)


class Played:
    """A plot, and the trainer and rollouts around it, as they answer."""

    def __init__(self, script: Script | None = None) -> None:
        self.plot = Plot(script or Script(versions=5))
        self.version = 0
        self.now_s = 0.0

    def turn(self, *followers: str) -> list[Act]:
        """Publish the next version; these followers fetch it, and then the trainer goes on."""
        self.version += 1
        acts = self.plot.take(TRAINER, Sealed(version=self.version, nbytes=1, digests={}), self.now_s)
        acts += self.plot.take(TRAINER, Published(version=self.version, at=0.0, loss=1.0), self.now_s)
        for replica in followers:
            acts += self.held(replica)
        return acts

    def held(self, replica: str) -> list[Act]:
        held = Held(version=self.version, began=0, ended=1, nbytes=1, wire_s=1.0, sources=(), digests={})
        return self.plot.take(replica, held, self.now_s)

    def unpublish(self) -> list[Act]:
        return self.plot.take(TRAINER, Unpublished(version=self.version), self.now_s)

    def strike(self, *, written: int = 5, filled: int = 0) -> list[Act]:
        acts = self.plot.take(VICTIM, Killed(version=self.version, pid=1, agent_pid=2, after_s=0.01), self.now_s)
        wreck = Wreck(version=self.version, written_bytes=written, nbytes=10, filled=filled)
        return acts + self.plot.take(VICTIM, wreck, self.now_s)

    def until_late_is_here(self) -> None:
        """Go through the blow, the return and the late one's coming."""
        self.turn(*FOLLOWERS)
        self.turn(*FOLLOWERS)
        assert Arm(VICTIM) in self.turn(*FOLLOWERS)
        self.turn("rollout-1", "rollout-3")
        assert self.strike() == [Start(VICTIM)]
        assert self.held(VICTIM) == [Start(LATECOMER)]
        assert self.plot.take(LATECOMER, Standby(), self.now_s) == []
        assert self.unpublish() == [Tell(LATECOMER, Begin(version=self.version))]
        assert self.held(LATECOMER) == []


def test_all_but_the_late_one_are_started_first() -> None:
    assert Plot(Script()).opening() == [Start(TRAINER), *(Start(replica) for replica in FOLLOWERS)]


def test_the_whole_of_it() -> None:
    played = Played()
    played.until_late_is_here()
    assert played.turn(*ROLLOUTS) == [Tell(TRAINER, Rest())]
    assert played.plot.take(TRAINER, Rested(version=played.version), 9.0) == [Tell(each, Prove()) for each in ALL]
    proved = Proved(version=played.version, nbytes=1, digests={})
    for replica in ROLLOUTS:
        assert played.plot.take(replica, proved, 9.0) == []
    assert played.plot.take(TRAINER, proved, 9.0) == [Tell(each, Leave()) for each in ALL]
    for replica in ALL:
        assert not played.plot.is_over
        played.plot.take(replica, Ended(code=0, tail=""), 9.0)
    assert played.plot.is_over
    assert played.plot.died is None


def test_proof_waits_for_all_to_hold_the_last_version() -> None:
    played = Played()
    played.until_late_is_here()
    played.turn("rollout-1")
    assert played.plot.take(TRAINER, Rested(version=played.version), 9.0) == []
    assert played.held("rollout-3") + played.held(VICTIM) == []
    assert Tell(TRAINER, Prove()) in played.held(LATECOMER)


def test_the_late_one_begins_only_while_no_version_is_the_trainers() -> None:
    """Its source could be the trainer otherwise."""
    played = Played()
    for _ in range(3):
        played.turn(*FOLLOWERS)
    played.strike()
    played.turn("rollout-1", "rollout-3")
    assert played.held(VICTIM) == [Start(LATECOMER)]
    assert played.plot.take(LATECOMER, Standby(), 0.0) == []
    assert played.turn() == []
    assert played.unpublish() == [], "nobody holds that version yet"
    assert played.held("rollout-1") == [Tell(LATECOMER, Begin(version=played.version))]
    assert played.held("rollout-3") == [], "told once"
    assert played.plot.take(LATECOMER, Standby(), 0.0) == [Tell(LATECOMER, Begin(version=played.version))], "asked anew"


def test_a_blow_that_missed_or_hit_too_late_is_tried_again_and_given_up_at_last() -> None:
    played = Played()
    for _ in range(2):
        played.turn(*FOLLOWERS)
    for number in range(BLOWS_MAX):
        assert Arm(VICTIM) in played.turn(*FOLLOWERS)
        if number % 2:
            played.plot.take(VICTIM, Missed(version=played.version), 0.0)
        else:
            assert played.strike(written=10) == [Start(VICTIM)]
    assert played.turn(*FOLLOWERS) == [Start(LATECOMER)]
    assert played.plot.blow is Blow.MISSED


def test_what_is_in_the_middle() -> None:
    def wreck(written: int, filled: int) -> bool:
        return Wreck(version=1, written_bytes=written, nbytes=10, filled=filled).is_mid_transfer

    assert wreck(5, 0)
    assert wreck(5, 1)
    assert not wreck(0, 0)
    assert not wreck(10, 0)
    assert not wreck(5, 2)


def test_a_process_that_ends_by_itself_ends_the_demo() -> None:
    for code in (0, 1):
        played = Played()
        played.turn(*FOLLOWERS)
        played.plot.take("rollout-3", Ended(code=code, tail=""), 0.0)
        assert played.plot.is_over
        assert played.plot.died == "rollout-3"


def test_how_long_it_goes_on() -> None:
    script = Script(versions=10, versions_min=4, patience_s=30)
    assert script.is_enough(10, 1)
    assert not script.is_enough(9, 29)
    assert not script.is_enough(3, 1000)
    assert script.is_enough(4, 30)
    assert Script(seconds=20).is_enough(1, 20)
    assert not Script(seconds=20).is_enough(1000, 19)


def test_in_peace_nobody_is_killed_and_the_late_one_starts_with_the_first_read() -> None:
    played = Played(Script(versions=1, is_peaceful=True))
    assert played.turn(*FOLLOWERS) == [Start(LATECOMER)]
    for _ in range(2 * played.plot.script.blow_after):
        assert not any(isinstance(act, Arm) for act in played.turn(*FOLLOWERS))
