"""A server that is asked by HTTP: its session, the bounds of its answers, and what its errors mean. I/O.

Control endpoints have no authentication, so only a loopback address is taken (`parsers.loopback_url`).
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec

from tensorhub_common.errors import BadPrompt
from tensorhub_runner.servers.server import ServerBusy, ServerLost, ServerUnfit

ANSWER_S_MAX: Final = 10.0
"""The bound of a question."""
HEALTH_S_MAX: Final = 5.0
"""The bound of asking whether it generates; after it the server is taken for lost."""
STAND_STILL_S_MAX: Final = 30.0
"""The bound of ending all streams: a step of the engine may be under way."""
LOAD_S_MAX: Final = 600.0
"""The bound of each call that writes weights."""
SILENCE_S_MAX: Final = 120.0
"""A stream without a token for so long is begun again. It alone: the server may have no room for it meanwhile."""
EVENT_BYTES_MAX: Final = 1 << 20
"""Limit of one event of a stream."""
ERROR_CHARS_MAX: Final = 500

_BUSY: Final = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
_REFUSED: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_CLOSED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
_DATA: Final = b"data:"
_encoder: Final = msgspec.json.Encoder()


class HttpServer:
    """What servers of all kinds have in common. `kind` and `options` stand in the errors."""

    kind: str
    options: str
    """How a server is started that has all endpoints."""
    health: str
    """The endpoint that tells whether it generates."""
    weights: str
    """The endpoint that tells which version it has."""

    def __init__(self, url: str, model: str = "") -> None:
        """Prepare. `url`: of its root, on this host. `model`: the name under which it has its model; empty: any."""
        self.url = url
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def is_healthy(self, version: int) -> bool:
        """Tell whether it generates, and says that it has this version."""
        try:
            async with self._asked("GET", self.health, HEALTH_S_MAX) as answer:
                if answer.status != HTTPStatus.OK:
                    return False
        except ServerLost:
            return False
        try:
            said = (await self._get(self.weights, HEALTH_S_MAX))["weight_version"]
        except (ServerLost, ServerUnfit):
            # A long step may be under way.
            return True
        return bool(said == str(version))

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()

    def _forget(self) -> None:
        """Take the process that answers next for another one, of which nothing is known."""

    def _lost(self, what: str) -> ServerLost:
        return ServerLost(f"the {self.kind} server at {self.url} {what}")

    async def _get(self, path: str, timeout_s: float = ANSWER_S_MAX) -> Any:  # noqa: ANN401 (JSON of theirs)
        async with self._asked("GET", path, timeout_s) as answer:
            await self._check(answer)
            return msgspec.json.decode(await answer.read())

    async def _post(self, path: str, timeout_s: float, body: object = None) -> None:
        async with self._asked("POST", path, timeout_s, body) as answer:
            await self._check(answer)

    async def _events(self, path: str, request: object) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. Raises `BadPrompt` and `ServerBusy` too."""
        bounds = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S_MAX, sock_read=SILENCE_S_MAX)
        async with self._asked("POST", path, None, request, bounds) as answer:
            if answer.status != HTTPStatus.OK:
                self._raise_refusal(answer.status, await _told(answer))
            await self._check(answer)
            while line := await self._line(answer):
                if not line.startswith(_DATA):
                    continue
                data = line.removeprefix(_DATA).strip()
                if data == b"[DONE]":
                    return
                yield data

    def _raise_refusal(self, status: int, told: str) -> None:
        """Raise what a request's status means; return where the server itself has failed."""
        if status in _BUSY:
            raise ServerBusy(f"the {self.kind} server at {self.url} takes no more requests: {told}")
        if status in _REFUSED:
            raise BadPrompt(f"{self.kind} refuses the request: {told}")

    async def _line(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            return await answer.content.readline()
        except TimeoutError:
            # The server computes others, or has no room for this one: it is begun again, and the others go on.
            return b""
        except ValueError:
            raise self._lost(f"sends an event of over {EVENT_BYTES_MAX} bytes") from None

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status in _CLOSED:
            raise ServerUnfit(
                f"the server at {self.url} has no {answer.url.path} for a runner: start {self.kind} with "
                f"{self.options}, and without --api-key"
            )
        if answer.status != HTTPStatus.OK:
            self._forget()
            raise self._lost(f"can't {answer.url.path[1:]}: {await _told(answer)}")

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        timeout_s: float | None,
        body: object = None,
        bounds: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            # As many connections as the runner has slots; aiohttp's own limit is below that. Each carries one request:
            # a server that closes an idle connection while a request is put into it would be taken for lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector, read_bufsize=EVENT_BYTES_MAX, json_serialize=_as_json
            )
        bounds = bounds or aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=bounds) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            self._forget()
            raise self._lost(f"does not answer: {str(why) or type(why).__name__}") from None


async def _told(answer: aiohttp.ClientResponse) -> str:
    """Return what an answer says went wrong, in short."""
    text = await answer.text()
    try:
        found = msgspec.json.decode(text)
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (msgspec.DecodeError, AttributeError):
        pass
    return text[:ERROR_CHARS_MAX] or f"status {answer.status}"


def _as_json(body: object) -> str:
    return _encoder.encode(body).decode()
