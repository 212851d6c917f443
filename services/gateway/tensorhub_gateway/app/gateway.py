"""A gateway in its trainer's process: sessions, the calls in them, and the web server before them. I/O.

The SDK finds this module by its name, since it depends on no service; `AsyncRollouts.gateway` makes a `Gateway`.

Always true: what `batches()` yields of a session are the tokens that its engines made, where they stood for them;
each has loss mask 1 in exactly one trajectory.
"""

import asyncio
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

import numpy as np
import uvicorn

from tensorhub import Response, Sampling
from tensorhub._rollouts.prompts import PROMPT_TOKENS_MAX
from tensorhub._rollouts.trajectories import Call, EndedSession, trajectory_of
from tensorhub.aio.session_line import EndedCall, SessionLine
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.runtime.supervision import Fault, Supervisor, log_only
from tensorhub_gateway.api.calls import CallAsked, SamplingAsked
from tensorhub_gateway.api.refusals import Refusal, bad, unavailable
from tensorhub_gateway.app.gateway_calls import GatewayCall, GatewayCalls
from tensorhub_gateway.chat.tokenizer import ChatTokenizer
from tensorhub_gateway.sessions.extension import (
    HISTORY,
    TEXT,
    Extension,
    Fork,
    Unrendered,
    extended_chat,
    extended_text,
)
from tensorhub_gateway.sessions.messages import for_template
from tensorhub_gateway.sessions.session import Asked, ChatAsked, Session, TextAsked, Turn
from tensorhub_gateway.sessions.table import End, SessionError, Sessions
from tensorhub_gateway.sessions.tools import HermesParser, NoTools, ToolParser

CALLS_MAX: Final = 8192
"""Limit of the calls that are under way."""
LOOK_S: Final = 0.5
"""How often idle sessions are looked for."""
CLOSE_S: Final = 10.0
"""So long calls that were cancelled, and what is to be acknowledged, are waited for when the gateway is closed."""
KEEP_ALIVE_S: Final = 75
"""So long a connection may be idle."""
BACKLOG: Final = 2048
SHUTDOWN_S: Final = 5

_NO_IDS: Final = np.empty(0, np.int32)
_WRONG: Final = {"unknown": 404, "over": 409, "full": 429, "calls": 409, "tokens": 409, "empty": 409, "differs": 409}

Result = TypeVar("Result")


class Gateway:
    """One gateway: `async with`, or as the SDK's `rollouts.gateway` says."""

    def __init__(
        self,
        make_line: Callable[[], SessionLine],
        tokenizer: Any,  # noqa: ANN401 (a directory, or a tokenizer of transformers)
        *,
        host: str,
        port: int,
        api_key: str | None,
        session_idle_s: float,
        call_s: float,
    ) -> None:
        """Prepare. The arguments are those of `AsyncRollouts.gateway`; `make_line` gives the line to its rollouts."""
        self.host, self.port, self.api_key, self.call_s = host, port, api_key, call_s
        """The port is that on which it listens, once it does."""
        self.sessions = Sessions(session_idle_s)
        self.began_at = int(time.time())
        self._make_line, self._given = make_line, tokenizer
        self._line: SessionLine | None = None
        self._work = Supervisor("gateway", on_fault=log_only)
        # A tokenizer is no thing for several threads.
        self._thread = ThreadPoolExecutor(1, "gateway-tokenizer")
        self._due = asyncio.Event()
        self._done_of: dict[str, list[tuple[Turn | None, EndedCall | RequestId]]] = {}
        """What has ended of each open session."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def url(self) -> str:
        """What clients take for OpenAI's base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    @property
    def model(self) -> str:
        """The one model that it has."""
        return self.line.model

    @property
    def line(self) -> SessionLine:
        """The line to the rollouts."""
        assert self._line is not None
        return self._line

    async def __aenter__(self) -> Self:
        """Listen. Raises `BadCommand` where the tokenizer can't be used, the port is taken, or one is open already."""
        try:
            self.tokenizer = await self._in_thread(partial(ChatTokenizer, self._given))
            listening = _listening(self.host, self.port)
            try:
                self._line = line = self._make_line()
            except BaseException:
                listening.close()
                raise
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self.port = listening.getsockname()[1]
        self.calls = GatewayCalls(line, self._take_orphan)
        self.calls.start(self._work, self._failed)
        self._work.start(self._end_sessions_always(), "ending sessions", on_fault=self._failed)
        from tensorhub_gateway.app.http import web_application  # noqa: PLC0415 (it imports this module)

        config = uvicorn.Config(
            web_application(self),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            server_header=False,
        )
        self._server = _Server(config)
        self._serving = self._work.start(self._server.serve([listening]), "serving HTTP", on_fault=self._failed)
        return self

    def _failed(self, fault: Fault) -> None:
        """Take no further call once a loop has failed: its calls would wait for nothing."""
        self._is_closing = True
        self.calls.fail_all(unavailable(500, f"the gateway has failed: {fault}", "internal"))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no further call, cancel those that are under way, and hand over all sessions as they are."""
        try:
            if self._server is not None and self._serving is not None:
                self._is_closing = self._server.should_exit = True
                self.calls.fail_all(unavailable(503, "the gateway is being closed", "unavailable"))
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await asyncio.wait({self._serving})
                        await self.calls.wait_none()
            for session in [*self.sessions.open.values()]:
                self._end(session, "reward" if session.is_final else "closed")
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.calls.wait_acknowledged()
        finally:
            await self._work.close()
            self._thread.shutdown(wait=False)
            if self._line is not None:
                self._line.close()

    # ------------------------------------------------------------------------------------------ calls

    async def begin(self, id_: str, asked: CallAsked) -> GatewayCall:
        """Begin a call of a session, from the tokens of the call before it. Raises `Refusal`."""
        if asked.model != self.model:
            raise Refusal(
                404,
                f"there is no model {asked.model!r:.80}: take {self.model!r}",
                code="model_not_found",
                param="model",
            )
        if self._is_closing:
            raise unavailable(503, "the gateway takes no calls: it is being closed, or has failed", "unavailable")
        if self.calls.count >= CALLS_MAX:
            raise Refusal(429, f"{CALLS_MAX} calls are under way: call again later", code="rate_limit_exceeded")
        sampling = self._sampling(asked.sampling)
        is_new = id_ not in self.sessions.open
        with _refusing():
            session = self.sessions.call(id_, time.monotonic())
        if is_new:
            self.line.begin(id_)
        try:
            turn = await self._turn(session, asked)
        except BaseException:
            self._leave(session)
            raise
        call = GatewayCall(session, turn, sampling, is_followed=asked.is_streamed)
        self.calls.begin(call)
        return call

    async def _turn(self, session: Session, asked: CallAsked) -> Turn:
        before = session.find(asked.asked)
        inserted, texts, forked = await self._in_thread(partial(self._inserted, session, before, asked))
        before = before if forked is None else None
        count = len(inserted) + (0 if before is None else len(before.prompt()) + len(before.made))
        if not 0 < count <= PROMPT_TOKENS_MAX:
            raise bad(
                "messages",
                f"the call has {count} tokens: one to {PROMPT_TOKENS_MAX} are possible",
                "context_length_exceeded",
            )
        return session.begin(asked.asked, before, forked, inserted, texts)

    def _inserted(
        self, session: Session, before: Turn | None, asked: CallAsked
    ) -> tuple["array[int]", tuple[str, str], str | None]:
        """Return a call's own tokens, their text and what the template wrote, and why it forks.

        It runs in the tokenizer's thread.
        """
        call = asked.asked
        if isinstance(call, TextAsked) and call.token_ids is not None:
            ids = call.token_ids if before is None else call.token_ids[len(before.prompt()) + len(before.made) :]
            return ids, ("", ""), self._forked(session, before, TEXT)
        found: Extension | Fork | None = None
        if before is not None and isinstance(call, ChatAsked):
            parser = self.parser(asked)
            found = extended_chat(before, call, self.tokenizer.render, lambda text: parser.parse(text, 0))
        elif before is not None and isinstance(call, TextAsked):
            found = extended_text(before, call)
        if isinstance(found, Extension):
            return self.tokenizer.ids(found.inserted), (found.inserted, found.written), None
        text = self._rendered(call)
        fork = found or (HISTORY if isinstance(call, ChatAsked) else TEXT)
        return self.tokenizer.ids(text), (text, text), self._forked(session, None, fork)

    @staticmethod
    def _forked(session: Session, before: Turn | None, fork: Fork) -> str | None:
        return None if before is not None or not any(each.state == "made" for each in session.turns) else fork.why

    def _rendered(self, call: Asked) -> str:
        if isinstance(call, TextAsked):
            assert call.text is not None
            return call.text
        try:
            return self.tokenizer.render([for_template(each) for each in call.messages], call.tools)
        except Unrendered as why:
            raise bad("messages", str(why)) from None

    def parser(self, asked: CallAsked) -> ToolParser:
        """Return what reads calls of tools in an answer."""
        return HermesParser() if asked.may_call_tools else NoTools()

    def _sampling(self, asked: SamplingAsked) -> Sampling:
        base = self.line.sampling
        ends = base.stop_token_ids or self.tokenizer.end_ids
        given = {
            name: value
            for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")
            if (value := getattr(asked, name)) is not None
        }
        if asked.stop_token_ids:
            ends = tuple(dict.fromkeys((*ends, *asked.stop_token_ids)))
        sampling = replace(base, **given, stop_token_ids=ends)
        try:
            sampling.checked()
        except TensorHubError as why:
            raise bad(None, str(why)) from None
        return sampling

    def answer(self, call: GatewayCall, asked: CallAsked, text: str) -> None:
        """Note that a call that has ended is being answered: from now on others may go on from it."""
        assert call.ended is not None
        made = call.ended.response
        stops = made.finish_reason == "stop" and len(made.token_ids) > 0
        stop_text = self.tokenizer.text(made.token_ids[-1:].tolist()) if stops else ""
        reply = self.parser(asked).parse(text, call.turn.number)
        call.session.make(call.turn, array("i", made.token_ids.tolist()), text, stop_text, reply)

    def end(self, call: GatewayCall) -> None:
        """Note that nobody waits for a call any more, answered or not."""
        session, turn = call.session, call.turn
        if turn.state == "open":
            session.void(turn)
        if call.ended is None:
            self.calls.give_up(call)
            self._work.start(self._wait_end(call), "waiting for the end of a call")
        else:
            self._take_end(call)

    async def _wait_end(self, call: GatewayCall) -> None:
        """Wait for the end of a call that was given up: it is done with its session."""
        await call.wait()
        self._take_end(call)

    def _take_end(self, call: GatewayCall) -> None:
        if call.ended is not None:
            # Its prompt is in the session once, not in each of its calls.
            response = replace(call.ended.response, prompt_ids=_NO_IDS)
            self._done_of.setdefault(call.session.id, []).append((call.turn, call.ended._replace(response=response)))
        self._leave(call.session)

    def _take_orphan(self, session: str | None, request: RequestId) -> None:
        """Take what has ended and nobody waits for: it is done with its session, or at once."""
        if session in self.sessions.open:
            self._done_of.setdefault(session, []).append((None, request))
        else:
            self.calls.acknowledge(request)

    def _leave(self, session: Session) -> None:
        self.sessions.leave(session, time.monotonic())
        if session.is_final and not session.open:
            self._due.set()

    # ------------------------------------------------------------------------------------------ sessions

    def open_session(self, id_: str, metadata: object) -> None:
        """Open a session before its first call. Raises `Refusal`."""
        with _refusing():
            self.sessions.begin(id_, time.monotonic(), metadata)
        self.line.begin(id_)

    def reward(self, id_: str, reward: float, *, is_final: bool) -> None:
        """Take a reward. Raises `Refusal`."""
        with _refusing():
            self.sessions.reward(id_, reward, time.monotonic(), is_final=is_final)
        self._due.set()

    async def _end_sessions_always(self) -> NoReturn:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()
            self._due.clear()
            for session, end in self.sessions.due(time.monotonic()):
                self._end(session, end)

    def _end(self, session: Session, end: End) -> None:
        self.sessions.end(session)
        ended = self._done_of.pop(session.id, [])
        requests = tuple(each.request if isinstance(each, EndedCall) else each for _, each in ended)
        responses = {turn: each.response for turn, each in ended if turn is not None and isinstance(each, EndedCall)}
        trajectories = tuple(_trajectories(session, responses, end))
        self.line.deliver(EndedSession(session.id, requests, trajectories))
        if not trajectories:
            # `batches()` yields nothing of them.
            self.calls.acknowledge(*requests)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._thread.submit(work))


def _trajectories(session: Session, responses: dict[Turn, Response], end: End) -> Iterator[Response]:
    for index, branch in enumerate(session.branches()):
        leaf = branch.turns[-1][0]
        whole = np.array(leaf.prompt(), np.int32)
        calls = []
        for turn, is_trained in branch.turns:
            made = replace(responses[turn], prompt_ids=whole[: len(turn.prompt())])
            calls.append(Call(made, is_trained, turn.forked))
        yield trajectory_of(session.id, index, calls, reward=session.reward, end=end, metadata=session.metadata)


@contextmanager
def _refusing() -> Iterator[None]:
    """Say in HTTP's terms what a session can't do."""
    try:
        yield
    except SessionError as why:
        raise Refusal(
            _WRONG[why.wrong], why.message, code=f"session_{why.wrong}", param="X-TensorHub-Session"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Raises `BadCommand`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(found[0], socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(found[4])
            # From here on a client that comes waits, before the server runs.
            bound.listen(BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as why:
        raise BadCommand(f"the gateway can't listen at {host}:{port} ({why}): take another port, or 0") from None
    return bound


class _Server(uvicorn.Server):
    """A server beside other work of its process, whose signals are not its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
