"""A server that answers as SGLang's does, without a model: its tokens follow from version, position and seed alone.

`FakeSglang` serves within a test; `python -m tests.kit.fake_sglang PORT` is a process of its own. It deserialises what
an update brings, and calls the loader by its name, as SGLang's scheduler does.
"""

import asyncio
import base64
import json
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from aiohttp import web
from tests.kit.fake_engine import WEIGHT, logprob_of, token_of

STEP_S = 0.002
VOCABULARY = 1000
LOADER = "tensorhub.integrations.sglang.load_version"


class _Model:
    """What the loader is given."""

    version = 0

    def load_weights(self, weights: Any) -> None:
        self.version = int(dict(weights)[WEIGHT][0])


@dataclass
class FakeSglang:
    """One server. What a test sets decides what goes wrong; what it reads is what was asked."""

    reads_hub: bool = False
    """Whether versions are read out of hub memory; else they are only numbers."""
    version: str = "default"
    options: dict[str, Any] = field(default_factory=dict)
    """Options that it was started with, in place of those that fit."""
    says_version: str | None = None
    """What its responses say that they are of; None: the truth."""
    breaks_after: int | None = None
    """Its streams break off without an end after as many tokens."""
    refuses: dict[str, Any] | None = None
    """The reason that each stream ends with at once."""
    aborts_while_waiting: bool = False
    """Whether a stream that is aborted ends as one whose request went back into the queue."""
    fails: set[str] = field(default_factory=set)
    """Paths that answer with status 500."""
    closed: int | None = None
    """All paths answer with this status."""
    holds_new: bool = False
    """New requests wait until it goes on, as those that come while it stands still."""
    asked: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    is_paused: bool = False
    is_updating: bool = False
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _model: _Model = field(default_factory=_Model)

    def app(self) -> web.Application:
        """Return its routes."""
        self._resumed.set()
        app = web.Application(middlewares=[self._noted])
        app.add_routes(
            [
                web.get("/server_info", self._info),
                web.get("/ready", self._ready),
                web.get("/model_info", self._model_info),
                web.get("/running", self._running),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._resume),
                web.post("/begin_weight_update", self._begin),
                web.post("/update_weights_from_tensor", self._load),
                web.post("/end_weight_update", self._end),
                web.post("/generate", self._generate),
            ]
        )
        return app

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve, and yield the address."""
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @web.middleware
    async def _noted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path in self.fails:
            return web.Response(text="Internal Server Error", status=500)
        if self.closed is not None:
            return web.json_response({"error": "Unauthorized"}, status=self.closed)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _info(self, _: web.Request) -> web.Response:
        fitting = {
            "version": "0.5.23",
            "served_model_name": "tiny",
            "dtype": "float32",
            "incremental_streaming_output": True,
            "custom_weight_loader": [LOADER],
            "tp_size": 1,
            "dp_size": 1,
            "disaggregation_mode": "null",
            "weight_cache_mode": "off",
            "internal_states": [{}],
        }
        return web.json_response(fitting | self.options)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.says_version or self.version})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_paused else 200)

    async def _running(self, _: web.Request) -> web.Response:
        return web.json_response(self.running)

    # ------------------------------------------------------------------------------------------ weights

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.is_paused = True
        self._resumed.clear()
        self._interrupted.set()
        while self.running:  # noqa: ASYNC110 (streams end in tasks of their own)
            await asyncio.sleep(STEP_S)
        self._interrupted.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.is_paused = False
        self._resumed.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _begin(self, _: web.Request) -> web.Response:
        if self.is_updating:
            return self._done("a weight-update session is already open; call end_weight_update() first")
        self.is_updating = True
        return self._done()

    async def _load(self, request: web.Request) -> web.Response:
        if not self.is_updating:
            return self._done("update_weights_from_tensor must run between begin_weight_update() and its end")
        assert self.is_paused
        assert not self.running
        asked = await request.json()
        self.updates.append(asked)
        assert asked["flush_cache"]
        named = [
            (name, tensor.to("cpu"))
            for name, tensor in pickle.loads(  # noqa: S301 (what the test has sent)
                base64.b64decode(asked["serialized_named_tensors"][0])
            )
        ]
        self.version = asked["weight_version"]
        if self.reads_hub:
            module, _, function = asked["load_format"].rpartition(".")
            await asyncio.to_thread(getattr(import_module(module), function), self._model, named)
            # What was read counts, and not what it is called.
            self.version = str(self._model.version)
        return self._done()

    async def _end(self, _: web.Request) -> web.Response:
        if not self.is_updating:
            return self._done("no weight-update session is open; call begin_weight_update() first")
        self.is_updating = False
        return self._done()

    @staticmethod
    def _done(why: str = "") -> web.Response:
        return web.json_response({"success": not why, "message": why or "Success"}, status=400 if why else 200)

    # ------------------------------------------------------------------------------------------ tokens

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests.append(asked)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        if self.holds_new:
            self._resumed.clear()
        await self._resumed.wait()
        self.running += 1
        try:
            if max(asked["input_ids"]) >= VOCABULARY:
                error = {"message": "a token is out of vocabulary", "type": "invalid_request_error", "code": 400}
                await self._say(answer, {"error": error | {"retryable": False}})
            elif self.refuses is not None:
                await self._tell(answer, [], [], 0, self.refuses)
            else:
                await self._stream(answer, asked)
        finally:
            self.running -= 1
        return answer

    async def _stream(self, answer: web.StreamResponse, asked: dict[str, Any]) -> None:
        sampling, version = asked["sampling_params"], self.version
        # As the driver is told: a response is prompt and tokens, and the prompt's first token says how long it is.
        made_before = len(asked["input_ids"]) - asked["input_ids"][0]
        tokens: list[int] = []
        logprobs: list[float] = []
        for count in range(sampling["max_new_tokens"]):
            if self.breaks_after == count:
                return
            if self._interrupted.is_set() and self.aborts_while_waiting:
                finish = {"type": "abort", "message": "Abort in waiting queue"}
                await self._tell(answer, tokens[-1:], [*zip(logprobs, tokens, strict=True)], count, finish)
                break
            position = made_before + count
            tokens.append(token_of(asked["input_ids"][1], position))
            logprobs.append(logprob_of(float(version), position))
            reason = None
            if count + 1 == sampling["max_new_tokens"]:
                reason = {"type": "length", "length": count + 1}
            elif self._interrupted.is_set():
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert sampling["ignore_eos"]
            await self._tell(answer, tokens[-1:], [(logprobs[-1], tokens[-1])], count + 1, reason)
            if reason is not None:
                break
            await asyncio.sleep(STEP_S)
        await answer.write(b"data: [DONE]\n\n")

    async def _tell(
        self,
        answer: web.StreamResponse,
        tokens: list[int],
        logprobs: list[tuple[float, int]],
        count: int,
        reason: dict[str, Any] | None,
    ) -> None:
        version = self.says_version or self.version
        meta: dict[str, Any] = {
            "id": "1",
            "finish_reason": reason,
            "weight_version": version,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in logprobs],
            "completion_tokens": count,
        }
        if reason is not None:
            meta["weight_versions"] = [{"version": version, "start": 0, "end": count}]
        await self._say(answer, {"text": "", "output_ids": tokens, "meta_info": meta})

    @staticmethod
    async def _say(answer: web.StreamResponse, event: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def _serve(port: int) -> None:
    async with FakeSglang(reads_hub=True).serving(port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_serve(int(sys.argv[1])))
