"""The last outcomes and events, and no more of them than their limits say."""

from tensorhub_common.protocol.log.events import AnyEvent, VersionRetired
from tensorhub_registry.core.outcome_history import STORY_EVENTS_MAX, OutcomeHistory


def group(seq: int, size: int = 1) -> tuple[AnyEvent, ...]:
    return tuple(VersionRetired(cmd=seq, i=i, k=size, model="m", version=i) for i in range(1, size + 1))


def test_an_outcome_is_found_by_its_commands_sequence() -> None:
    history = OutcomeHistory()
    history.add(group(3, 2))
    history.add(group(9))
    history.check()
    assert history.outcome(3) == group(3, 2)
    assert history.outcome(4) is None
    assert [(event.cmd, event.i) for event in history.events()] == [(3, 1), (3, 2), (9, 1)]
    assert history.forgotten == 0


def test_the_oldest_outcomes_are_forgotten() -> None:
    history = OutcomeHistory(outcomes_max=3)
    for seq in range(10, 20):
        history.add(group(seq))
        history.check()
    assert [seq for seq in range(30) if history.outcome(seq)] == [17, 18, 19]
    assert history.forgotten == 16


def test_a_story_is_told_of_the_last_events() -> None:
    history = OutcomeHistory()
    history.add(group(1, STORY_EVENTS_MAX))
    history.add(group(2, 2))
    events = list(history.events())
    assert len(events) == STORY_EVENTS_MAX
    assert (events[0].i, events[-1].cmd) == (3, 2)
