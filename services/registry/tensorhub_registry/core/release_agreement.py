"""Whether an event in the log is the one that was decided here, although another release may have written it. Pure.

Two releases that fold alike may still write an event differently: one has a field that the other does not know, or
words the sentence for people differently. So the fields are compared that are in the log's bytes and known here.

Invariant: events of two releases with a different kind, number or order, or with a different value in a field that both
have, do not agree.
"""

from typing import Any, Final

import msgspec

from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.events import AnyEvent

WORDS: Final = ("message", "reason")
"""The fields of an event that are sentences for people: a release may word them differently."""


def agrees(decided: AnyEvent, stored: bytes) -> bool:
    """Tell whether the stored event is the decided one, in all fields that both releases know."""
    try:
        said = msgspec.json.decode(stored)
    except MALFORMED:
        return False
    config = decided.__struct_config__
    if not isinstance(said, dict) or said.get(config.tag_field or "") != config.tag:
        return False
    return _agree(decided, {key: value for key, value in said.items() if key not in WORDS})


def _agree(here: Any, there: Any) -> bool:  # noqa: ANN401 (whatever an event is made of, and JSON of it)
    if isinstance(here, msgspec.Struct):
        if here.__struct_config__.array_like:
            # Fields are added behind the others, so the shorter one is of the older release.
            return isinstance(there, list) and all(
                _agree(getattr(here, name), value) for name, value in zip(here.__struct_fields__, there, strict=False)
            )
        return isinstance(there, dict) and all(
            _agree(getattr(here, name), there[key])
            for name, key in zip(here.__struct_fields__, here.__struct_encode_fields__, strict=True)
            if key in there
        )
    if isinstance(here, tuple | list):
        return (
            isinstance(there, list)
            and len(here) == len(there)
            and all(_agree(one, other) for one, other in zip(here, there, strict=True))
        )
    return bool(msgspec.to_builtins(here) == there)
