"""What `tensorhub rollouts why` shows: a group's responses with what they wait for, and their attempts. Pure."""

from collections.abc import Iterator
from typing import Final

from tensorhub_common.protocol.rollout.questions import AttemptWhy, ExpectedLength, RequestWhy, WhyAnswer

RESPONSES: Final = ("CONSUMER", "INDEX", "STATE", "TOKENS", "EXPECTED", "FROM", "WAITS FOR")
ATTEMPTS: Final = (
    "CONSUMER",
    "INDEX",
    "ATTEMPT",
    "INSTANCE",
    "PLACED",
    "LASTED",
    "TOKENS",
    "FIRST AFTER",
    "END",
    "WHY",
)
NUMBERS: Final = ("INDEX", "PLACED", "LASTED", "FIRST AFTER")

_FROM: Final = {
    "finished": "what ended of its prompt",
    "running": "what runs of its prompt",
    "alike": "prompts about as long",
    "job": "other prompts",
}


def headline(found: WhyAnswer, job: str) -> str:
    """Say what there is of the group."""
    if found.is_done:
        return f"group {found.group} of job {job}: all of its responses are done; their traces have the rest"
    open_ = [each for each in found.requests if each.state != "ended"]
    waiting = sum(each.state == "waiting" for each in open_)
    more = f"; {found.left_out} more: ask for them by their index" if found.left_out else ""
    return (
        f"group {found.group} of job {job}: {len(found.requests)} response(s), {len(open_)} of them open, "
        f"{waiting} without an instance{more}"
    )


def holds(found: WhyAnswer) -> list[str]:
    """Say how the versions are kept that the responses are for alone, each once."""
    return list(dict.fromkeys(each.held for each in found.requests if each.held is not None))


def responses(found: WhyAnswer) -> Iterator[tuple[object, ...]]:
    """Yield a row of each response, under `RESPONSES`."""
    for each in found.requests:
        length, known_from = ("", "") if each.expected is None else _expected(each.expected)
        yield each.consumer, each.index, _state(each), each.tokens, length, known_from, each.waits_for


def attempts(found: WhyAnswer) -> Iterator[tuple[object, ...]]:
    """Yield a row of each attempt, under `ATTEMPTS`."""
    for each in found.requests:
        for attempt in each.attempts:
            first = attempt.first_token_s
            yield (
                each.consumer,
                each.index,
                f"{attempt.attempt.term}/{attempt.attempt.n}",
                attempt.instance,
                f"{attempt.placed_s_ago:.1f} s ago",
                f"{attempt.lasted_s:.1f} s",
                f"{attempt.tokens_from} to {attempt.tokens_to}",
                None if first is None else f"{first:.2f} s",
                attempt.end or "goes on",
                _why(attempt),
            )


def _state(each: RequestWhy) -> str:
    if each.ended_by is None:
        return each.state
    return f"ended: {each.ended_by}" + (f" ({each.error})" if each.error else "")


def _expected(length: ExpectedLength) -> tuple[str, str]:
    return f"{length.median:.0f} (9 in 10: {length.p90:.0f})", _FROM.get(length.knowledge, length.knowledge)


def _why(attempt: AttemptWhy) -> str:
    taken = f"taken away: {attempt.withdrawn_why}" if attempt.withdrawn_why else ""
    return "; ".join(each for each in (attempt.reason, taken, attempt.error) if each)
