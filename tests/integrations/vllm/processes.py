"""vLLM servers as processes, and runners beside them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
from tests.kit.hubs import RunningHub
from tests.kit.waiting import until

START_S: Final = 600.0
"""A server starts three processes, of which each imports torch and vLLM."""
CONTEXT: Final = 512
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class ServerProcess(Protocol):
    """A server of any kind."""

    @property
    def url(self) -> str: ...


@dataclass
class VllmProcess:
    """One server, which may be killed and started again."""

    model: Path
    port: int
    log: Path
    options: Sequence[str] = ()
    speaks: Sequence[str] = ("--skip-tokenizer-init", "--tokens-only")
    """Tokens alone; with `--enable-scale-out` text too."""
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # `vllm serve` asks for the version of a package `vllm`, which this build has under another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(CONTEXT), *self.speaks]
        command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "tensorhub"}']
        command += self.options
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    async def ready(self) -> None:
        async def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(OSError, aiohttp.ClientError):
                return bool((await self.ask("GET", "/health", answer="status")) == 200)
            return False

        await until(answers, f"the server at {self.url} answers", START_S)

    def kill(self) -> None:
        """Kill all of its processes, as a machine that goes does."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def ask(self, method: str, path: str, body: object = None, answer: str = "json") -> Any:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body) as got:
            return got.status if answer == "status" else await got.json()

    async def version(self) -> str:
        return str((await self.ask("GET", "/weight_info"))["weight_version"])

    async def forget(self) -> None:
        """Have it say no number of a version: another job begins with the same ones."""
        await self.ask("POST", "/start_weight_update", answer="status")
        await self.ask("POST", "/finish_weight_update", {"weight_version": "none"}, answer="status")
        assert await self.version() == "none"

    async def holds(self, version: int) -> None:
        """Wait until it has this version."""

        async def is_so() -> bool:
            return await self.version() == str(version)

        await until(is_so, f"the server at {self.url} has version {version}", START_S)

    async def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling}
        made: list[int] = (await self.ask("POST", "/inference/v1/generate", body))["choices"][0]["token_ids"]
        return made


@asynccontextmanager
async def runner_beside(
    server: "ServerProcess", hub: RunningHub, job: str, name: str, agent: int, engine: str = "vllm"
) -> AsyncIterator[int]:
    """Run `tensorhub runner` at an agent; yield its process."""
    command = [sys.executable, "-m", "tensorhub_launcher", "runner", "--engine", engine, "--url", server.url]
    command += ["--replica", name, "--agent", hub.file.agents[agent].socket, "--dir", str(hub.directory)]
    with (hub.directory / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 (it starts at once)
            [*command, "--job", job], env=hub.environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
