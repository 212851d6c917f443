"""Whether a trainer's own engines have generated enough in a step."""

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.decisions.seeding_watch import SeedingWatch
from tensorhub_rollout.policy.finish_times import Load
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.view import FleetView, InstanceView

STEPS = StepModel(0.0, 1e-4, 0.0)
LOCAL = InstanceView("trainer", 8, (), (RequestId(1, 1),), is_local=True)
REMOTE = InstanceView("remote", 8, (), ())


def seen(*instances: InstanceView, waiting: tuple[RequestId, ...] = ()) -> FleetView:
    return FleetView(waiting, instances, 1)


def watch(train_s: float = 50.0) -> SeedingWatch:
    found = SeedingWatch()
    found.learnt(train_s, 0.0, is_steady=True)
    return found


def loads(remote_s: float, local_s: float) -> dict[str, Load]:
    return {"remote": Load(0.0, remote_s, 1.0 / STEPS.each_s), "trainer": Load(0.0, local_s, 2.0 / STEPS.each_s)}


def test_it_is_enough_once_the_others_are_done_before_the_trainer_has_trained() -> None:
    view = seen(LOCAL, REMOTE)
    assert watch().is_enough(view, loads(30.0, 19.0), STEPS, 1.0) is None
    why = watch().is_enough(view, loads(30.0, 17.0), STEPS, 1.0)
    assert why == "the others are done in 49 s with all that is open, and training takes 50 s"


def test_it_is_not_enough_before_the_steps_first_prompt() -> None:
    """A trainer begins to seed, and then submits: its engine would be told to stop before there is anything."""
    fresh = InstanceView("trainer", 8, (), (), is_local=True)
    assert watch().is_enough(seen(fresh, REMOTE), loads(0.0, 0.0), STEPS, 1.0) is None
    busy = InstanceView("remote", 8, (RequestId(1, 0),), ())
    assert watch().is_enough(seen(fresh, busy), loads(1.0, 0.0), STEPS, 1.0) is not None


def test_it_is_not_enough_while_something_waits_or_no_other_is_there() -> None:
    little = loads(1.0, 1.0)
    assert watch().is_enough(seen(LOCAL, REMOTE, waiting=(RequestId(1, 0),)), little, STEPS, 1.0) is None
    assert watch().is_enough(seen(LOCAL), little, STEPS, 1.0) is None
    old = InstanceView("remote", 8, (), (), may_start=False)
    assert watch().is_enough(seen(LOCAL, old), little, STEPS, 1.0) is None
    assert watch().is_enough(seen(REMOTE), little, STEPS, 1.0) is None


def test_nothing_is_told_before_a_whole_step_is_known() -> None:
    unknowing = SeedingWatch()
    assert not unknowing.can_tell
    assert unknowing.is_enough(seen(LOCAL, REMOTE), loads(1.0, 1.0), STEPS, 1.0) is None
    assert watch().can_tell


def test_it_learns_by_how_much_it_was_off_where_no_instance_came_or_went() -> None:
    for is_steady in (True, False):
        view, known = seen(LOCAL, REMOTE), watch()
        assert known.is_enough(view, loads(38.0, 0.0), STEPS, 100.0)
        # Predicted were 40 s, and it took 60.
        known.learnt(50.0, 160.0, is_steady=is_steady)
        assert (known.is_enough(view, loads(39.0, 0.0), STEPS, 200.0) is None) == is_steady
        assert known.is_enough(view, loads(37.0, 0.0), STEPS, 200.0)
