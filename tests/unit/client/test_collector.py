"""What has ended is yielded once, whichever of a trainer's tasks asked for it, and again where none got it."""

from tensorhub._rollouts.collector import Collector
from tensorhub._rollouts.trajectories import EndedSession
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyAnswer


def ended(number: int, group: str, group_open: int = 0) -> EndedRequest:
    return EndedRequest(RequestId(1, number), 2 + number, group, number, 2, group_open, "prompts", 0, "stop", 1)


def take(collector: Collector, *found: EndedRequest, is_last: bool = True) -> bool:
    return collector.take(collector.place, ReadyAnswer(found, is_last=is_last))


def pick(collector: Collector, *, whole_groups: bool = True) -> list[EndedRequest]:
    picked = collector.pick(1, whole_groups=whole_groups, groups=None, all_of_them=False)
    return [each for each in picked if isinstance(each, EndedRequest)]


def test_two_answers_to_one_place_count_once() -> None:
    collector = Collector()
    place, answer = collector.place, ReadyAnswer((ended(0, "a", 1), ended(1, "a")))
    assert collector.take(place, answer)
    assert not collector.take(place, answer)
    assert pick(collector) == [*answer.ended]
    assert pick(collector) == []


def test_what_was_picked_and_could_not_be_read_comes_again_before_what_ended_later() -> None:
    collector = Collector()
    take(collector, ended(0, "a", 1), ended(1, "a"))
    picked = pick(collector)
    take(collector, ended(2, "b", 1), ended(3, "b"))
    collector.put_back(picked)
    take(collector)
    assert [each.group for each in pick(collector)] == ["a", "a"]
    assert [each.group for each in pick(collector)] == ["b", "b"]


def test_what_is_put_back_of_a_group_waits_for_its_other_members() -> None:
    collector = Collector()
    take(collector, ended(0, "a", 1))
    picked = pick(collector, whole_groups=False)
    take(collector, ended(1, "a"))
    collector.put_back(picked)
    assert [each.index_in_group for each in pick(collector)] == [0, 1]


def session(name: str, count: int) -> EndedSession:
    return EndedSession(name, (), (None,) * count)  # type: ignore[arg-type]  # Trajectories are not looked at.


def test_what_is_claimed_comes_with_its_session_alone() -> None:
    collector = Collector()
    collector.claim(["a"])
    take(collector, ended(0, "a"), ended(1, "b"))
    assert collector.count == 1
    assert [each.group for each in pick(collector)] == ["b"]
    assert [each.group for each in collector.pick_claimed()] == ["a"]
    assert collector.pick_claimed() == []
    assert pick(collector) == []


def test_what_no_gateway_takes_any_more_comes_by_itself() -> None:
    collector = Collector()
    collector.claim(["a"])
    take(collector, ended(0, "a"))
    collector.release()
    take(collector)
    assert [each.group for each in pick(collector)] == ["a"]


def test_sessions_count_by_their_trajectories_and_come_behind_what_ended_alone() -> None:
    collector = Collector()
    collector.deliver(session("s", 2))
    collector.deliver(session("t", 1))
    take(collector, ended(0, "b"))

    def names(count_min: int, groups: tuple[str, ...] | None = None) -> list[str]:
        found = collector.pick(count_min, whole_groups=True, groups=groups, all_of_them=False)
        return [each.session if isinstance(each, EndedSession) else each.group for each in found]

    assert collector.count == 4
    assert names(5) == []
    assert names(1, ("t",)) == ["t"]
    picked = collector.pick(3, whole_groups=True, groups=None, all_of_them=False)
    assert len(picked) == 2
    collector.put_back(picked)
    take(collector)
    assert names(3) == ["b", "s"]
