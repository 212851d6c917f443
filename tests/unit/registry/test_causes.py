"""What a registry's outcomes name as their cause, and where its own spans stand."""

import msgspec
import pytest
from tests.unit.span_places import place_at

from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TRACEPARENT, TraceContext
from tensorhub_common.protocol.log.events import AnyEvent, RoundDecided, RoundJoined, VersionPublished
from tensorhub_registry.core.trace_causes import ONE_TRACE_S_MAX, ROUNDS_MAX, VERSIONS_MAX, TraceCause, TraceCauses

PUBLICATION = place_at(0xA, 0xA1)
TRANSFER = place_at(0xB, 0xB1)


def headers(place: TraceContext) -> dict[str, str]:
    return {TRACEPARENT: place.traceparent}


def published(version: int = 7, time: float = 0.0) -> VersionPublished:
    return VersionPublished(i=1, k=1, time=time, model="m", version=version, replica="trainer", roots=("r",))


def joined(replica: str = "rollout") -> RoundJoined:
    return RoundJoined(i=1, k=1, model="m", replica=replica, round=3, shard=0, missing=())


def decided(version: int = 7, time: float = 1.0) -> RoundDecided:
    return RoundDecided(
        i=2, k=2, time=time, model="m", replica="rollout", round=3, attempt=1, version=version, roots=()
    )


def one(causes: TraceCauses, event: AnyEvent, place: TraceContext | None = None) -> TraceCause:
    (found,) = causes.of((event,), {} if place is None else headers(place)).values()
    return found


def told(*, join: bool = True) -> TraceCauses:
    causes = TraceCauses()
    if join:
        assert causes.of((joined(),), headers(TRANSFER)) == {}
    one(causes, published(), PUBLICATION)
    return causes


def test_a_version_stands_below_the_word_that_completed_it() -> None:
    cause = one(TraceCauses(), published(), PUBLICATION)
    assert (dict(cause.headers), cause.parent) == (headers(PUBLICATION), PUBLICATION)


def test_a_decision_names_the_publication_whoever_triggered_it() -> None:
    cause = one(told(), decided(), place_at(0xC, 0xC1))
    assert dict(cause.headers) == headers(PUBLICATION)
    assert cause.parent == PUBLICATION.beside(TRANSFER.span_id), "it is a part of the transfer, in the version's trace"
    assert one(told(join=False), decided()).parent == PUBLICATION


def test_one_group_may_publish_and_decide() -> None:
    causes = TraceCauses()
    event = msgspec.structs.replace(decided(), time=0.0)
    assert dict(causes.of((published(), event), headers(PUBLICATION))[2].headers) == headers(PUBLICATION)


def test_long_after_the_publication_a_round_has_the_trace_of_who_joined_last() -> None:
    at_the_bound = one(told(), decided(time=ONE_TRACE_S_MAX))
    assert dict(at_the_bound.headers) == headers(PUBLICATION)
    late = one(told(), decided(time=ONE_TRACE_S_MAX + 0.1))
    assert dict(late.headers) == {**headers(TRANSFER), PUBLISH_HEADER: PUBLICATION.traceparent}
    assert (late.parent, late.links) == (TRANSFER, (PUBLICATION,))


def test_a_publication_without_a_trace_leaves_the_round_its_own() -> None:
    causes = told()
    one(causes, published(8))
    cause = one(causes, decided(8))
    assert (dict(cause.headers), cause.parent) == (headers(TRANSFER), TRANSFER)
    nothing = one(TraceCauses(), decided())
    assert (dict(nothing.headers), nothing.parent) == ({}, None)


@pytest.mark.parametrize("garbage", ["", "nonsense", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_garbage_is_no_trace(garbage: str) -> None:
    causes = TraceCauses()
    causes.of((joined(),), {TRACEPARENT: garbage})
    assert causes.of((published(),), {TRACEPARENT: garbage})[1].parent is None
    assert one(causes, decided()).parent is None


def test_what_is_remembered_is_bounded() -> None:
    causes = TraceCauses()
    for number in range(VERSIONS_MAX + 1):
        one(causes, published(number), PUBLICATION)
    assert one(causes, decided(0)).parent is None
    assert one(causes, decided(1)).parent == PUBLICATION
    for number in range(ROUNDS_MAX + 1):
        causes.of((joined(f"r{number}"),), headers(TRANSFER))
    assert len(causes._joined) == ROUNDS_MAX
