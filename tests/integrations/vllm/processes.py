"""vLLM servers as processes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from tests.integrations.servers import ServerProcess
from tests.kit.waiting import until

START_S: Final = 600.0
"""A server starts three processes, of which each imports torch and vLLM."""
CONTEXT: Final = 512
STEP_TOKENS: Final = 16 * CONTEXT
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class VllmProcess(ServerProcess):
    """One server of vLLM."""

    health: ClassVar[str] = "/health"
    start_s: ClassVar[float] = START_S

    options: Sequence[str] = ()
    speaks: Sequence[str] = ("--skip-tokenizer-init", "--tokens-only")
    """Tokens alone; with `--enable-scale-out` text too."""

    def command(self) -> list[str]:
        # `vllm serve` asks for the version of a package `vllm`, which this build has under another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        # A step takes all prompts whole: vLLM's worker for CPUs fails where it cuts one of a seeded request.
        command += ["--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(STEP_TOKENS), *self.speaks]
        command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "tensorhub"}']
        return [*command, *self.options]

    def environment(self) -> Mapping[str, str]:
        return ENVIRONMENT

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
