"""A vLLM server, from 0.32 on: tokens in and out by `/inference/v1/generate`, weights by its control endpoints. I/O.

The server runs with `--tokens-only`, `--logprobs-mode processed_logprobs`, `VLLM_SERVER_DEV_MODE=1`, and the backend of
`tensorhub.integrations.vllm`. Its control endpoints have no authentication, so only a loopback address is taken.

Always true:
- Weights are written only while the scheduler is paused. Pausing aborts what runs: each stream ends with all tokens
  that were made, so that it is known which tokens the version before has made. What goes on is computed anew.
- A request's prefix cache has the salt of the load that its version came by: no other version finds it.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec

from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_runner.servers.http import ANSWER_S_MAX, ERROR_CHARS_MAX, LOAD_S_MAX, STAND_STILL_S_MAX, HttpServer
from tensorhub_runner.servers.server import ServerLost, ServerUnfit, Streamed, WeightSource
from tensorhub_runner.servers.vllm_sampling import REASONS, sampling_params

CONFIG_S_MAX: Final = 120.0
"""The bound of the question for its configuration: vLLM looks at all packages of the machine before it answers."""


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_events: Final = msgspec.json.Decoder(_Event)


class VllmServer(HttpServer):
    """One server."""

    kind = "vLLM"
    options = "VLLM_SERVER_DEV_MODE=1 and --tokens-only"
    health = "/health"
    weights = "/weight_info"

    def __init__(self, url: str, model: str = "") -> None:
        """Prepare. `url`: of its root, on this host. `model`: the name under which it has its model; empty: any."""
        super().__init__(url, model)
        self._salt = secrets.token_hex(8)
        self._facts: RunEngine | None = None
        """Of the process that answers; None: it is not known whether that is still the same."""
        self._is_initialised = False

    async def check(self) -> RunEngine:
        """Return what it is. Asked of the server once for each time that it is connected to."""
        if self._facts is None:
            self._facts = await self._asked_facts()
        return self._facts

    async def _asked_facts(self) -> RunEngine:
        build = (await self._get("/version"))["version"]
        config = (await self._get("/server_info?config_format=json", CONFIG_S_MAX))["vllm_config"]
        model = config["model_config"]
        mode = model.get("logprobs_mode")
        if mode != "processed_logprobs":
            raise ServerUnfit(
                f"the vLLM server at {self.url} gives {mode}: start it with --logprobs-mode processed_logprobs, since "
                "trainers weigh by the distribution that a token was drawn from"
            )
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend != "tensorhub":
            raise ServerUnfit(
                f"the vLLM server at {self.url} has weight-transfer backend {backend}: start it with "
                """--weight-transfer-config '{"backend": "tensorhub"}'"""
            )
        served = [each["id"] for each in (await self._get("/v1/models"))["data"]]
        if self._model and self._model not in served:
            raise ServerUnfit(f"the vLLM server at {self.url} has {', '.join(served)}, and not {self._model}")
        dtype = str(model.get("dtype", "")).removeprefix("torch.")
        return RunEngine("vllm", f"vllm {build}", dtype, is_exact=False)

    async def generate(
        self, name: str, context: Sequence[int], sampling: Sampling, made: int
    ) -> AsyncGenerator[Streamed, None]:
        """Go on behind the context."""
        request = {
            # A name that comes again, behind a move, is another request.
            "request_id": f"{name}-{secrets.token_hex(4)}",
            "token_ids": context,
            "sampling_params": sampling_params(sampling, made),
            "stream": True,
            "cache_salt": self._salt,
        }
        async with aclosing(self._events("/inference/v1/generate", request)) as events:
            async for event in events:
                yield self._streamed(event)

    def _streamed(self, data: bytes) -> Streamed:
        try:
            event = _events.decode(data)
        except msgspec.DecodeError as why:
            raise self._lost(f"says what is no event of a stream: {why}") from None
        if event.error is not None or not event.choices:
            raise self._lost(f"has failed: {str(event.error)[:ERROR_CHARS_MAX]}")
        choice = event.choices[0]
        tokens = tuple(choice.token_ids or ())
        content = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if len(content) != len(tokens):
            raise self._lost(f"gives {len(tokens)} tokens with {len(content)} log-probabilities")
        reason = choice.finish_reason
        if reason is not None and reason not in REASONS:
            raise self._lost(f"ends a response as {reason!r:.40}")
        return Streamed(
            tokens,
            tuple(each.logprob for each in content),
            None if reason is None else REASONS[reason],
            tuple(each.version for each in choice.weight_versions or ()),
        )

    async def stand_still(self) -> None:
        """End all streams, and make no token."""
        await self._post("/pause?mode=abort", STAND_STILL_S_MAX)

    async def load(self, source: WeightSource, version: int) -> None:
        """Have the workers read a version into the model."""
        if not self._is_initialised:
            place = {"job": source.job, "model": source.model, "replica": source.replica, "agent": source.agent}
            await self._post("/init_weight_transfer_engine", LOAD_S_MAX, {"init_info": place})
            self._is_initialised = True
        await self._start_update()
        await self._post("/update_weights", LOAD_S_MAX, {"update_info": {"version": version}})
        await self._post("/finish_weight_update", LOAD_S_MAX, {"weight_version": str(version)})
        self._salt = secrets.token_hex(8)

    async def _start_update(self) -> None:
        try:
            await self._post("/start_weight_update", LOAD_S_MAX)
        except ServerLost:
            # A runner was killed within a load: vLLM refuses another one until that is finished, and does not say why.
            # The backend has begun nothing that would have to be undone.
            await self._post("/finish_weight_update", LOAD_S_MAX)
            await self._post("/start_weight_update", LOAD_S_MAX)

    async def go_on(self) -> None:
        """Make tokens again."""
        await self._post("/resume", ANSWER_S_MAX)

    def _forget(self) -> None:
        self._facts, self._is_initialised = None, False
