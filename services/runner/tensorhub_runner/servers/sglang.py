"""An SGLang server, from 0.5.23 on: tokens by `/generate`, weights by its own update endpoints. I/O.

The server runs with `--incremental-streaming-output` and `--custom-weight-loader` of `tensorhub.integrations.sglang`.
`/update_weights_from_tensor` is given no values: its one tensor is empty, and has the place of the version as its name.
SGLang gives both to the loader in each of its scheduler processes, which reads the version out of hub memory.

Always true:
- Weights are written only while the server is paused. Pausing aborts what runs: each stream ends with all tokens that
  were made. What goes on is computed anew, since the update flushes the cache.
- A request's prefix cache has the key of the load that its version came by: no other version finds it.
- A response ends at a stop token of its request alone. SGLang looks for these and for the model's own end with one
  switch, so it is told to look for neither, and they are looked for here.
"""

import base64
import secrets
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final

import msgspec

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_runner.servers.http import ANSWER_S_MAX, ERROR_CHARS_MAX, LOAD_S_MAX, STAND_STILL_S_MAX, HttpServer
from tensorhub_runner.servers.server import EndReason, ServerUnfit, Streamed, WeightSource

LOADER: Final = "tensorhub.integrations.sglang.load_version"
"""The function that SGLang calls, by the name that the server was started with."""
SEED_BITS: Final = 63
"""SGLang keeps seeds as signed numbers."""
RANKS_MAX: Final = 1024
"""Limit of the tensor-parallel ranks of one server."""

_REASONS: Final[dict[str, EndReason]] = {"stop": "stop", "length": "length", "abort": "interrupted"}
_ONLY_TARGET: Final = {"selector": "target"}
"""A draft model has weights of its own."""


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, Any]] = []
    weight_version: str | None = None
    weight_versions: list[_Span] = []


class _Failure(msgspec.Struct):
    message: str = ""
    code: int = HTTPStatus.INTERNAL_SERVER_ERROR


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Failure | None = None


class _Facts(msgspec.Struct):
    """What `/server_info` says, as far as it matters here."""

    version: str
    served_model_name: str
    dtype: str = ""
    incremental_streaming_output: bool = False
    custom_weight_loader: list[str] | None = None
    tp_size: int = 1
    dp_size: int = 1
    disaggregation_mode: str = "null"
    weight_cache_mode: str = "off"


_events: Final = msgspec.json.Decoder(_Event)


class SglangServer(HttpServer):
    """One server."""

    kind = "SGLang"
    options = f"--incremental-streaming-output --custom-weight-loader {LOADER}, from 0.5.23 on"
    health = "/ready"
    """`/health` makes a token each time, and takes a second."""
    weights = "/model_info"

    def __init__(self, url: str, model: str = "") -> None:
        """Prepare. `url`: of its root, on this host. `model`: the name under which it has its model; empty: any."""
        super().__init__(url, model)
        self._key = secrets.token_hex(8)
        self._facts: _Facts | None = None
        """Of the process that answers; None: it is not known whether that is still the same."""

    async def check(self) -> RunEngine:
        """Return what it is. Asked of the server once for each time that it is connected to."""
        facts = await self._known_facts()
        return RunEngine("sglang", f"sglang {facts.version}", facts.dtype.removeprefix("torch."), is_exact=False)

    async def _known_facts(self) -> _Facts:
        if self._facts is None:
            try:
                facts = msgspec.convert(await self._get("/server_info"), _Facts)
            except msgspec.ValidationError as why:
                raise ServerUnfit(f"the server at {self.url} is no SGLang that is known here: {why}") from None
            self._refuse_unfit(facts)
            self._facts = facts
        return self._facts

    def _refuse_unfit(self, facts: _Facts) -> None:
        """Raise `ServerUnfit` for options that a runner can't work with."""
        wrong = ""
        if not facts.incremental_streaming_output:
            wrong = "sends all tokens of a response again with each one: start it with --incremental-streaming-output"
        elif LOADER not in (facts.custom_weight_loader or []):
            wrong = f"can't load from the hub: start it with --custom-weight-loader {LOADER}"
        elif facts.dp_size != 1:
            wrong = f"has {facts.dp_size} data-parallel replicas, and can update one: start a server for each"
        elif facts.tp_size > RANKS_MAX:
            wrong = f"has {facts.tp_size} tensor-parallel ranks, over the limit of {RANKS_MAX}"
        elif facts.disaggregation_mode != "null":
            wrong = "only computes prompts or only decodes: start it without --disaggregation-mode"
        elif facts.weight_cache_mode != "off":
            wrong = "shares its weights with other servers: start it with --weight-cache-mode off"
        elif self._model and self._model != facts.served_model_name:
            wrong = f"has {facts.served_model_name}, and not {self._model}"
        if wrong:
            raise ServerUnfit(f"the SGLang server at {self.url} {wrong}")

    async def generate(
        self, name: str, context: Sequence[int], sampling: Sampling, made: int
    ) -> AsyncGenerator[Streamed, None]:
        """Go on behind the context."""
        request = {
            # A name that comes again, behind a move, is another request.
            "rid": f"{name}-{secrets.token_hex(4)}",
            "input_ids": context,
            "sampling_params": _sampling_params(sampling, made),
            "return_logprob": True,
            "stream": True,
            "extra_key": self._key,
        }
        seen = 0
        async with aclosing(self._events("/generate", request)) as events:
            async for event in events:
                new, versions = self._streamed(event, seen)
                seen += len(new.tokens)
                new = _stopped(new, sampling.stop_token_ids, versions)
                yield new
                if new.reason is not None:
                    # Closing the stream aborts a response that SGLang would go on with behind its stop token.
                    return

    def _streamed(self, data: bytes, seen: int) -> tuple[Streamed, tuple[str, ...]]:
        """Return what is new in an event, and the versions that it names. `seen`: the tokens that came before."""
        try:
            event = _events.decode(data)
        except msgspec.DecodeError as why:
            raise self._lost(f"says what is no event of a stream: {why}") from None
        if event.error is not None or event.meta_info is None:
            failure = event.error or _Failure("it says nothing")
            self._raise_refusal(failure.code, failure.message[:ERROR_CHARS_MAX])
            raise self._lost(f"has failed: {failure.message[:ERROR_CHARS_MAX]}")
        meta, finish = event.meta_info, event.meta_info.finish_reason
        if finish is not None and finish.status_code is not None:
            told = (finish.message or finish.type)[:ERROR_CHARS_MAX]
            self._raise_refusal(finish.status_code, told)
            raise self._lost(f"has ended a response: {told}")
        if finish is not None and finish.type not in _REASONS:
            raise self._lost(f"ends a response as {finish.type!r:.40}")
        reason = None if finish is None else _REASONS[finish.type]
        # An abort sends the last token once more, and the log-probabilities of all. New tokens come first.
        count = min(len(event.output_ids), max(0, meta.completion_tokens - seen))
        if reason != "interrupted" and (count != len(event.output_ids) or seen + count != meta.completion_tokens):
            raise self._lost(f"gives {len(event.output_ids)} tokens behind {seen}, and counts {meta.completion_tokens}")
        logprobs = meta.output_token_logprobs[:count]
        tokens = tuple(event.output_ids[:count])
        if tuple(each[1] for each in logprobs) != tokens:
            raise self._lost(f"gives {count} tokens with log-probabilities of others")
        versions = tuple(each.version for each in meta.weight_versions)
        if not versions and meta.weight_version is not None:
            versions = (meta.weight_version,)
        return Streamed(
            tokens, tuple(each[0] for each in logprobs), reason, versions if reason is not None else ()
        ), versions

    async def stand_still(self) -> None:
        """End all streams, and make no token."""
        await self._post("/pause_generation", STAND_STILL_S_MAX, {"mode": "abort"})

    async def load(self, source: WeightSource, version: int) -> None:
        """Have the schedulers read a version into the model."""
        facts = await self._known_facts()
        if not await self._has_begun():
            # An update that failed has left its session open, and SGLang begins no other beside it.
            await self._post("/end_weight_update", LOAD_S_MAX, {})
            await self._post("/begin_weight_update", LOAD_S_MAX, _ONLY_TARGET)
        payload = base64.b64encode(named_nothing(_place(source, version))).decode()
        update = {
            "serialized_named_tensors": [payload] * facts.tp_size,
            "load_format": LOADER,
            "flush_cache": True,
            "weight_version": str(version),
            **_ONLY_TARGET,
        }
        await self._post("/update_weights_from_tensor", LOAD_S_MAX, update)
        await self._post("/end_weight_update", LOAD_S_MAX, {})
        self._key = secrets.token_hex(8)

    async def _has_begun(self) -> bool:
        async with self._asked("POST", "/begin_weight_update", LOAD_S_MAX, _ONLY_TARGET) as answer:
            if answer.status == HTTPStatus.BAD_REQUEST:
                return False
            await self._check(answer)
            return True

    async def go_on(self) -> None:
        """Make tokens again."""
        await self._post("/continue_generation", ANSWER_S_MAX, {})

    def _forget(self) -> None:
        self._facts = None


def named_nothing(name: str) -> bytes:
    """Return the pickle of `[(name, torch.Tensor())]`, as SGLang's deserialiser takes it. A runner needs no torch."""
    text = name.encode()
    return b"\x80\x03](X" + struct.pack("<I", len(text)) + text + b"ctorch\nTensor\n)R\x86e."


def _place(source: WeightSource, version: int) -> str:
    place = {"job": source.job, "model": source.model, "replica": source.replica, "agent": source.agent}
    return msgspec.json.encode(place | {"version": version}).decode()


def _stopped(new: Streamed, stop_token_ids: Sequence[int], versions: tuple[str, ...]) -> Streamed:
    """Return what came up to the first stop token, with its reason."""
    for place, token in enumerate(new.tokens, 1):
        if token in stop_token_ids:
            return Streamed(new.tokens[:place], new.logprobs[:place], "stop", versions)
    return new


def _sampling_params(sampling: Sampling, made: int) -> dict[str, object]:
    """Return SGLang's parameters for what is left of a response. Raises `BadPrompt` for what SGLang can't do."""
    is_narrowed = sampling.temperature > 0.0 and (sampling.top_p < 1.0 or sampling.top_k > 0)
    if sampling.logprobs == "processed" and is_narrowed:
        raise BadPrompt(
            "logprobs='processed' with top_p or top_k needs the distribution behind both, and SGLang gives the one "
            "before: take logprobs='temperature', vLLM, or the torch engine"
        )
    return {
        "max_new_tokens": sampling.tokens_max - made,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        # Its noise follows from seed and position, so that a response that was moved goes on with its own.
        "sampling_seed": sampling.seed % (1 << SEED_BITS),
        "ignore_eos": True,
    }
