"""What has ended is yielded once, whichever of a trainer's tasks asked for it, and again where none got it."""

from tensorhub._rollouts.collector import Collector
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyAnswer


def ended(number: int, group: str, group_open: int = 0) -> EndedRequest:
    return EndedRequest(RequestId(1, number), 2 + number, group, number, 2, group_open, "prompts", 0, "stop", 1)


def take(collector: Collector, *found: EndedRequest, is_last: bool = True) -> bool:
    return collector.take(collector.place, ReadyAnswer(found, is_last=is_last))


def pick(collector: Collector, *, whole_groups: bool = True) -> list[EndedRequest]:
    return collector.pick(1, whole_groups=whole_groups, groups=None, all_of_them=False)


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
