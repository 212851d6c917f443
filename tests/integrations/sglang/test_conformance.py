"""What a runner says is parsed by SGLang's own classes, and what SGLang's own code makes of tokens is read by a runner.

No model runs, and no scheduler: the test says what one would send to SGLang's tokenizer process.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import sglang.srt.managers.tokenizer_manager as theirs
from aiohttp import web
from pydantic import TypeAdapter
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import MultiprocessingSerializer, dynamic_import
from sglang.srt.utils.json_response import dumps_json
from sglang.srt.utils.weight_versions import WeightVersionSpan
from tests.kit.fake_sglang import FakeSglang

from tensorhub.integrations.sglang import load_version
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.servers.server import ServerBusy, Streamed, WeightSource
from tensorhub_runner.servers.sglang import LOADER, SglangServer

SOURCE = WeightSource("job", "policy", "runner-0", "/run/agent.sock")
TOKENS = [11, 12, 13, 14]
VOCABULARY = 512


def parsed(kind: Any, body: dict[str, Any]) -> Any:
    """Return a body as SGLang's endpoint gets it. It drops names that it has not, so they are looked for."""
    fields = {each.name for each in msgspec.structs.fields(kind)} if issubclass(kind, msgspec.Struct) else vars(kind())
    assert {*body} <= {*fields}
    return TypeAdapter(kind).validate_python(body)


async def test_a_request_is_one_of_theirs() -> None:
    fake = FakeSglang(version="1")
    async with fake.serving() as url:
        server = SglangServer(url)
        sampling = Sampling(5, -3, temperature=0.7, top_k=3, logprobs="temperature", stop_token_ids=(7,))
        async for _ in server.generate("1-1", [2, 11], sampling, 0):
            pass
        async for _ in server.generate("1-1", [2, 11], Sampling(5, 3, temperature=0.0), 0):
            pass
        await server.close()
    for body, greedy in zip(fake.requests, (False, True), strict=True):
        assert generate_contract_error(body) is None
        found = parsed(io_struct.GenerateReqInput, body)
        found.normalize_batch_and_arguments()
        assert (found.is_single, found.stream, found.return_logprob) == (True, True, True)
        assert {*body["sampling_params"]} <= {each.name for each in msgspec.structs.fields(SamplingParams)}
        params = SamplingParams(**body["sampling_params"])
        params.verify(VOCABULARY)
        assert params.ignore_eos
        assert (params.top_k == 1) == greedy


async def test_an_update_is_one_of_theirs() -> None:
    bodies: dict[str, dict[str, Any]] = {}

    async def answer(request: web.Request) -> web.Response:
        bodies[request.path] = await request.json()
        return web.json_response({"success": True, "message": ""})

    async def info(_: web.Request) -> web.Response:
        said = {"version": "0.5.23", "served_model_name": "m", "incremental_streaming_output": True}
        return web.json_response(said | {"custom_weight_loader": [LOADER], "tp_size": 2})

    app = web.Application()
    app.add_routes([web.get("/server_info", info), web.post("/{path}", answer)])
    async with serving(app) as url:
        server = SglangServer(url)
        await server.stand_still()
        await server.load(SOURCE, 7)
        await server.go_on()
        await server.close()
    assert parsed(io_struct.PauseGenerationReqInput, bodies["/pause_generation"]).mode == "abort"
    assert parsed(io_struct.BeginWeightUpdateReqInput, bodies["/begin_weight_update"]).selector == "target"
    parsed(io_struct.EndWeightUpdateReqInput, bodies["/end_weight_update"])
    parsed(io_struct.ContinueGenerationReqInput, bodies["/continue_generation"])
    update = parsed(io_struct.UpdateWeightsFromTensorReqInput, bodies["/update_weights_from_tensor"])
    assert (update.weight_version, update.flush_cache, update.selector) == ("7", True, "target")
    assert dynamic_import(update.load_format) is load_version
    for rank in range(2):
        ((told, tensor),) = MultiprocessingSerializer.deserialize(update.serialized_named_tensors[rank])
        assert msgspec.json.decode(told)["version"] == 7
        assert tensor.numel() == 0


# ---------------------------------------------------------------------------------------------- streams


class Theirs:
    """SGLang's own code between scheduler and HTTP for one request, with its incremental streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serving = SimpleNamespace(batch_notify_size=16, skip_tokenizer_init=False)
        monkeypatch.setattr(theirs, "get_serving", lambda: serving)
        monkeypatch.setattr(theirs, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
        manager: Any = theirs.TokenizerManager.__new__(theirs.TokenizerManager)
        manager.rid_to_state = {}
        manager.incremental_streaming_output = True
        manager.enable_metrics = manager.enable_lora = False
        manager.dump_requests_folder = manager.crash_dump_folder = ""
        manager.config_value = lambda _: "1"
        manager.request_logger = SimpleNamespace(log_finished_request=lambda *_, **__: None)
        manager.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.manager = manager

    def begun(self, body: dict[str, Any]) -> Any:
        """Take a request as its tokenizer process does, without the scheduler."""
        request = parsed(io_struct.GenerateReqInput, body)
        request.normalize_batch_and_arguments()
        state = theirs.ReqState(
            out_list=[], finished=False, event=asyncio.Event(), obj=request, time_stats=theirs.APIServerReqTimeStats()
        )
        self.manager.rid_to_state[request.rid] = state
        return request, state

    async def made(self, rid: str, tokens: list[int], count: int, reason: dict[str, Any] | None) -> None:
        """Say what a scheduler's step has made. `count`: of all tokens of the response."""
        kind = io_struct.BatchStrOutput
        empty: dict[str, Any] = {
            each.name: None for each in msgspec.structs.fields(kind) if each.required and each.name != "rids"
        }
        spans = [WeightVersionSpan(version="1", start=0, end=count)]
        said = {
            "rids": [rid],
            "finished_reasons": [reason],
            "output_strs": [""],
            "output_ids": [tokens],
            "prompt_tokens": [2],
            "reasoning_tokens": [0],
            "completion_tokens": [count],
            "cached_tokens": [0],
            "retraction_counts": [0],
            "output_token_logprobs_val": [[-float(each) for each in tokens]],
            "output_token_logprobs_idx": [tokens],
            "weight_versions": [spans if reason is not None else None],
        }
        await self.manager._handle_batch_output(kind(**(empty | said)))


Step = tuple[list[int], int, dict[str, Any] | None]


async def streamed(monkeypatch: pytest.MonkeyPatch, steps: list[Step | str], *, at_once: bool) -> list[Streamed]:
    """Return what a runner reads of steps. "abort": of a request that waits. `at_once`: their HTTP side is slower."""
    own = Theirs(monkeypatch)

    async def generate(asked: web.Request) -> web.StreamResponse:
        request, state = own.begun(await asked.json())
        events = own.manager._stream_one_response(obj=request, state=state, request=None)
        answer = web.StreamResponse()
        await answer.prepare(asked)

        async def say() -> None:
            event = await anext(events)
            await answer.write(b"data: " + dumps_json(event) + b"\n\n")

        for step in steps:
            if isinstance(step, str):
                own.manager._handle_abort_req(io_struct.AbortReq(rid=request.rid))
            else:
                await own.made(request.rid, *step)
            if not at_once:
                await say()
        if at_once:
            await say()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    async with serving(app) as url:
        server = SglangServer(url)
        try:
            return [each async for each in server.generate("1-1", [2, 11], Sampling(9, 3), 0)]
        finally:
            await server.close()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ((TOKENS[3:], 4, {"type": "length", "length": 4}), "length"),
        (
            (TOKENS[3:], 4, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
            "interrupted",
        ),
        (([], 3, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}), "interrupted"),
        ("abort", "interrupted"),
    ],
)
async def test_a_stream_of_theirs_has_each_token_once(
    monkeypatch: pytest.MonkeyPatch, last: Step | str, reason: str, *, at_once: bool
) -> None:
    came = await streamed(monkeypatch, [(TOKENS[:1], 1, None), (TOKENS[1:3], 3, None), last], at_once=at_once)
    tokens = [token for each in came for token in each.tokens]
    assert tokens == (TOKENS if not isinstance(last, str) and last[0] else TOKENS[:3])
    assert [logprob for each in came for logprob in each.logprobs] == [-float(each) for each in tokens]
    assert (came[-1].reason, came[-1].versions) == (reason, ("1",))


@pytest.mark.parametrize(("status", "error"), [(400, BadPrompt), (503, ServerBusy)])
async def test_a_request_that_their_scheduler_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    refused = {"type": "abort", "message": "it says why", "status_code": status, "err_type": None}
    with pytest.raises(error, match="it says why"):
        await streamed(monkeypatch, [([], 0, refused)], at_once=False)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve, and yield the address."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
