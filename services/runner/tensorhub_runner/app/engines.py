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
        return _torch_engine(settings)
    module, _, function = name.partition(":")
    if not function:
        raise InvalidSetting(f"there is no engine {name!r}: take torch, or your own as module:function")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as why:
        raise InvalidSetting(f"engine {name!r} can't be loaded: {why}") from None
    return cast("Callable[[Settings], LoadedEngine]", make)(settings)


def _torch_engine(settings: Settings) -> LoadedEngine:
    """Make the torch engine of a model whose values come from the hub."""
    from tensorhub_runner.engines.models import build  # noqa: PLC0415 (torch and transformers take seconds)
    from tensorhub_runner.engines.schedule import EngineLimits  # noqa: PLC0415
    from tensorhub_runner.engines.torch_engine import TorchEngine  # noqa: PLC0415

    if settings.runner_model is None:
        raise InvalidSetting("TENSORHUB_RUNNER_MODEL is not set: name the folder with the config.json of the model")
    try:
        model = build(settings.runner_model)
    except ValueError as why:
        raise InvalidSetting(f"TENSORHUB_RUNNER_MODEL can't be used: {why}") from None
    if settings.runner_exact and settings.runner_device != "cpu":
        raise InvalidSetting(
            f"TENSORHUB_RUNNER_DEVICE is {settings.runner_device}, and the torch engine is exact on CPUs alone: set "
            "TENSORHUB_RUNNER_EXACT=off"
        )
    try:
        model.to(settings.runner_device)
    except (AssertionError, RuntimeError) as why:  # Torch raises either, as it was built or as the machine is.
        raise InvalidSetting(f"TENSORHUB_RUNNER_DEVICE={settings.runner_device} can't be used: {why}") from None
    limits = EngineLimits(slots=settings.runner_slots)
    return LoadedEngine(TorchEngine(model, is_exact=settings.runner_exact, limits=limits), model)
