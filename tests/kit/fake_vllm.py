"""A server that answers as vLLM's does, without a model: its tokens follow from version, position and seed alone.

`FakeVllm` serves within a test; `python -m tests.kit.fake_vllm PORT` is a process of its own. Its worker reads each
version out of hub memory as the real one does: it maps the memory of a replica on this host.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.kit.fake_engine import WEIGHT, logprob_of, token_of

import tensorhub

STEP_S = 0.002
VOCABULARY = 1000
SALT_CHARS_MAX = 128


@dataclass
class FakeVllm:
    """One server. What a test sets decides what goes wrong; what it reads is what was asked."""

    reads_hub: bool = False
    """Whether versions are read out of hub memory; else they are only numbers."""
    version: str = "default"
    logprobs_mode: str = "processed_logprobs"
    backend: str | None = "tensorhub"
    says_version: str | None = None
    """What its responses say that they are of; None: the truth."""
    breaks_after: int | None = None
    """Its streams break off without an end after as many tokens."""
    gives_logprobs: bool = True
    errs_after: int | None = None
    """Its streams say that the engine has failed after as many tokens."""
    is_busy: bool = False
    closed: int | None = None
    """Requests are answered with this status."""
    holds_new: bool = False
    """New requests wait until it goes on, as those that come while it stands still."""
    fails: set[str] = field(default_factory=set)
    """Paths that answer with status 500."""
    asked: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    is_paused: bool = False
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _shard: tensorhub.Shard | None = None
    _update: int | None = None
    is_updating: bool = False

    def app(self) -> web.Application:
        """Return its routes."""
        self._resumed.set()
        app = web.Application(middlewares=[self._noted])
        app.add_routes(
            [
                web.get("/version", self._said(lambda: {"version": "0.32.0"})),
                web.get("/server_info", self._said(self._config)),
                web.get("/v1/models", self._said(lambda: {"data": [{"id": "tiny"}]})),
                web.get("/health", self._said(dict)),
                web.get("/weight_info", self._said(lambda: {"weight_version": self.says_version or self.version})),
                web.get("/running", self._said(lambda: self.running)),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/init_weight_transfer_engine", self._init),
                web.post("/start_weight_update", self._start),
                web.post("/update_weights", self._load),
                web.post("/finish_weight_update", self._finish),
                web.post("/inference/v1/generate", self._generate),
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
            # As vLLM ends an update whose worker has raised.
            self.is_updating = False
            return web.json_response({"error": {"message": "it failed"}}, status=500)
        answer: web.StreamResponse = await handler(request)
        return answer

    @staticmethod
    def _said(what: Any) -> Any:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(what())

        return answer

    def _config(self) -> dict[str, Any]:
        transfer = None if self.backend is None else {"backend": self.backend}
        model = {"logprobs_mode": self.logprobs_mode, "dtype": "torch.float32"}
        return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer}}

    # ------------------------------------------------------------------------------------------ weights

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        self.is_paused = True
        self._resumed.clear()
        self._interrupted.set()
        while self.running:  # noqa: ASYNC110 (streams end in tasks of their own)
            await asyncio.sleep(STEP_S)
        self._interrupted.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.is_paused = False
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def _init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        if self.reads_hub:
            self._shard = await asyncio.to_thread(self._registered, info)
        return web.json_response({})

    @staticmethod
    def _registered(info: dict[str, str]) -> tensorhub.Shard:
        hub = tensorhub.connect(job=info["job"], agent=info["agent"])
        name = f"{info['replica']}-rank-0"
        return hub.register(info["model"], hub.specs(info["model"]), replica=name, spot=True, install="mapped")

    async def _start(self, _: web.Request) -> web.Response:
        if self.is_updating:
            # The reason stands in the log of its workers alone.
            return web.Response(status=500, text="Internal Server Error")
        self.is_updating = True
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        assert self.is_paused
        assert not self.running
        self._update = (await request.json())["update_info"]["version"]
        if self._shard is not None:
            self._update = await asyncio.to_thread(self._read, self._shard, self._update)
        return web.json_response({})

    @staticmethod
    def _read(shard: tensorhub.Shard, version: int) -> int:
        shard.replicate(version)
        found = int(shard.tensors[WEIGHT][0])
        shard.let_go()
        return found

    async def _finish(self, request: web.Request) -> web.Response:
        self.is_updating = False
        if self._update is not None:
            # What was read counts, and not what it is called.
            assert (await request.json())["weight_version"].isdigit()
            self.version, self._update = str(self._update), None
        return web.json_response({})

    # ------------------------------------------------------------------------------------------ tokens

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests.append(asked)
        if self.closed is not None:
            return web.json_response({"error": {"message": "it is disabled"}}, status=self.closed)
        if self.is_busy:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        if not asked["cache_salt"].isalnum() or len(asked["cache_salt"]) > SALT_CHARS_MAX:
            return web.json_response({"error": {"message": "the salt has other characters"}}, status=400)
        if max(asked["token_ids"]) >= VOCABULARY:
            return web.json_response({"error": {"message": "a token is out of vocabulary"}}, status=400)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        if self.holds_new:
            self._resumed.clear()
        await self._resumed.wait()
        self.running += 1
        try:
            await self._stream(answer, asked)
        finally:
            self.running -= 1
        return answer

    async def _stream(self, answer: web.StreamResponse, asked: dict[str, Any]) -> None:
        sampling, version = asked["sampling_params"], self.version
        # As the driver is told: a response is prompt and tokens, and the prompt's first token says how long it is.
        made_before = len(asked["token_ids"]) - asked["token_ids"][0]
        for count in range(sampling["max_tokens"]):
            if self.breaks_after == count:
                return
            if self.errs_after == count:
                await answer.write(b'data: {"error": {"message": "the engine is dead", "code": 500}}\n\n')
                return
            position = made_before + count
            token = token_of(asked["token_ids"][1], position)
            reason = "stop" if token in sampling["stop_token_ids"] else None
            if reason is None and count + 1 == sampling["max_tokens"]:
                reason = "length"
            if reason is None and self._interrupted.is_set():
                reason = "abort"
            await self._say(answer, token, logprob_of(float(version), position), reason)
            if reason is not None:
                await answer.write(b"data: [DONE]\n\n")
                return
            await asyncio.sleep(STEP_S)

    async def _say(self, answer: web.StreamResponse, token: int, logprob: float, reason: str | None) -> None:
        spans = [{"version": self.says_version or self.version, "start": 0, "end": 1}]
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {"content": [{"token_id": token, "logprob": logprob}]} if self.gives_logprobs else None,
            "finish_reason": reason,
            "weight_versions": spans if reason else None,
        }
        await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


async def _serve(port: int) -> None:
    async with FakeVllm(reads_hub=True).serving(port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
