"""The order of what waits is that of the ranks of what waits now, however much has come and gone since."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.core.waiting import WaitingQueue
from tensorhub_rollout.policy.rank_order import Rank
from tensorhub_rollout.policy.view import FleetView
from tensorhub_rollout.policy.waiting_order import GONE_MAX, GONE_MIN, SWEPT_MAX, WaitingOrder

MODEL = "policy"


def of(index: int) -> RequestId:
    return RequestId(3, index)


class Ranked:
    """A queue as the leader has it, an order that follows it, and lengths that change."""

    def __init__(self) -> None:
        self.queue, self.order = WaitingQueue(), WaitingOrder()
        self.lengths: dict[RequestId, float] = {}
        self.step, self.asked = 1, 0

    def put(self, index: int, length: float, priority: int = 0) -> None:
        self.lengths[of(index)] = length
        self.queue.put(of(index), MODEL, priority, has_begun=False)

    def rank(self, each: RequestId) -> Rank:
        self.asked += 1
        return 0, False, -self.lengths[each], each

    def since(self, number: int) -> tuple[list[RequestId], int]:
        return self.queue.since(MODEL, number)

    def look(self, count_max: int = 1000, *, again_max: int = 0, is_told: bool = True) -> list[int]:
        since = self.since if is_told else None
        view = FleetView(self.queue.of_model(MODEL), (), self.step, waiting_since=since)
        self.order.update(view, self.rank, count_max)
        self.order.rank_anew(view, self.rank, again_max)
        return [each.index for each in self.order.of(view)]


@given(st.data())
def test_what_waits_is_in_the_order_of_its_ranks(data: st.DataObject) -> None:
    ranked, waiting = Ranked(), set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        for index in data.draw(st.lists(st.integers(0, 40), unique=True)):
            if index in waiting and data.draw(st.booleans()):
                ranked.queue.discard(of(index))
                waiting.discard(index)
            else:
                ranked.put(index, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2)))
                waiting.add(index)
        found = ranked.look(is_told=data.draw(st.booleans()))
        assert sorted(found) == sorted(waiting)
        if not data.draw(st.booleans()):
            continue
        # Whatever was told, a look that is told of nothing new has the same order.
        assert ranked.look(is_told=data.draw(st.booleans())) == found
        ranked.step += 1
        assert ranked.look() == sorted(waiting, key=lambda index: (-ranked.lengths[of(index)], index))


def test_a_request_that_comes_again_has_the_rank_of_then() -> None:
    ranked = Ranked()
    ranked.put(0, 10)
    ranked.put(1, 20)
    assert ranked.look() == [1, 0]
    ranked.queue.discard(of(0))
    ranked.put(0, 30)
    assert ranked.look() == [0, 1]


def test_some_are_ranked_anew_at_each_look_and_all_in_turn() -> None:
    ranked = Ranked()
    for index in range(30):
        ranked.put(index, index)
    ranked.look()
    ranked.asked = 0
    ranked.lengths |= {of(index): -index for index in range(30)}
    for _ in range(3):
        ranked.look(again_max=10)
    assert ranked.asked == 30
    assert ranked.look() == [*range(30)]


def test_only_what_has_come_is_ranked() -> None:
    ranked, random = Ranked(), Random(1)
    for index in range(500):
        ranked.put(index, random.random())
    ranked.look()
    for index in random.sample(range(500), 20):
        ranked.queue.discard(of(index))
    ranked.put(500, 0.5)
    ranked.asked = 0
    assert len(ranked.look()) == 481
    assert ranked.asked == 1


def test_no_more_than_the_limit_is_ranked_at_a_look_and_all_in_the_end() -> None:
    ranked = Ranked()
    for index in range(25):
        ranked.put(index, index)
    assert [len(ranked.look(10)) for _ in range(3)] == [10, 20, 25]
    assert ranked.look(10) == [*range(24, -1, -1)]


def test_what_has_gone_is_not_kept() -> None:
    ranked = Ranked()
    ranked.put(0, 1e9)
    ranked.look()
    for first in range(1, 10 * GONE_MIN, GONE_MIN):
        # The longest stays where it is, in front of all that comes and goes.
        indices = range(first, first + GONE_MIN)
        for index in indices:
            ranked.put(index, index)
        assert len(ranked.look()) == GONE_MIN + 1
        for index in indices:
            ranked.queue.discard(of(index))
        assert ranked.look() == [0]
        assert len(ranked.order) <= 2 * GONE_MIN + 1


def test_those_of_another_model_are_not_told() -> None:
    queue = WaitingQueue()
    queue.put(of(1), MODEL, 0, has_begun=False)
    queue.put(of(2), "other", 0, has_begun=False)
    told, number = queue.since(MODEL, -1)
    assert told == [of(1)]
    assert [*queue.of_model("other")] == [of(2)]
    assert of(2) not in queue.of_model(MODEL)
    assert queue.since(MODEL, number) == ([], number)
    assert (len(queue.of_model(MODEL)), len(queue.of_model("none"))) == (1, 0)


def test_a_look_passes_over_no_more_than_its_limit_and_the_next_ones_go_on() -> None:
    ranked, count = Ranked(), 3 * GONE_MAX
    for index in range(count + 2):
        ranked.put(index, count - index)
    assert ranked.look(2 * count)[:2] == [0, 1]
    for index in range(1, count + 1):
        ranked.queue.discard(of(index))
    found = [ranked.look() for _ in range(4)]
    # The one in front stays where it is, and does not keep what is behind from being found.
    assert found[0] == [0]
    assert found[-1] == [0, count + 1]


def test_what_has_gone_is_swept_a_few_at_a_look_where_none_is_asked_for() -> None:
    ranked, count = Ranked(), 4 * SWEPT_MAX
    for index in range(count):
        ranked.put(index, index)
    ranked.look(count)
    for index in range(count):
        ranked.queue.discard(of(index))
    sizes = []
    for _ in range(6):
        ranked.order.update(FleetView(ranked.queue.of_model(MODEL), (), 1, waiting_since=ranked.since), ranked.rank, 10)
        sizes.append(len(ranked.order))
    assert sizes == [count - SWEPT_MAX * at for at in (1, 2, 3, 4)] + [0, 0]


def test_what_is_urgent_is_ranked_before_what_came_earlier_and_each_once() -> None:
    ranked, count = Ranked(), 100
    for index in range(count):
        ranked.put(index, index)
    ranked.look(10)
    ranked.put(count, 5.5, priority=1)
    assert count in ranked.look(10)
    for _ in range(9):
        ranked.look(10)
    assert len(ranked.look(10)) == count + 1
    assert ranked.asked == count + 1


@given(st.data())
def test_what_has_come_is_told_in_its_order_of_all_priorities(data: st.DataObject) -> None:
    queue, came, seen = WaitingQueue(), dict[int, int](), 0
    _, number = queue.since(MODEL, -1)
    for at in range(data.draw(st.integers(1, 30))):
        index = data.draw(st.integers(0, 8))
        match data.draw(st.sampled_from(["put", "put", "of another model", "discard", "ask"])):
            case "put":
                queue.put(of(index), MODEL, data.draw(st.integers(0, 2)), has_begun=data.draw(st.booleans()))
                came.pop(index, None)
                came[index] = at
            case "of another model":
                queue.put(of(100 + index), "other", 0, has_begun=False)
            case "discard":
                queue.discard(of(index))
                came.pop(index, None)
            case _:
                told, number = queue.since(MODEL, number)
                assert told == [of(each) for each, when in came.items() if when >= seen]
                seen = at
    told, _ = queue.since(MODEL, -1)
    assert told == [of(each) for each in came]
