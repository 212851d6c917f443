"""What a leader measures of steps for seeding, and what it answers to a trainer that is about to seed."""

import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attach, Lead
from tensorhub_common.protocol.rollout.messages import Frame, PublishedVersions, Report, RunnerHeartbeat
from tensorhub_common.protocol.rollout.questions import SeedingAnswer, SeedingQuestion, SeedingState
from tensorhub_rollout.answers.sdk import answer_seeding
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    FrameCame,
    HeartbeatCame,
    InstanceLost,
    LeaderInput,
    ReportCame,
    VersionsSeen,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState

LOG = "log"


class Led:
    """A leader with remote instances, and the trainer's own; each beats in every tenth of a second."""

    def __init__(self, *runners: str) -> None:
        state = RolloutState("job")
        fold(state, 1, Lead(1, "m"))
        fold(state, 2, Attach("main", "policy", 0, "n"))
        self.leader, self.now, self.runners = Leader(state, LOG, LeaderLimits(gather_s=0.0), 0.0), 0.0, {*runners}
        self.leaving: set[str] = set()

    def until(self, now: float) -> list[InstanceLost]:
        lost: list[InstanceLost] = []

        def handle(event: LeaderInput) -> None:
            lost.extend(each for each in self.leader.handle(event, self.now) if isinstance(each, InstanceLost))

        while self.now < now - 1e-9:
            self.now += 0.1
            for runner in sorted(self.runners):
                beat = RunnerHeartbeat(
                    LOG, 1, 0, "policy", 8, 1, is_leaving=runner in self.leaving, is_local=runner == "trainer"
                )
                handle(HeartbeatCame(runner, beat))
                handle(ReportCame(runner, Report(LOG, 1, ())))
            handle(Tick())
        return lost

    def publish(self, version: int) -> None:
        self.leader.handle(VersionsSeen("policy", PublishedVersions(version, tuple(range(1, version + 1)))), self.now)

    def tokens(self, runner: str) -> None:
        """Send a frame with a token of an attempt that the leader does not know: that it came is what counts."""
        row = (1).to_bytes(8, "little")
        frame = Frame(LOG, 1, 1, row, bytes(8), row, bytes(4), bytes(4))
        self.leader.handle(FrameCame(runner, frame), self.now)

    def answer(
        self, state: SeedingState | None = None, *, waited_s: float = 0.0, seeded_s: float = 0.0
    ) -> SeedingAnswer:
        question = SeedingQuestion(2, 1, waited_s, seeded_s, initial_s=150.0, gain=3.0, state=state)
        answer = answer_seeding(self.leader.state, question, self.leader.models, lambda *_: "root")
        assert answer.root == "root"
        return answer

    def ask(self, state: SeedingState | None = None, *, waited_s: float = 0.0, seeded_s: float = 0.0) -> SeedingState:
        answer = self.answer(state, waited_s=waited_s, seeded_s=seeded_s)
        assert answer.has_others
        assert answer.state is not None
        return answer.state


def test_the_first_step_is_what_the_trainer_says_and_each_step_is_learnt_from_once() -> None:
    led = Led("a", "b", "trainer")
    led.until(1.0)
    # What began before this leader is not known.
    led.publish(1)
    assert led.ask() == SeedingState(150.0, 1)
    led.until(7.0)
    led.tokens("b")
    led.until(9.0)
    led.tokens("trainer")
    led.until(11.0)
    led.publish(2)
    # 10 s, of which remote instances worked 6: 150 + (7 - 4) / 3 = 151; (6 * 2 + 151 * 1) / (10 - 7 - 1) = 81.5
    learnt = led.ask(SeedingState(150.0, 1), waited_s=7.0, seeded_s=1.0)
    assert learnt.seed_s == pytest.approx(151.0)
    assert (learnt.remote_max, learnt.version) == (82, 2)
    assert dict(learnt.remembered) == {2.0: pytest.approx(151.0)}
    assert led.ask(learnt, waited_s=99.0) == learnt, "the same step again"


def test_a_step_in_which_an_instance_came_or_went_is_remembered_for_no_count() -> None:
    led = Led("a", "b")
    led.until(1.0)
    led.publish(1)
    led.until(3.0)
    led.runners.remove("b")
    led.until(5.0)
    led.publish(2)
    assert led.ask(SeedingState(150.0, 1)).remembered == ()
    led.until(9.0)
    led.publish(3)
    assert [count for count, _ in led.ask(SeedingState(150.0, 1)).remembered] == [1.0]


def test_the_trainers_own_coming_and_going_changes_no_step() -> None:
    led = Led("a")
    led.until(1.0)
    led.publish(1)
    led.runners.add("trainer")
    led.until(3.0)
    led.leaving.add("trainer")
    led.until(4.0)
    led.runners.remove("trainer")
    (left,) = led.until(6.0)
    assert left.is_left
    assert led.leader.counts.instances_lost == 0
    led.publish(2)
    assert [count for count, _ in led.ask(SeedingState(150.0, 1)).remembered] == [1.0]


def test_a_trainer_that_is_alone_is_told_so_and_does_not_seed_less_for_it() -> None:
    """No other engine makes anything: if it seeded less and less, it would wait for ever."""
    led = Led()
    led.until(1.0)
    led.publish(1)
    led.until(11.0)
    led.publish(2)
    alone = led.answer(SeedingState(150.0, 1), waited_s=0.0, seeded_s=8.0)
    assert not alone.has_others
    assert alone.state is not None
    assert (alone.state.seed_s, dict(alone.state.remembered)) == (150.0, {0.0: 150.0})
    led.runners.add("a")
    led.until(12.0)
    assert led.answer(alone.state).has_others


def test_a_trainer_that_began_anew_learns_nothing_from_a_step_that_it_has_not_measured() -> None:
    """It knows neither how long the one before waited and seeded, so all of the step would count as training."""
    led = Led("a")
    led.until(1.0)
    led.publish(1)
    led.until(11.0)
    led.publish(2)
    began = led.ask()
    assert began == SeedingState(150.0, 1)
    led.until(21.0)
    led.publish(3)
    assert led.ask(began, waited_s=2.0, seeded_s=1.0).train_s == pytest.approx(7.0)


def test_a_trainer_that_was_replaced_is_told_so() -> None:
    led = Led("a")
    question = SeedingQuestion(1, 1, 0.0, 0.0, initial_s=150.0, gain=3.0)
    answer = answer_seeding(led.leader.state, question, led.leader.models, lambda *_: "")
    assert isinstance(answer, SeedingAnswer)
    assert (answer.state, answer.error) == (None, "StaleSender")
