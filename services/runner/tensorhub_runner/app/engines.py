"""Makes the engine that the settings name: one of this package, a server, or one of the user's own."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tensorhub.mapping import LEFT_OUT, Mapping, Rule
from tensorhub_common.config.settings import InvalidSetting, Settings
from tensorhub_runner.engines.engine import Engine
from tensorhub_runner.servers.server import Server

if TYPE_CHECKING:
    import torch


_SERVERS: Final = {"vllm": ("vllm", "VllmServer"), "sglang": ("sglang", "SglangServer")}
"""Engines that are servers: the module of each in `servers`, and its class there."""


class LoadedEngine(NamedTuple):
    """An engine, and the module that it computes with: its parameters become memory of the hub."""

    engine: Engine
    module: "torch.nn.Module"
    computed: frozenset[str] = frozenset()
    """The buffers that the module has computed by itself, by every name: a version may lack them."""

    def mapping(self, sent: Collection[str]) -> Mapping | None:
        """Return what leaves those out of the module that a version of these tensors lacks; None: it has all."""
        own = sorted(self.computed.difference(sent))
        rules = tuple(Rule(each, LEFT_OUT) for each in own)
        return Mapping("what a version lacks and the engine computes", rules, unknown="keep") if own else None


def server_of(settings: Settings) -> Server | None:
    """Return the server that generates; None where the engine is to be loaded into this process.

    vLLM without an address is made in this process; to import it takes seconds. Raises `InvalidSetting` where the
    settings don't go together.
    """
    name = settings.runner_engine
    if name not in _SERVERS:
        return None
    if name == "vllm" and not settings.runner_url:
        return _vllm_in_process(settings)
    if settings.runner_vllm_args:
        raise InvalidSetting("TENSORHUB_RUNNER_VLLM_ARGS is for vLLM in process: give the server its own options")
    if not settings.runner_url:
        raise InvalidSetting(f"TENSORHUB_RUNNER_URL is not set: name the {name} server, as in http://127.0.0.1:8000")
    _refuse_mapped(settings)
    module, kind = _SERVERS[name]
    try:
        server = getattr(import_module(f"tensorhub_runner.servers.{module}"), kind)
    except ModuleNotFoundError as why:  # aiohttp comes with the extra of the server's name.
        raise InvalidSetting(
            f"engine {name} needs {why.name}, which is not installed here: pip install 'tensorhub[{name}]'"
        ) from None
    model = "" if settings.runner_model is None else str(settings.runner_model)
    return cast("Callable[[str, str], Server]", server)(settings.runner_url, model)


def _vllm_in_process(settings: Settings) -> Server:
    from tensorhub_runner.servers.vllm_in_process import VllmInProcess  # noqa: PLC0415 (it imports vLLM)

    _refuse_mapped(settings)
    model = settings.runner_model
    if model is None:
        raise InvalidSetting(
            "neither TENSORHUB_RUNNER_URL nor TENSORHUB_RUNNER_MODEL is set: name the vLLM server, as in "
            "http://127.0.0.1:8000, or the folder with the config.json of the model, for vLLM in the runner's process"
        )
    if not (model / "config.json").is_file():
        raise InvalidSetting(f"TENSORHUB_RUNNER_MODEL can't be used: no config.json in {model}")
    return VllmInProcess(model.absolute(), settings.runner_vllm_args)


def _refuse_mapped(settings: Settings) -> None:
    if settings.runner_install == "mapped":
        raise InvalidSetting(
            "TENSORHUB_RUNNER_INSTALL is mapped, and a server has weights of its own: leave it at staged"
        )


def load_engine(settings: Settings) -> LoadedEngine:
    """Make the engine: "torch", or `module:function` of a function that takes the settings and returns a LoadedEngine.

    Raises `InvalidSetting` for any other, and where the module can't be imported.
    """
    name = settings.runner_engine
    if name in _SERVERS:
        raise InvalidSetting(f"engine {name} is a server, which generates and does not score: take torch")
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
    from tensorhub_runner.engines.models import build, computed_buffers  # noqa: PLC0415 (torch and transformers take seconds)
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
    engine = TorchEngine(model, is_exact=settings.runner_exact, limits=limits)
    return LoadedEngine(engine, model, computed_buffers(model))
