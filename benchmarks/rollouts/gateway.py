"""What the gateway costs: `python -m benchmarks.rollouts.gateway`, sessions at once beside a plain endpoint.

Engines without a model make a token of each response in each step. Below the gateway they are runners of a hub, as
always; the plain endpoint steps one itself, in its own process, and keeps nothing. Both speak to the same clients, one
connection a call, who read every event. What differs is all that stands between: log, manager, runners, sessions.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from tests.kit.chat_models import save_chat_model
from tests.kit.fake_engine import VOCABULARY, WEIGHT, FakeEngine

import tensorhub
from benchmarks import page
from benchmarks.processor import used_s
from tensorhub._control import hub_file
from tensorhub.local.hub import LocalHub, LocalRollouts
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_gateway.api import answers
from tensorhub_gateway.api.calls import read_chat
from tensorhub_gateway.chat.tokenizer import ChatTokenizer, TextStream
from tensorhub_gateway.sessions.session import ChatAsked

MODEL: Final = "policy"
ENGINE: Final = "tests.kit.fake_engine:load"
READY_S: Final = 300.0
RUNNERS: Final = 2
SLOTS: Final = 128
"""Of one runner."""
ROOT: Final = Path(__file__).parents[2]


@dataclass
class Seen:
    """What the clients of one run saw; times in seconds."""

    first: list[float] = field(default_factory=list)
    """From a call to its first token."""
    gaps: list[float] = field(default_factory=list)
    """From one event with text to the next."""
    calls: list[float] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- endpoints


async def serve_gateway(directory: Path, tokens: int) -> None:
    """Be the trainer: take sessions and acknowledge them."""
    found = hub_file.read(directory / "hub")
    async with await tensorhub.connect_async("default", agent=found.agents[0].socket, nats=found.nats_all) as hub:
        policy = await hub.register(MODEL, {WEIGHT: torch.ones(16)}, replica="trainer")
        await policy.publish()
        sampling = tensorhub.Sampling(max_tokens=tokens, seed=3)
        rollouts = await hub.rollouts(MODEL, staleness=1 << 20, sampling=sampling)
        while sum(each.state == "serving" for each in (await rollouts.status()).instances) < RUNNERS:  # noqa: ASYNC110 (another process knows)
            await asyncio.sleep(0.1)
        async with rollouts.gateway(directory / "model") as gateway:
            print(json.dumps(gateway.port), flush=True)
            async for batch in rollouts.batches(wait_s=3600):
                await batch.done()


async def serve_plain(directory: Path, tokens: int) -> None:
    """Step one engine and stream what it makes."""
    tokenizer, module = ChatTokenizer(directory / "model"), torch.nn.Module()
    module.register_parameter(WEIGHT, torch.nn.Parameter(torch.ones(16), requires_grad=False))
    engine = FakeEngine(RUNNERS * SLOTS, module, "plain")
    waiting: dict[Attempt, asyncio.Queue[tuple[bytes, bool]]] = {}
    numbers = iter(range(1, 1 << 40))
    has_work = asyncio.Event()

    async def step_always() -> None:
        while True:
            await has_work.wait()
            for made in await asyncio.to_thread(engine.step):
                waiting[made.attempt].put_nowait((made.tokens, made.finished is not None))
            if not engine.has_work:
                has_work.clear()

    async def answer(request: Request) -> StreamingResponse:
        asked = read_chat(await request.body())
        assert isinstance(asked.asked, ChatAsked)
        prompt = tokenizer.ids(tokenizer.render(asked.asked.messages, None))
        attempt = Attempt(1, next(numbers))
        queue = waiting[attempt] = asyncio.Queue()
        engine.begin(attempt, prompt.tobytes(), b"", Sampling(tokens, attempt.n))
        has_work.set()
        of = answers.Answered("chatcmpl-x", 0, MODEL, is_chat=True, session="", turn=0, forked=None)

        async def events() -> AsyncIterator[bytes]:
            said, is_over = TextStream(tokenizer), False
            while not is_over:
                new, is_over = await queue.get()
                ids = array("i")
                ids.frombytes(new)
                yield b"data: " + msgspec.json.encode(answers.chunk(of, said.take(ids))) + b"\n\n"
            yield b"data: " + msgspec.json.encode(answers.chunk(of, said.rest(), finish="length")) + b"\n\n"
            yield b"data: [DONE]\n\n"
            del waiting[attempt]

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off"))
    async with asyncio.TaskGroup() as group:
        group.create_task(step_always())
        group.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0.01)
        print(json.dumps(server.servers[0].sockets[0].getsockname()[1]), flush=True)


@asynccontextmanager
async def endpoint(
    kind: str, directory: Path, tokens: int, environment: dict[str, str]
) -> AsyncIterator[tuple[int, int]]:
    """Start an endpoint in a process of its own; yield its port and its process."""
    program = (sys.executable, "-m", "benchmarks.rollouts.gateway", "--serve", kind, "--directory", str(directory))
    process = await asyncio.create_subprocess_exec(
        *program, "--tokens", str(tokens), cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            port = int(await process.stdout.readline())
        yield port, process.pid
    finally:
        process.kill()
        await process.wait()


# ------------------------------------------------------------------------------------------------------ clients


async def call(port: int, session: str, messages: list[dict[str, str]], seen: Seen, more: Mapping[str, object]) -> str:
    """Make one streamed call, and return what was said. `more`: what this endpoint is asked besides."""
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True, **more}).encode()
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-tensorhub-session: {session}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    text, is_first = "", True
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now, event = time.perf_counter(), json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event)
        said = event["choices"][0]["delta"].get("content")
        if said:
            text += said
            (seen.first if is_first else seen.gaps).append(now - last)
            is_first, last = False, now
    writer.close()
    seen.calls.append(time.perf_counter() - began)
    return text


async def session(
    port: int, name: str, calls: int, seen: Seen, more: Mapping[str, object], *, has_reward: bool
) -> None:
    """Call several times, each behind the answer before."""
    messages = [{"role": "user", "content": "the thing"}]
    for _ in range(calls):
        said = await call(port, name, messages, seen, more)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
    if has_reward:
        body = b'{"reward": 1}'
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/sessions/{name}/reward HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in await reader.readline()
        await reader.read()
        writer.close()


async def load(
    kind: str,
    port: int,
    pids: Sequence[int],
    sessions: int,
    calls: int,
    tokens: int,
    round_: int,
    *,
    more: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """Have sessions at once, and say what was seen."""
    seen, began, used = Seen(), time.perf_counter(), used_s(pids)
    name = f"{sessions}-{round_}"
    await asyncio.gather(
        *(session(port, f"{name}-{each}", calls, seen, more, has_reward=kind == "gateway") for each in range(sessions))
    )
    took = time.perf_counter() - began
    return {
        "endpoint": kind,
        "sessions": sessions,
        "calls/s": round(sessions * calls / took, 1),
        "tokens/s": round(sessions * calls * tokens / took),
        "first p50 ms": _ms(seen.first, 50),
        "first p99 ms": _ms(seen.first, 99),
        "gap p50 ms": _ms(seen.gaps, 50),
        "gap p99 ms": _ms(seen.gaps, 99),
        "call p50 ms": _ms(seen.calls, 50),
        "us/token": round((used_s(pids) - used) * 1e6 / (sessions * calls * tokens), 1),
    }


def _ms(values: list[float], percent: int) -> float:
    return round(1000 * sorted(values)[min(len(values) - 1, len(values) * percent // 100)], 1)


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {
        name: rows[0][name] if name == "endpoint" else statistics.median(row[name] for row in rows) for name in rows[0]
    }


def table(runs: Iterable[list[dict[str, Any]]]) -> str:
    """Return the medians of each endpoint's runs in a row."""
    medians = [median_of(each) for each in runs]
    return page.table([*medians[0]], [[str(each) for each in row.values()] for row in medians])


async def measure(sessions: list[int], calls: int, tokens: int, tokens_per_s: float, rounds: int) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_chat_model(directory / "model", size=VOCABULARY)
        environment = {
            "PYTHONPATH": str(ROOT),
            "FAKE_STEP_S": str(1 / tokens_per_s),
            "TENSORHUB_RUNNER_SLOTS": str(SLOTS),
        }
        whole = {**os.environ, **environment}
        hub = LocalHub(directory / "hub", rollouts=LocalRollouts(RUNNERS, ENGINE), environment=environment)
        rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
        async with (
            hub,
            endpoint("gateway", directory, tokens, whole) as gateway,
            endpoint("plain", directory, tokens, whole) as plain,
        ):
            for round_ in range(rounds):
                for count in sessions:
                    for kind, (port, pid) in (("gateway", gateway), ("plain", plain)):
                        row = await load(kind, port, [pid], count, calls, tokens, round_)
                        rows.setdefault((count, kind), []).append(row)
                        print(json.dumps(row), file=sys.stderr, flush=True)
        print(table(rows.values()))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 200], help="sessions at once, one run each")
    parser.add_argument("--calls", type=int, default=2, help="calls of a session")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of an answer")
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is told")
    parser.add_argument("--serve", choices=("gateway", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.serve is None:
        asyncio.run(measure(said.sessions, said.calls, said.tokens, said.tokens_per_s, said.rounds))
    else:
        serve = {"gateway": serve_gateway, "plain": serve_plain}[said.serve]
        asyncio.run(partial(serve, said.directory, said.tokens)())


if __name__ == "__main__":
    main()
