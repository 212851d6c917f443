"""What callers of the SDK may pass, checked before anything travels.

A mistake in a call is raised at once and by its own name, with nothing changed: the wrong kind of value is a
`TypeError` or `ValueError`, and what the hub would refuse is the error that the hub would raise.
"""

import math
import operator
from collections.abc import Collection, Sequence
from contextlib import suppress
from numbers import Real
from typing import Final, Literal, SupportsIndex, cast, get_args

from tensorhub.mapping import Mapping
from tensorhub_common.errors import (
    InvalidName,
    LayoutMismatch,
    RetentionFull,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.protocol.log.commands import RETAINED_MAX, SHARDS_MAX, VERSION_MAX
from tensorhub_common.protocol.subjects import check_name

Install = Literal["in-place", "staged", "mapped"]
"""How a read changes what the tensors show: in their own memory, beside it, or by showing a holder's of this host."""

Resume = Literal["memory", "values"]
"""Which counts where a shard is found with other values than the given ones."""


NAMES_MAX: Final = 3
"""An error names this many tensors, and counts the rest."""


TIMEOUT_S_MAX: Final = 7 * 24 * 3600.0
"""No call waits longer than a week."""

SHOWN_BITS_MAX: Final = 128
"""An error writes out numbers up to this size: Python refuses to write out those of thousands of digits."""

SEQ_MAX: Final = 2**53 - 1
"""No log has more entries."""

MEMORIES: Final = ("host", "device")
GPU_PREFIX: Final = "GPU-"
"""How the UUID of a GPU begins."""

INSTALLS: Final[tuple[Install, ...]] = get_args(Install)
RESUMES: Final[tuple[Resume, ...]] = get_args(Resume)


def shown(value: object) -> str:
    """Return a value as an error names it, in short."""
    if isinstance(value, int) and value.bit_length() > SHOWN_BITS_MAX:
        return f"a number of {value.bit_length()} bits"
    try:
        return f"{value!r:.80}"
    except Exception:  # noqa: BLE001 (a repr of the caller's may do anything)
        return f"a {type(value).__qualname__}"


def seconds(what: str, value: object) -> float:
    """Return a bound in seconds: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} is a number of seconds; got {shown(value)}")
    if not 0 <= cast("float", value) <= TIMEOUT_S_MAX:
        raise ValueError(f"{what} is {shown(value)}; give a number of seconds from 0 to {TIMEOUT_S_MAX:g}")
    return float(value)


def patience(value: object, timeout_s: float) -> float:
    """Return how long to wait for something newer: at most the call's own bound."""
    is_endless = isinstance(value, float) and value == math.inf
    return timeout_s if is_endless else min(seconds("wait_s", value), timeout_s)


def whole(what: str, value: object) -> int:
    """Return a whole number, given as an int or anything that converts to one, such as numpy's integers."""
    if not isinstance(value, bool):
        # torch's tensors say in several ways that they are no whole number.
        with suppress(TypeError, ValueError, RuntimeError):
            return operator.index(cast("SupportsIndex", value))
    raise TypeError(f"{what} is a whole number; got {shown(value)}")


def flag(what: str, value: object) -> bool:
    """Return a choice between two. Text is refused: "no" would count as yes."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} is True or False; got {shown(value)}")
    return value


def function(what: str, value: object) -> None:
    """Check that what is called back can be called, if it is given."""
    if value is not None and not callable(value):
        raise TypeError(f"{what} is a function, or None; got {shown(value)}")


def lock(value: object, *, is_async: bool) -> None:
    """Check that `swap_under` can be entered, if it is given: after a read it would be too late."""
    kind = "an asynchronous context manager" if is_async else "a context manager"
    names = ("__aenter__", "__aexit__") if is_async else ("__enter__", "__exit__")
    if value is not None and not all(hasattr(type(value), name) for name in names):
        raise TypeError(f"swap_under is {kind}, such as a lock, or None; got {shown(value)}")


def retained(value: object) -> int:
    """Return how many versions to keep."""
    last = whole("last", value)
    if not 0 <= last <= RETAINED_MAX:
        raise RetentionFull(f"{shown(last)} versions can't be retained: take 0 (none) to {RETAINED_MAX}")
    return last


def known_version(what: str, value: object) -> int:
    """Return the number of a version that is there already."""
    return _version(value, VersionUnavailable, what)


def published_version(value: object) -> int | None:
    """Return the version to publish; None means the last published one and one more."""
    return None if value is None else _version(value, VersionConflict)


def overwriting(version: object, *, publish: bool) -> None:
    """Check what is to be published after an overwrite: a mistake must be raised before anything is unpublished."""
    if not isinstance(publish, bool):
        raise TypeError(f"publish is True or False; got {shown(publish)}. A number is given as version=…")
    if version is not None and not publish:
        raise ValueError(f"version={shown(version)} is given without publish=True: nothing would be published")
    published_version(version)


def wanted_version(value: object) -> int | Literal["latest"]:
    """Return the version to replicate."""
    if isinstance(value, str):
        if value == "latest":
            return "latest"
        raise TypeError(f"a version is a whole number or 'latest'; got {shown(value)}")
    return _version(value, VersionUnavailable)


def _version(value: object, error: type[TensorHubError], what: str = "a version") -> int:
    version = whole(what, value)
    if not 0 <= version <= VERSION_MAX:
        raise error(f"version {shown(version)} is out of range: take 0 to {VERSION_MAX}")
    return version


def shard_of(shard: object, shards: object) -> tuple[int, int]:
    """Return a shard's number and how many there are. Raises `LayoutMismatch` when the number is out of range."""
    number, count = whole("shard", shard), whole("shards", shards)
    if not 1 <= count <= SHARDS_MAX:
        raise LayoutMismatch(f"a replica of {shown(count)} shards is not possible: give shards from 1 to {SHARDS_MAX}")
    if not 0 <= number < count:
        raise LayoutMismatch(f"shard {shown(number)} is out of range: with shards={count} give 0 to {count - 1}")
    return number, count


def seen(value: object) -> int | None:
    """Return the place in the log after which to go on, or None for its beginning."""
    if value is None:
        return None
    seq = whole("after", value)
    if not 0 <= seq <= SEQ_MAX:
        raise ValueError(f"after is {shown(seq)}; give the seq of an event, 0 to {SEQ_MAX}, or None for all of them")
    return seq


def kinds(value: object, possible: Collection[str]) -> frozenset[str] | None:
    """Return the kinds of events to tell of. One that there isn't would be waited for for ever."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Collection):
        raise TypeError(f"kinds is a collection of kinds, as in kinds=('version.published',); got {shown(value)}")
    if unknown := [each for each in value if not isinstance(each, str) or each not in possible]:
        raise ValueError(f"there are no events of kind {shown(unknown[0])}; possible are {', '.join(sorted(possible))}")
    return frozenset(value)


def name(what: str, value: object) -> str:
    """Return the name of a job, a model or a replica, if it is valid in a subject."""
    if not isinstance(value, str):
        raise InvalidName(f"a {what} name is text; got {shown(value)}")
    return check_name(what, value)


def text(what: str, value: object) -> None:
    """Check that what names something is text, if it is given."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} is text; got {shown(value)}")


def install(value: object) -> Install:
    """Return how weights are to be installed."""
    if isinstance(value, str) and value in INSTALLS:
        return value
    raise ValueError(f"install is {shown(value)}; possible are {', '.join(map(repr, INSTALLS))}")


def memory(value: object) -> str:
    """Return where hub memory is to be: "host", "device", or the UUID of a GPU."""
    if isinstance(value, str) and (value in MEMORIES or value.startswith(GPU_PREFIX)):
        return value
    raise ValueError(
        f"memory is {shown(value)}; possible are {', '.join(map(repr, MEMORIES))}, or the UUID of a GPU, "
        f"'{GPU_PREFIX}…', as nvidia-smi -L shows it"
    )


def resume(value: object) -> Resume | None:
    """Return which counts where the hub holds other values than the given ones; None leaves it open."""
    if value is None or (isinstance(value, str) and value in RESUMES):
        return value
    raise ValueError(f"resume is {shown(value)}; possible are None, {', '.join(map(repr, RESUMES))}")


def mapping(value: object) -> Mapping | None:
    """Return the mapping of names, if there is one."""
    if value is None or isinstance(value, Mapping):
        return value
    raise TypeError(
        f"mapping is a tensorhub.mapping.Mapping, as mapping.llama(config, tp_size=2, tp_rank=0) makes it; got "
        f"{shown(value)}"
    )


def listed(names: Sequence[str], count: int | None = None) -> str:
    """Return the first names, and how many more there are; `count`: how many there are, if not all are given."""
    more = (len(names) if count is None else count) - NAMES_MAX
    shown = ", ".join(map(repr, names[:NAMES_MAX]))
    return f"{shown} and {more} more" if more > 0 else shown
