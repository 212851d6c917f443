"""Makes the engine that the settings name: one of this package, or one of the user's own."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from tensorhub_common.config.settings import InvalidSetting, Settings
from tensorhub_runner.engines.engine import Engine

if TYPE_CHECKING:
    import torch


class LoadedEngine(NamedTuple):
    """An engine, and the module that it computes with: its parameters become memory of the hub."""

    engine: Engine
    module: "torch.nn.Module"


def load_engine(settings: Settings) -> LoadedEngine:
    """Make the engine: "torch", or `module:function` of a function that takes the settings and returns a LoadedEngine.

    Raises `InvalidSetting` for any other, and where the module can't be imported.
    """
    name = settings.runner_engine
    if name == "torch":
        from tensorhub_runner.engines.torch_engine import load_torch_engine  # noqa: PLC0415 (torch takes a second)

        return LoadedEngine(*load_torch_engine(settings))
    module, _, function = name.partition(":")
    if not function:
        raise InvalidSetting(f"there is no engine {name!r}: take torch, or your own as module:function")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as why:
        raise InvalidSetting(f"engine {name!r} can't be loaded: {why}") from None
    return cast("Callable[[Settings], LoadedEngine]", make)(settings)
