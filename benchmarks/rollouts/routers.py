"""What the routers of SGLang and vLLM use of a processor for each token: `python -m benchmarks.rollouts.routers`.

They relay between HTTP engines and clients that read every event. `python -m benchmarks.rollouts --instances 64
--responses 640` measures the manager at the same load; it also keeps tokens, places requests and writes a log.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

import psutil

from benchmarks.processor import used_s
from benchmarks.rollouts.http_engines import LOGPROB, MODEL
from benchmarks.side_by_side.environments import prepare
from benchmarks.side_by_side.perftest import free_port

READY_S: Final = 60.0
SETTLE_S: Final = 2.0
"""After the first tokens, before anything is measured."""
ROUTERS: Final = {
    "none": ("", "/generate"),
    "sglang-router": ("sglang_router.launch_router", "/generate"),
    "vllm-router": ("vllm_router.launch_router", "/v1/completions"),
}
"""By name: the module, and where requests go. Without one the clients ask the engines: the latency of these alone."""


@dataclass
class Relayed:
    """One run: the share is of one core, latencies are from the engine's write to the client's read, in ms."""

    router: str
    instances: int
    responses: int
    tokens_per_s: float
    events_per_s: float
    """Engines that are late send fewer and larger ones, so a router is judged by what an event costs."""
    share: float
    us_per_event: float
    latency_p50_ms: float
    latency_p99_ms: float


class Client(asyncio.Protocol):
    """One response on a connection of its own. It looks at every byte, and at the time of some events."""

    def __init__(self, path: str, number: int, seen: "Seen") -> None:
        self._path, self._number, self._seen = path, number, seen
        self._left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for a response."""
        assert isinstance(transport, asyncio.Transport)
        prompt = [1, self._number]
        asked = {"model": MODEL, "prompt": prompt, "input_ids": prompt, "max_tokens": 1 << 20, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST {self._path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"
        transport.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)

    def data_received(self, data: bytes) -> None:
        """Count the tokens of a part of the response."""
        if data.startswith(b"HTTP/1.1") and not data.startswith(b"HTTP/1.1 200"):
            self._seen.refused = data.decode(errors="replace")
        self._seen.tokens += (self._left + data).count(LOGPROB)
        self._left = data[1 - len(LOGPROB) :]
        self._seen.events += data.count(b'"at":')
        at = data.find(b'"at":')
        end = data.find(b"}", at)
        if 0 <= at < end:
            self._seen.latencies_s.append(time.monotonic() - float(data[at + 5 : end]))


@dataclass
class Seen:
    """What all clients have seen."""

    tokens: int = 0
    events: int = 0
    """Those that a read of the socket has cut in two are not all counted: one in a thousand."""
    latencies_s: list[float] = field(default_factory=list)
    refused: str = ""
    """What a router answered instead of a response."""


def main() -> None:
    """Measure each router, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--responses", type=int, default=640, help="open at once")
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of each response")
    parser.add_argument("--flush-ms", type=float, default=50.0, help="between two events of a response")
    parser.add_argument("--measure-s", type=float, default=6.0, help="so long is measured")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    options = parser.parse_args()
    for name in options.routers.split(","):
        sys.stdout.write(json.dumps(asdict(asyncio.run(_measured(name, options))), indent=2) + "\n")


async def _measured(name: str, options: argparse.Namespace) -> Relayed:
    module, path = ROUTERS[name]
    tokens = int(options.tokens_per_s * (options.measure_s + 20 * SETTLE_S))
    engines = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rollouts.http_engines",
        *map(str, (options.instances, tokens, options.tokens_per_s, options.flush_ms / 1000)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert engines.stdout is not None
        ports: list[int] = json.loads(await engines.stdout.readline())
        async with _router(module, ports) as (port, pids):
            return await _relayed(name, path, [port] if port else ports, pids, options)
    finally:
        engines.kill()
        await engines.wait()


@asynccontextmanager
async def _router(module: str, ports: list[int]) -> AsyncIterator[tuple[int, list[int]]]:
    """Run a router before engines: its port and processes. Without one: 0, and none."""
    if not module:
        yield 0, []
        return
    environment = await prepare("routers")
    port, metrics = free_port(), free_port()
    router = await asyncio.create_subprocess_exec(
        environment.python,
        "-m",
        module,
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin"),
        *("--worker-urls", *(f"http://127.0.0.1:{each}" for each in ports)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _until_served(port, router)
        yield port, [router.pid, *(each.pid for each in psutil.Process(router.pid).children(recursive=True))]
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()


async def _until_served(port: int, router: asyncio.subprocess.Process) -> None:
    """Wait until the router answers a request. Raises RuntimeError where it ends, or does not within `READY_S`."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if router.returncode is not None:
            raise RuntimeError(f"the router ended with {router.returncode}")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            head = await reader.readline()
            writer.close()
            if b" 200 " in head:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the router did not serve within {READY_S:g} s")


async def _relayed(name: str, path: str, ports: list[int], pids: list[int], options: argparse.Namespace) -> Relayed:
    seen, loop = Seen(), asyncio.get_running_loop()
    for number in range(options.responses):
        await loop.create_connection(partial(Client, path, number, seen), "127.0.0.1", ports[number % len(ports)])
    end = time.monotonic() + READY_S
    while seen.tokens < options.responses * options.tokens_per_s:
        if seen.refused or time.monotonic() > end:
            raise RuntimeError(seen.refused or f"{seen.tokens} tokens came within {READY_S:g} s")
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLE_S)
    began, tokens, events, busy_s = time.monotonic(), seen.tokens, seen.events, used_s(pids)
    seen.latencies_s.clear()
    await asyncio.sleep(options.measure_s)
    seconds, busy_s = time.monotonic() - began, used_s(pids) - busy_s
    tokens, events = seen.tokens - tokens, seen.events - events
    latencies = sorted(seen.latencies_s)
    return Relayed(
        name,
        options.instances,
        options.responses,
        round(tokens / seconds),
        round(events / seconds),
        round(busy_s / seconds, 3),
        round(1e6 * busy_s / events, 2),
        round(1000 * statistics.median(latencies), 2),
        round(1000 * latencies[int(0.99 * len(latencies))], 2),
    )


if __name__ == "__main__":
    main()
