"""The words of `tensorhub trace` about responses of rollouts. Pure."""

from collections.abc import Iterator
from typing import Final

from tensorhub_common.protocol.spans import FinishedSpan

HEAD: Final = ("GROUP", "INDEX", "MODEL", "VERSIONS", "WHEN", "TOOK", "TOKENS", "ATTEMPTS", "END")


def cells(span: FinishedSpan, when: str, took: str) -> tuple[object, ...]:
    """Return the cells of one response, under `HEAD`."""
    get = span.attributes.get
    end = f"{get('tensorhub.reason')}: {span.error}" if span.error else get("tensorhub.reason")
    return (
        get("tensorhub.group"),
        get("tensorhub.index"),
        get("tensorhub.model"),
        versions(span),
        when,
        took,
        get("tensorhub.tokens"),
        get("tensorhub.attempts"),
        end,
    )


def versions(span: FinishedSpan) -> str:
    """Return the versions that made the tokens, from the oldest on."""
    found = span.attributes.get("tensorhub.versions")
    return ",".join(map(str, found)) if isinstance(found, tuple | list) else ""


def title(span: FinishedSpan, when: str) -> str:
    """Say which response is drawn."""
    get = span.attributes.get
    made = f"{get('tensorhub.tokens')} tokens of model {get('tensorhub.model')}"
    made += f" version {versions(span)}" if versions(span) else ""
    which = f"{get('tensorhub.group')}/{get('tensorhub.index')}"
    return f"response {which}  {made}  {when}  {get('tensorhub.reason')}, trace {span.trace}"


def attempt_account(span: FinishedSpan) -> str:
    """Say what an attempt made, where, and how it ended."""
    get = span.attributes.get
    first, count = _whole(span, "tensorhub.tokens_from"), _whole(span, "tensorhub.tokens")
    made = f"tokens {first} to {first + count}" if count else "no token"
    made += f" on version {versions(span)}" if versions(span) else ""
    began = get("tensorhub.first_token_s")
    after = f", the first after {began} s" if began is not None else ""
    return f"{get('tensorhub.instance', '?')}: {made}{after}; {get('tensorhub.end', 'no end')}"


def attempt_reasons(span: FinishedSpan) -> Iterator[str]:
    """Yield why an attempt was placed where it was, and why it was taken from there, as far as its policy said so."""
    for what, name in (("placed", "tensorhub.why"), ("taken away", "tensorhub.withdrawn_why")):
        why = span.attributes.get(name)
        if why:
            yield f"{what}: {why}"


def _whole(span: FinishedSpan, name: str) -> int:
    """Return an attribute that should be a number; 0 where it is none."""
    found = span.attributes.get(name)
    return int(found) if isinstance(found, int | float) else 0
