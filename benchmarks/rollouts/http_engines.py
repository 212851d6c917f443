"""Engines without a model behind HTTP: each streams tokens at a steady pace, as the servers of SGLang and vLLM do.

An event has what a trainer needs of new tokens, their numbers and log-probabilities, and when it was written. Real
servers send an event for each token and repeat more in each, so this is the least that a router may have to relay.

`python -m benchmarks.rollouts.http_engines COUNT TOKENS TOKENS_PER_S FLUSH_S` serves on as many ports until it is
killed, and writes the ports as a line of JSON.
"""

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Final

MODEL: Final = "policy"
LOGPROB: Final = b"-0.5"
"""Of each token: by it a client counts tokens."""
_EVENTS: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FACTS: Final = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model"}],
    "model_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "max_running_requests": 4096,
    "status": "ok",
}
"""What a router asks an engine before it sends requests there."""


class HttpEngine:
    """One engine: each request gets as many tokens."""

    def __init__(self, tokens: int, tokens_per_s: float, flush_s: float) -> None:
        self._tokens, self._tokens_per_s, self._flush_s = tokens, tokens_per_s, flush_s

    async def serve(self) -> int:
        """Listen on a free port, and return it."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        return int(server.sockets[0].getsockname()[1])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
                await reader.readexactly(int(fields.get(b"content-length", b"0")))
                if head.startswith(b"POST"):
                    await self._generate(writer)
                else:
                    body = json.dumps(_FACTS).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
        writer.close()

    async def _generate(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_EVENTS)
        began, made = time.monotonic(), 0
        while made < self._tokens:
            await asyncio.sleep(self._flush_s)
            now = time.monotonic()
            upto = min(self._tokens, int((now - began) * self._tokens_per_s))
            if upto > made:
                count = upto - made
                _write_event(
                    writer,
                    b'{"output_ids":[%b],"logprobs":[%b],"at":%.6f}'
                    % (b",".join([b"0"] * count), b",".join([LOGPROB] * count), now),
                )
                made = upto
        _write_event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")


def _write_event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def _main(count: int, tokens: int, tokens_per_s: float, flush_s: float) -> None:
    engine = HttpEngine(tokens, tokens_per_s, flush_s)
    ports = [await engine.serve() for _ in range(count)]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
