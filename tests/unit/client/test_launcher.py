"""Runners that come and go by what a manager wishes for: who starts, who is told to go, and who ends when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.local import launcher
from tensorhub.local.launcher import DRAIN_S_MAX, Changes, Launcher, changes
from tensorhub_common.errors import RolloutUnavailable, TensorHubError
from tensorhub_common.protocol.rollout.questions import InstanceStateName, InstanceStatus, RolloutStatus

NAMES = ("runner-0", "runner-1", "runner-2", "runner-3")
A, B, C, D = NAMES


def instance(
    runner: str, at_work: int = 0, *, state: InstanceStateName = "serving", kept: int | None = None
) -> InstanceStatus:
    return InstanceStatus(runner, "policy", state, 1, 8, 0, at_work, 0.0, kept)


def test_more_start_under_the_lowest_free_names() -> None:
    assert changes(NAMES, (B,), {}, (instance(B),), 3, 0.0) == Changes(start=(A, C))
    assert changes(NAMES, (A, B), {B: 0.0}, (instance(A), instance(B, 1, state="leaving")), 2, 1.0) == Changes(
        start=(C,)
    ), "one that was told to go does not come back"
    assert changes(NAMES, NAMES, {}, (), 4, 0.0) == Changes()


def test_who_has_least_to_do_goes_first_and_who_keeps_a_version_last() -> None:
    """Of those that have as much, the one with the highest number. One that was never heard ends."""
    instances = (instance(A, 3), instance(B, 5), instance(C, 3), instance(D, 0, kept=4))
    assert changes(NAMES, NAMES, {}, instances, 3, 0.0).notify == (C,)
    assert changes(NAMES, NAMES, {}, instances, 1, 0.0).notify == (C, A, B)
    assert changes(NAMES, NAMES, {}, instances[:2] + instances[3:], 3, 0.0) == Changes(end=(C,))


@pytest.mark.parametrize(
    ("found", "after_s", "ends"),
    [
        ((instance(B, 2, state="leaving"),), 1.0, False),
        ((instance(B, 0, state="serving"),), 1.0, False),
        ((instance(B, 0, state="leaving"),), 1.0, True),
        ((), 1.0, True),
        ((instance(B, 2, state="leaving"),), DRAIN_S_MAX, True),
    ],
    ids=["has-responses", "not-told-yet", "has-none", "is-gone", "takes-too-long"],
)
def test_who_was_told_to_go_ends_once_its_responses_have_moved(
    found: tuple[InstanceStatus, ...], after_s: float, *, ends: bool
) -> None:
    todo = changes(NAMES, (A, B), {B: 0.0}, (instance(A), *found), 1, after_s)
    assert todo.end == ((B,) if ends else ())
    assert todo.notify == ((B,) if found and found[0].state == "serving" else ()), "it may not have heard it"


@given(
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5)),
    st.integers(0, 4),
)
def test_as_many_stay_as_are_wanted_as_far_as_there_are_names(
    there: set[str], told: set[str], at_work: dict[str, int], target: int
) -> None:
    leaving = dict.fromkeys(sorted(told & there), 0.0)
    instances = tuple(instance(runner, count) for runner, count in sorted(at_work.items()))
    todo = changes(NAMES, tuple(sorted(there)), leaving, instances, target, 1.0)
    staying = there - leaving.keys() - {*todo.notify, *todo.end} | set(todo.start)
    assert len(staying) == min(target, len(NAMES) - len(leaving))
    assert not set(todo.start) & there
    assert {*todo.notify, *todo.end} <= there
    assert not set(todo.notify) & set(todo.end)
    assert not (todo.start and set(todo.notify) - leaving.keys())


class Processes:
    """Runners that are no processes, and what was done with them."""

    def __init__(self, *runners: str) -> None:
        self.there = [*runners]
        self.done: list[tuple[str, str]] = []

    @property
    def runners(self) -> tuple[str, ...]:
        return tuple(self.there)

    async def start_runner(self, runner: str) -> None:
        self.done.append(("start", runner))
        if runner == D:
            raise OSError("no memory")
        self.there.append(runner)

    def notify_runner(self, runner: str) -> None:
        self.done.append(("notify", runner))

    async def end_runner(self, runner: str) -> None:
        self.done.append(("end", runner))
        self.there.remove(runner)


def status(*instances: InstanceStatus, wished: int | None, has_gathered: bool = True) -> RolloutStatus:
    return RolloutStatus("job", "manager", 1, 1, (), instances, 0.0, 0, wished, has_gathered)


class Asked(Exception):
    """All answers were given."""


async def followed(processes: Processes, *answers: RolloutStatus | TensorHubError) -> list[tuple[str, str]]:
    """Return what a launcher of one to four runners does with these answers, one after the other."""
    left = iter(answers)

    async def ask(_: float) -> RolloutStatus:
        answer = next(left, None)
        if answer is None:
            raise Asked
        if isinstance(answer, TensorHubError):
            raise answer
        return answer

    with pytest.raises(Asked):
        await Launcher(processes, ask, 1, 4).run()
    return processes.done


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LOOK_S", 0.0)


async def test_it_follows_within_its_bounds_and_waits_for_a_manager_that_knows_all() -> None:
    """What it is told before, or not told, changes nothing."""
    a = instance(A)
    assert await followed(Processes(A), status(a, wished=3, has_gathered=False), RolloutUnavailable("away")) == []
    assert await followed(Processes(A), status(a, wished=None)) == []
    assert await followed(Processes(A), status(a, wished=0)) == [], "one is to stay"
    assert await followed(Processes(A), status(a, wished=2)) == [("start", B)]
    every = tuple(instance(runner) for runner in (A, B, C))
    assert await followed(Processes(A, B, C), status(*every, wished=9)) == [("start", D)], "it is tried again later"


async def test_one_that_goes_is_told_until_it_leaves_and_ends_once() -> None:
    leaving = instance(B, 1, state="leaving")
    went = await followed(
        Processes(A, B),
        status(instance(A, 2), instance(B, 1), wished=1),
        status(instance(A, 2), instance(B, 1), wished=1),
        status(instance(A, 2), leaving, wished=1),
        status(instance(A, 3), instance(B, 0, state="leaving"), wished=1),
        status(instance(A, 3), wished=1),
    )
    assert went == [("notify", B), ("notify", B), ("end", B)]
