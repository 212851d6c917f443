"""How a sync method is made of an async one."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tensorhub.sync.loop_thread import LoopThread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HasTwin(Protocol):
    """An object of the sync SDK: its twin of the async SDK, and the thread whose event loop that belongs to."""

    _background: LoopThread
    _twin: Any


def blocking(
    method: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Return the method that waits for `method` of the twin, with its signature, types and docstring."""

    @wraps(method)
    def call(this: HasTwin, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return this._background.run(method(this._twin, *args, **kwargs))  # noqa: SLF001 (a method of its class)

    return call
