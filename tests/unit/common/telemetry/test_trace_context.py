"""Places of spans as W3C writes them, and what is taken for none."""

import pytest

from tensorhub_common.observability.trace_context import TraceContext, context_in, headers_of, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_what_is_written_is_read() -> None:
    place = parse_traceparent(GOOD)
    assert place is not None
    assert place.traceparent == GOOD
    assert (place.trace_id, place.span_id, place.sampled) == (TRACE, SPAN, True)
    unsampled = TraceContext(place.trace_id, place.span_id, sampled=False)
    assert parse_traceparent(unsampled.traceparent) == unsampled
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") is not None
    for name in ("traceparent", "Traceparent", "TRACEPARENT"):
        assert context_in({"Nats-Msg-Id": "x", name: GOOD}) == place
    assert (headers_of(None), headers_of(place)) == ({}, {"traceparent": GOOD})
    assert place.beside("5" * 16) == TraceContext(place.trace_id, "5" * 16)


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        "",
        "nonsense",
        GOOD + " ",
        GOOD + "-more",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[1:]}-{SPAN}-01",
        "00-" + "\u0661" * 32 + f"-{SPAN}-01",
    ],
)
def test_garbage_counts_as_absent(garbage: str | None) -> None:
    assert parse_traceparent(garbage) is None
    assert context_in({"traceparent": garbage} if garbage is not None else {}) is None
