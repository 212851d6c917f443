"""What is to be done when, so that the demo shows what it promises. Pure: happenings in, acts out.

start all but the late one -> follow -> kill one in the middle of a read, start it again -> it is back -> start the late
one -> it joins from a peer -> enough versions -> rest -> all hold the last version -> prove -> leave.

Always true: the late one is told to begin only while the trainer holds no version, and some rollout does; a blow is
prepared only while its victim's memory is at rest, and at most `BLOWS_MAX` times; the trainer is told to
rest once, when all of that is done or can't be.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub.demo.happenings import AnyHappening, Ended, Killed, Missed, Wreck
from tensorhub.demo.messages import (
    TRAINER,
    AnyOrder,
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

FOLLOWERS: Final = ("rollout-1", "rollout-2", "rollout-3")
VICTIM: Final = "rollout-2"
LATECOMER: Final = "rollout-4"
ROLLOUTS: Final = (*FOLLOWERS, LATECOMER)
BLOWS_MAX: Final = 6


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """How much is played, besides what is promised."""

    seconds: float | None = None
    """Train for so long; None: until `versions` are published, or `patience_s` have passed and `versions_min` are."""
    versions: int = 14
    versions_min: int = 9
    patience_s: float = 40.0
    blow_after: int = 3
    """The victim has had so many versions before it is killed."""
    is_peaceful: bool = False
    """Nobody is killed."""

    def is_enough(self, versions: int, trained_s: float) -> bool:
        """Tell whether so many versions will do, so long after the first of them."""
        if self.seconds is not None:
            return trained_s >= self.seconds
        return versions >= self.versions or (versions >= self.versions_min and trained_s >= self.patience_s)


class Start(msgspec.Struct, frozen=True):
    """Start this replica's process."""

    replica: str


class Arm(msgspec.Struct, frozen=True):
    """Kill this replica's process and its agent as soon as its next read begins."""

    replica: str


class Tell(msgspec.Struct, frozen=True):
    """Send this replica's process an order."""

    replica: str
    order: AnyOrder


Act = Start | Arm | Tell


class Blow(StrEnum):
    """How far the killing is."""

    WAITING = "waiting"
    ARMED = "armed"
    AWAY = "away"
    DONE = "done"
    MISSED = "missed"


class Late(StrEnum):
    """How far the latecomer is."""

    UNBORN = "unborn"
    STARTED = "started"
    STANDING_BY = "standing by"
    JOINING = "joining"
    HERE = "here"


class Finale(StrEnum):
    """How far the end is."""

    AHEAD = "ahead"
    RESTING = "resting"
    PROVING = "proving"
    LEAVING = "leaving"
    OVER = "over"


class Plot:
    """Follows what happens and says what to do next."""

    def __init__(self, script: Script) -> None:
        """Begin; `opening` says what is to be done first."""
        self.script = script
        self.blow = Blow.MISSED if script.is_peaceful else Blow.WAITING
        self.late = Late.UNBORN
        self.finale = Finale.AHEAD
        self.final_version: int | None = None
        self.died: str | None = None
        """Whose process ended when it should not have."""
        self._blows = 0
        self._hit = False
        self._reads: dict[str, int] = {}
        self._holds: dict[str, int] = {}
        self._versions = 0
        self._first_at_s: float | None = None
        self._unsettled: set[str] = set()
        self._only_rollouts_hold: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.finale is Finale.OVER

    def opening(self) -> list[Act]:
        """Return what to do first."""
        return [Start(TRAINER), *(Start(replica) for replica in FOLLOWERS)]

    def take(self, replica: str, news: AnyHappening, now_s: float) -> list[Act]:
        """Take what happened, `now_s` seconds after the beginning, and return what to do."""
        return list(self._take(replica, news, now_s))

    def _take(self, replica: str, news: AnyHappening, now_s: float) -> Iterator[Act]:
        match news:
            case Unpublished():
                self._only_rollouts_hold = news.version
            case Sealed():
                self._only_rollouts_hold = None
            case Published():
                self._versions += 1
                self._first_at_s = now_s if self._first_at_s is None else self._first_at_s
                yield from self._on_published(now_s - self._first_at_s)
            case Held():
                yield from self._on_held(replica, news.version)
            case Standby():
                self.late = Late.STANDING_BY
            case Missed() | Killed() | Wreck():
                yield from self._on_blow(replica, news)
            case Rested() | Proved() | Ended():
                yield from self._on_end(replica, news)
        yield from self._when_peers_alone_hold()
        yield from self._when_all_hold()

    def _on_blow(self, replica: str, news: Missed | Killed | Wreck) -> Iterator[Act]:
        match news:
            case Missed():
                self._blows += 1
                self.blow = Blow.WAITING
            case Killed():
                self._blows += 1
                self._holds.pop(replica, None)
            case Wreck():
                self._hit = news.is_mid_transfer
                self.blow = Blow.AWAY
                yield Start(replica)

    def _when_peers_alone_hold(self) -> Iterator[Act]:
        """Let the late one begin when it can find its weights at peers only."""
        version = self._only_rollouts_hold
        if self.late is not Late.STANDING_BY or version is None:
            return
        if any(self._holds.get(each) == version for each in FOLLOWERS):
            self.late = Late.JOINING
            yield Tell(LATECOMER, Begin(version=version))

    def _on_held(self, replica: str, version: int) -> Iterator[Act]:
        self._holds[replica] = version
        self._reads[replica] = self._reads.get(replica, 0) + 1
        if replica == LATECOMER:
            self.late = Late.HERE
        elif replica == VICTIM:
            yield from self._on_victim_held()

    def _on_victim_held(self) -> Iterator[Act]:
        if self.blow is Blow.AWAY:
            self.blow = Blow.DONE if self._hit else Blow.WAITING
        if self.blow is Blow.WAITING and self._blows == BLOWS_MAX:
            self.blow = Blow.MISSED
        if self.blow is Blow.WAITING and self._reads[VICTIM] >= self.script.blow_after:
            self.blow = Blow.ARMED
            yield Arm(VICTIM)
        if self.blow in (Blow.DONE, Blow.MISSED) and self.late is Late.UNBORN:
            self.late = Late.STARTED
            yield Start(LATECOMER)

    def _on_published(self, trained_s: float) -> Iterator[Act]:
        done = self.blow in (Blow.DONE, Blow.MISSED) and self.late is Late.HERE
        if done and self.script.is_enough(self._versions, trained_s) and self.finale is Finale.AHEAD:
            self.finale = Finale.RESTING
            yield Tell(TRAINER, Rest())

    def _when_all_hold(self) -> Iterator[Act]:
        if self.finale is not Finale.RESTING or self.final_version is None:
            return
        if all(self._holds.get(each) == self.final_version for each in ROLLOUTS):
            yield from self._ask_all(Finale.PROVING, Prove())

    def _ask_all(self, finale: Finale, order: AnyOrder) -> Iterator[Act]:
        self.finale = finale
        self._unsettled = {TRAINER, *ROLLOUTS}
        for replica in (TRAINER, *ROLLOUTS):
            yield Tell(replica, order)

    def _on_end(self, replica: str, news: Rested | Proved | Ended) -> Iterator[Act]:
        self._unsettled.discard(replica)
        match news:
            case Rested():
                self.final_version = news.version
            case Proved() if self.finale is Finale.PROVING and not self._unsettled:
                yield from self._ask_all(Finale.LEAVING, Leave())
            case Ended() if self.finale is not Finale.LEAVING or news.code:
                self.died = replica
                self.finale = Finale.OVER
            case Ended() if not self._unsettled:
                self.finale = Finale.OVER
