"""vLLM in this process, from 0.32 on: an `AsyncLLM`, whose engine core and workers are processes that it starts. I/O.

The engine is made with the first load, of a folder with a `config.json`: its weights come from the hub alone. One that
has died, or no longer answers, is ended, and the next load makes another.

Always true:
- Weights are written only while the scheduler is paused. Pausing aborts what runs, as with a server.
- A request's prefix cache has the salt of the load that its version came by: no other version finds it.
- The engine's processes end with this one, also where it is killed (`tensorhub.integrations.vllm.register`).
"""

import asyncio
import os
import secrets
import shlex
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from tensorhub.integrations.vllm import BACKEND, ENDS_WITH
from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_common.runtime.extras import missing
from tensorhub_runner.servers.server import ServerBusy, ServerLost, Streamed, WeightSource
from tensorhub_runner.servers.vllm_sampling import REASONS, sampling_params

ANSWER_S_MAX: Final = 10.0
"""The bound of having it go on."""
STAND_STILL_S_MAX: Final = 30.0
"""The bound of ending all streams: a step of the engine may be under way."""
LOAD_S_MAX: Final = 600.0
"""The bound of each call that writes weights."""
SILENCE_S_MAX: Final = 120.0
"""A stream without a token for so long is begun again. It alone: the engine may have no room for it meanwhile."""
LOOK_S: Final = 0.5
"""It is looked so often whether the engine that is asked still lives: vLLM ends no question whose core has died."""
SHUTDOWN_S: Final = 2.0
"""So long its processes are given to end; then they are killed."""
STARTS_MAX: Final = 5
"""Limit of the engines in a row that could not be made: the options, or the machine, are at fault then."""
ERROR_CHARS_MAX: Final = 500

Made = TypeVar("Made")


class VllmInProcess:
    """One engine at a time."""

    def __init__(self, model: Path, options: str = "") -> None:
        """Look at the options. `model`: the folder. `options`: as `vllm serve` takes them.

        Imports vLLM, which takes seconds. Raises `InvalidSetting` where it is missing, or refuses the options.
        """
        # A fork of a process with threads may find their locks held for ever.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ[ENDS_WITH] = str(os.getpid())
        self._arguments = _parsed(model, options)
        self._engine: Any = None
        self._dtype = ""
        self._failed_starts = 0
        self._is_initialised = False
        self._salt = ""

    async def check(self) -> RunEngine:
        """Return what it is, made now if there is none. Raises `InvalidSetting` after too many that could not be."""
        if self._engine is not None and self._engine.errored:
            await self._end()
        if self._engine is None:
            await self._start()
        from vllm import __version__ as build  # noqa: PLC0415 (vLLM is imported only where it is used)

        return RunEngine("vllm", f"vllm {build}", self._dtype, is_exact=False)

    async def _start(self) -> None:
        try:
            self._engine = await _in_daemon(lambda: _made(self._arguments))
        except Exception as why:
            self._failed_starts += 1
            said = f"vLLM's engine can't be made of {self._arguments.model}: {_short(why)}"
            if self._failed_starts >= STARTS_MAX:
                raise InvalidSetting(
                    f"{said} ({STARTS_MAX} times in a row: see the log, and change the options)"
                ) from why
            raise ServerLost(said) from None
        self._failed_starts, self._is_initialised = 0, False
        self._dtype = str(self._engine.vllm_config.model_config.dtype).removeprefix("torch.")

    async def _end(self) -> None:
        """End the engine that is here, and its processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await _in_daemon(lambda: engine.shutdown(timeout=SHUTDOWN_S))

    async def is_healthy(self, version: int) -> bool:  # noqa: ARG002 (no one else can load another one)
        """Tell whether the engine lives."""
        return self._lives()

    async def generate(
        self, name: str, context: Sequence[int], sampling: Sampling, made: int
    ) -> AsyncGenerator[Streamed, None]:
        """Go on behind the context."""
        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415
        from vllm.exceptions import GracefulHTTPError, VLLMClientError  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        engine = self._engine
        if engine is None:
            raise ServerLost("there is no vLLM engine here just now")
        try:
            params = SamplingParams(**sampling_params(sampling, made), output_kind=RequestOutputKind.DELTA)
        except (VLLMClientError, ValueError) as why:
            raise BadPrompt(f"vLLM refuses the request: {_short(why)}") from None
        outputs = engine.generate(
            TokensPrompt(prompt_token_ids=list(context), cache_salt=self._salt),
            params,
            # A name that comes again, behind a move, is another request.
            f"{name}-{secrets.token_hex(4)}",
        )
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S_MAX):
                        output = await anext(outputs)
                except (StopAsyncIteration, TimeoutError):
                    # It is begun again, and the others go on.
                    return
                except GracefulHTTPError as why:
                    raise ServerBusy(f"vLLM takes no more requests: {_short(why)}") from None
                except VLLMClientError as why:
                    raise BadPrompt(f"vLLM refuses the request: {_short(why)}") from None
                except Exception as why:  # noqa: BLE001 (whatever else vLLM raises, this engine can't be trusted)
                    raise ServerLost(f"vLLM's engine has failed: {_short(why)}") from None
                yield _streamed(output.outputs[0])
        finally:
            # Closing it aborts the request, if that goes on.
            await outputs.aclose()

    async def stand_still(self) -> None:
        """End all streams, and make no token."""
        if self._engine is not None:
            await self._ask(lambda engine: engine.pause_generation(mode="abort"), STAND_STILL_S_MAX, "stand still")

    async def load(self, source: WeightSource, version: int) -> None:
        """Have the workers read a version into the model."""
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        # After a load that fails the workers find the hub anew, as those of a server.
        was_initialised, self._is_initialised = self._is_initialised, False
        if not was_initialised:
            place = {"job": source.job, "model": source.model, "replica": source.replica, "agent": source.agent}
            request = WeightTransferInitRequest(init_info=place)
            await self._ask(lambda engine: engine.init_weight_transfer_engine(request), LOAD_S_MAX, "find the hub")
        await self._start_update()
        update = WeightTransferUpdateRequest(update_info={"version": version})
        await self._ask(lambda engine: engine.update_weights(update), LOAD_S_MAX, "load a version")
        await self._ask(lambda engine: engine.finish_weight_update(str(version)), LOAD_S_MAX, "finish an update")
        self._is_initialised, self._salt = True, secrets.token_hex(8)

    async def _start_update(self) -> None:
        try:
            await self._ask(lambda engine: engine.start_weight_update(), LOAD_S_MAX, "start an update")
        except ServerLost:
            if not self._lives():
                raise
            # One of several workers has failed at a load before this one: the updates of the others are still open.
            # The backend has begun nothing that would have to be undone.
            await self._ask(lambda engine: engine.finish_weight_update(), LOAD_S_MAX, "finish an update")
            await self._ask(lambda engine: engine.start_weight_update(), LOAD_S_MAX, "start an update")

    async def go_on(self) -> None:
        """Make tokens again."""
        await self._ask(lambda engine: engine.resume_generation(), ANSWER_S_MAX, "go on")

    async def close(self) -> None:
        """End the engine and its processes."""
        await self._end()

    def _lives(self) -> bool:
        return self._engine is not None and not self._engine.errored

    async def _ask(self, question: Callable[[Any], Coroutine[Any, Any, None]], timeout_s: float, what: str) -> None:
        """Ask the engine. One that does not answer in time is ended."""
        if self._engine is None:
            raise ServerLost("there is no vLLM engine here just now")
        answer = asyncio.ensure_future(question(self._engine))
        try:
            async with asyncio.timeout(timeout_s):
                while not answer.done() and self._lives():
                    await asyncio.wait({answer}, timeout=LOOK_S)
                if answer.done():
                    return await answer
        except TimeoutError:
            # What it does later would come between what another load does.
            await self._end()
            raise ServerLost(f"vLLM's engine can't {what} within {timeout_s:.0f} s, and is ended") from None
        except Exception as why:  # noqa: BLE001 (a worker's error comes as a bare Exception)
            raise ServerLost(f"vLLM's engine can't {what}: {_short(why)}") from None
        finally:
            answer.cancel()
        raise ServerLost(f"vLLM's engine can't {what}: its core has died")


def _parsed(model: Path, options: str) -> Any:  # noqa: ANN401 (vLLM has no types here)
    """Return the engine's arguments. Raises `InvalidSetting`."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    except ModuleNotFoundError as why:
        raise InvalidSetting(
            missing("engine vllm in process", [str(why.name)], "vllm").replace(
                "'tensorhub[vllm]'", "vllm 'tensorhub[vllm]'"
            )
        ) from None

    def refuse(said: str) -> None:
        raise InvalidSetting(f"TENSORHUB_RUNNER_VLLM_ARGS can't be used: {said}")

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    # argparse ends the process otherwise.
    parser.error = refuse
    try:
        arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *shlex.split(options)]))
        arguments.model = str(model)
        # Nothing is made before the first version is in the model, and all come and go as tokens.
        arguments.load_format, arguments.skip_tokenizer_init = "dummy", True
        arguments.logprobs_mode, arguments.disable_log_stats = "processed_logprobs", True
        arguments.weight_transfer_config = _transfer_config()
        # Finds out here what does not go together, before an engine is begun.
        arguments.create_engine_config()
    except (ValueError, TypeError, OSError, NotImplementedError) as why:
        refuse(_short(why))
    return arguments


def _transfer_config() -> Any:  # noqa: ANN401
    from vllm.config import WeightTransferConfig  # noqa: PLC0415

    return WeightTransferConfig(backend=BACKEND)


def _made(arguments: Any) -> Any:  # noqa: ANN401
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    return AsyncLLM.from_engine_args(arguments)


def _streamed(output: Any) -> Streamed:  # noqa: ANN401
    tokens, given = tuple(output.token_ids), output.logprobs or ()
    if len(given) != len(tokens):
        raise ServerLost(f"vLLM gives {len(tokens)} tokens with {len(given)} log-probabilities")
    reason = output.finish_reason
    if reason is not None and reason not in REASONS:
        raise ServerLost(f"vLLM ends a response as {reason!r:.40}")
    logprobs = tuple(float(each[token].logprob) for token, each in zip(tokens, given, strict=True))
    versions = tuple(each.version for each in output.weight_versions or ())
    return Streamed(tokens, logprobs, None if reason is None else REASONS[reason], versions)


async def _in_daemon(work: Callable[[], Made]) -> Made:
    """Do work that blocks in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Made] = loop.create_future()

    def settle(made: Made | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(made)  # type: ignore[arg-type]  # one of the two is there

    def run() -> None:
        made, error = None, None
        try:
            made = work()
        except Exception as why:  # noqa: BLE001 (it is raised where it is waited for)
            error = why
        try:
            loop.call_soon_threadsafe(settle, made, error)
        except RuntimeError:
            """The loop has ended meanwhile, and the process with it."""

    threading.Thread(target=run, name="vllm-engine", daemon=True).start()
    return await done


def _short(why: BaseException) -> str:
    return (str(why) or type(why).__name__)[:ERROR_CHARS_MAX]
