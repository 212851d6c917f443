"""Which names may stand in a NATS subject.

Jobs, models, replicas, agents and sites appear as subject tokens, so anything but letters, digits, `_` and `-` is
refused before it reaches NATS. Names that begin with `_` are the hub's own.
"""

import re
from typing import Final

from tensorhub_common.errors import InvalidName

NAME_CHARS_MAX: Final = 64
_CACHE: Final = re.compile(r"_cache-(0|[1-9][0-9]{0,15})-[0-9]{1,20}", re.ASCII)
_NAME: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{NAME_CHARS_MAX}}}", re.ASCII)


def is_name(text: object) -> bool:
    """Tell whether `text` may stand in a subject, the hub's own names included."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def cache_name(version: int, seq: int) -> str:
    """Return the name of the cache replica of a version that was placed by the command at `seq`: used once."""
    return f"_cache-{version}-{seq}"


def cached_version(replica: str) -> int | None:
    """Return the version that a cache replica is for, or None for any other replica."""
    found = _CACHE.fullmatch(replica)
    return None if found is None else int(found[1])


def check_name(what: str, text: object) -> str:
    """Return `text` if users may call a `what` ("model", "replica") so; raise `InvalidName` otherwise."""
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        raise InvalidName(
            f"{what} name {text!r:.80} can't be used: take 1 to {NAME_CHARS_MAX} letters, digits, '_' or '-'"
        )
    if text.startswith("_"):
        raise InvalidName(f"{what} name {text!r} begins with '_', which is kept for the hub itself: choose another")
    return text
