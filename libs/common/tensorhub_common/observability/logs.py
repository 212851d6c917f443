"""How every module logs: `logger(__name__)` binds fields, and writes by way of `logging`.

Using a logger configures nothing: in a trainer our lines go to its own handlers, as text. A program's `main` says where
its lines go (`telemetry/log_output.py`). Structlog is imported with the first line: it takes as long as the rest of the
SDK.
"""

import logging
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

REQUEST_HEADERS: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("answering", default=None)
"""The headers of the question that is being answered; read only where a line is logged meanwhile."""


class FieldsMessage:
    """A log message with its fields. A formatter that doesn't know it writes it as `event key=value …`."""

    __slots__ = ("fields",)

    def __init__(self, fields: MutableMapping[str, Any]) -> None:
        self.fields = fields

    def __str__(self) -> str:
        rest = (f"{key}={value!r}" for key, value in self.fields.items() if key != "event")
        return " ".join((str(self.fields.get("event", "")), *rest))


def _hand_over(_: object, __: str, fields: MutableMapping[str, Any]) -> tuple[tuple[FieldsMessage], dict[str, Any]]:
    """End a chain of processors: pass the fields on to `logging` as one message."""
    passed = {key: fields.pop(key) for key in ("exc_info", "stack_info") if key in fields}
    return (FieldsMessage(fields),), passed


class _LazyLogger:
    """Makes the logger when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _made(self) -> "BoundLogger":
        import structlog  # noqa: PLC0415 (see the module's docstring)

        processors = (
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.PositionalArgumentsFormatter(),
            _hand_over,
        )
        made = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=processors,
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        )
        return cast("BoundLogger", made)

    def __getattr__(self, name: str) -> object:
        return getattr(self._made, name)


def logger(name: str) -> "BoundLogger":
    """Return a module's logger (`logger(__name__)`)."""
    return cast("BoundLogger", _LazyLogger(name))
