"""`tensorhub runner`: an engine that generates for a job's rollouts, until Ctrl-C."""

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from tensorhub._control.discovery import find_nats, read_hub_file
from tensorhub.cli import options
from tensorhub.cli.runner import job_of, need, settings_of
from tensorhub.local.directory import HubDirectory
from tensorhub.local.keyring import Keyring
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.config import parsers
from tensorhub_common.config.settings import Settings

_SERVERS: Final = ("vllm", "sglang")
_IN_PROCESS: Final = "vllm"
"""The engine of others that the runner makes in its own process where no server is named."""


def runner(
    *,
    engine: Annotated[
        str, typer.Option(help="torch, vllm, sglang, or your own as module:function.", metavar="E")
    ] = "torch",
    model: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model's config.json; for a server, the name that it serves.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="The server that generates, on this host: http://127.0.0.1:8000.", show_default=False)
    ] = "",
    engine_args: Annotated[
        str,
        typer.Option(
            help="vLLM's own options, without --url: '--tensor-parallel-size 2'.", metavar="ARGS", show_default=False
        ),
    ] = "",
    hub_model: Annotated[
        str, typer.Option(help="The model of the hub whose versions it loads.", parser=options.name_of("model"))
    ] = "policy",
    replica: Annotated[
        str | None,
        typer.Option(
            help="Its name, and that of its replica.", parser=options.name_of("runner"), show_default="HOST-runner"
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Its machine may vanish; SIGUSR1 announces it.")] = False,
    mapped: Annotated[bool, typer.Option("--mapped", help="Use a holder's memory on this host.")] = False,
    slots: Annotated[
        int, typer.Option(help="How many requests run at once.", parser=options.whole(1, 4096), metavar="N")
    ] = 16,
    device: Annotated[
        str, typer.Option(help="What the torch engine computes on: cpu, cuda, or cuda:N.", metavar="D")
    ] = "cpu",
    exact: Annotated[
        bool, typer.Option("--exact/--fast", help="The same tokens in any batch, or all requests at once.")
    ] = True,
    job: options.Job = None,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Run an engine that generates for a job's rollouts. It follows the versions of its model."""
    address_of_server = _server(engine, url, mapped=mapped)
    _check_in_process(engine, url, model, engine_args)
    if engine == "torch":
        if model is None:
            raise typer.BadParameter("the torch engine needs a model, as in --model ./my-model", param_hint="--model")
        if not (model / "config.json").is_file():
            raise typer.BadParameter(f"there is no config.json in {model}", param_hint="--model")
        need("the torch engine", "torch", "transformers", extra="engine-torch")
    try:
        device = parsers.device(device)
    except ValueError as why:
        raise typer.BadParameter(f"{device!r} {why}", param_hint="--device") from None
    if exact and device != "cpu" and engine not in _SERVERS:
        raise typer.BadParameter("the torch engine is exact on CPUs alone: add --fast", param_hint="--device")
    settings = settings_of(directory)
    name = replica or settings.runner_id
    address = find_nats(nats, settings)
    credentials = settings.credentials or _own_key(settings, name)
    environment = os.environ | {
        "TENSORHUB_NATS": address.url,
        "TENSORHUB_DIR": str(settings.dir.absolute()),
        "TENSORHUB_JOB": job_of(job, settings),
        "TENSORHUB_RUNNER_ID": name,
        "TENSORHUB_RUNNER_ENGINE": engine,
        "TENSORHUB_RUNNER_MODEL": _model(engine, url, model),
        "TENSORHUB_RUNNER_URL": address_of_server,
        "TENSORHUB_RUNNER_VLLM_ARGS": engine_args,
        "TENSORHUB_RUNNER_HUB_MODEL": hub_model,
        "TENSORHUB_RUNNER_SPOT": "on" if spot else "off",
        "TENSORHUB_RUNNER_INSTALL": "mapped" if mapped else "staged",
        "TENSORHUB_RUNNER_SLOTS": str(slots),
        "TENSORHUB_RUNNER_DEVICE": device,
        "TENSORHUB_RUNNER_EXACT": "on" if exact else "off",
    }
    if agent is not None:
        environment["TENSORHUB_AGENT"] = agent
    if credentials is not None:
        environment["TENSORHUB_CREDENTIALS"] = str(credentials)
    # -P, as for the processes of `up`: what is in the working directory must not shadow what the runner imports.
    os.execve(sys.executable, (sys.executable, "-P", "-m", "tensorhub_runner"), environment)  # noqa: S606 (no shell)


def _server(engine: str, url: str, *, mapped: bool) -> str:
    """Return the address of the engine's server, or nothing where it has none. Raises `BadParameter`."""
    if engine not in _SERVERS:
        if url:
            raise typer.BadParameter(f"engine {engine} is no server: leave --url out", param_hint="--url")
        return ""
    if mapped:
        raise typer.BadParameter("a server has weights of its own: leave --mapped out", param_hint="--mapped")
    if not url:
        if engine == _IN_PROCESS:
            return ""
        raise typer.BadParameter(f"engine {engine} needs --url, as in --url http://127.0.0.1:8000", param_hint="--url")
    need(f"engine {engine}", "aiohttp", extra=engine)
    try:
        return parsers.loopback_url(url)
    except ValueError as why:
        raise typer.BadParameter(f"{url!r} {why}", param_hint="--url") from None


def _check_in_process(engine: str, url: str, model: Path | None, engine_args: str) -> None:
    """Raise `BadParameter` unless there is what an engine of others in the runner's process needs, if it is one."""
    if engine != _IN_PROCESS or url:
        if engine_args:
            raise typer.BadParameter("it is for vLLM without --url: leave it out", param_hint="--engine-args")
        return
    if model is None:
        raise typer.BadParameter(
            f"engine {engine} needs --url, as in --url http://127.0.0.1:8000, or --model ./my-model to run in process",
            param_hint="--url",
        )
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"there is no config.json in {model}", param_hint="--model")
    if find_spec("vllm") is None:
        raise typer.BadParameter(
            "vLLM is not installed here: pip install vllm 'tensorhub[vllm]', or name a server with --url",
            param_hint="--engine",
        )


def _model(engine: str, url: str, model: Path | None) -> str:
    """Return the folder of a model, or the name under which a server has it."""
    if model is None:
        return ""
    return str(model) if engine in _SERVERS and url else str(model.absolute())


def _own_key(settings: Settings, name: str) -> Path | None:
    """Return the runner's key in the hub that `tensorhub up` runs here, made now and told to its NATS if it is new."""
    hub = read_hub_file(settings.dir)
    if hub is None:
        return None
    keyring, user = Keyring(HubDirectory(settings.dir).credentials), User(Role.RUNNER, name)
    path = keyring.path_of(user)
    if not path.exists():
        keyring.make([user])
        for node in hub.nats_nodes:
            with suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGHUP)
    return path
