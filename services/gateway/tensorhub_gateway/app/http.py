"""The gateway's HTTP: OpenAI's paths, and those of sessions. I/O.

Always true: a call whose client goes away is given up, whatever it waits for; an error before the first token has a
status of its own, and one behind it ends the stream as OpenAI's clients expect it.
"""

import asyncio
import hmac
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tensorhub_common.runtime.supervision import Supervisor, log_only
from tensorhub_gateway.api import answers
from tensorhub_gateway.api.calls import (
    BODY_BYTES_MAX,
    CallAsked,
    read_chat,
    read_completion,
    read_reward,
    read_session,
    session_id,
)
from tensorhub_gateway.api.refusals import Refusal, bad, unavailable
from tensorhub_gateway.app.gateway_calls import GatewayCall
from tensorhub_gateway.chat.tokenizer import TextStream
from tensorhub_gateway.sessions.session import ChatAsked
from tensorhub_gateway.sessions.tools import HeldText

if TYPE_CHECKING:
    from tensorhub_gateway.app.gateway import Gateway

REFUSE_S_MAX: Final = 5.0
"""So long a client is given to take the word that its call has no answer."""
SESSION_HEADER: Final = "x-tensorhub-session"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"

Handler = Callable[[Request], Awaitable[Response]]


def web_application(gateway: "Gateway") -> Starlette:
    """Return the application of a gateway."""
    paths = _Paths(gateway)
    routes = [
        Route("/health", paths.health),
        Route("/v1/models", paths.guarded(paths.models)),
        Route("/v1/sessions", paths.guarded(paths.open_session), methods=["POST"]),
        Route("/v1/sessions/{session}", paths.guarded(paths.session)),
        Route("/v1/sessions/{session}/reward", paths.guarded(paths.reward), methods=["POST"]),
        *(
            Route(f"{prefix}/v1/{what}", paths.guarded(answer), methods=["POST"])
            for prefix in ("", "/sessions/{session}")
            for what, answer in (("chat/completions", paths.chat), ("completions", paths.completions))
        ),
        Route("/sessions/{session}/v1/models", paths.guarded(paths.models)),
    ]
    return Starlette(routes=routes, exception_handlers={Refusal: _refused, HTTPException: _not_found})


class _Paths:
    """What each path answers."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def guarded(self, handler: Handler) -> Handler:
        """Ask for the key before a handler, where there is one."""

        async def guarded(request: Request) -> Response:
            key = self._gateway.api_key
            sent = request.headers.get("authorization", "")
            if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
                raise Refusal(401, "the API key is missing, or another one", code="invalid_api_key")
            return await handler(request)

        return guarded

    async def health(self, _: Request) -> Response:
        """Answer while the gateway is open."""
        gateway = self._gateway
        return _json({"status": "ok", "sessions": len(gateway.sessions.open), "calls": gateway.calls.count})

    async def models(self, _: Request) -> Response:
        """Say which model there is."""
        gateway = self._gateway
        model = {"id": gateway.model, "object": "model", "created": gateway.began_at, "owned_by": "tensorhub"}
        return _json({"object": "list", "data": [model]})

    async def open_session(self, request: Request) -> Response:
        """Open a session."""
        asked = read_session(await _body(request))
        id_ = secrets.token_hex(12) if asked.id is None else session_id(asked.id)
        self._gateway.open_session(id_, asked.metadata)
        return _json({"id": id_, "object": "session"}, 201)

    async def session(self, request: Request) -> Response:
        """Say how a session stands."""
        id_, sessions = session_id(request.path_params["session"]), self._gateway.sessions
        found = sessions.open.get(id_)
        if found is None:
            if not sessions.is_over(id_):
                raise Refusal(404, f"there is no session {id_!r}: its first call begins it", code="session_unknown")
            return _json({"id": id_, "object": "session", "state": "over"})
        turns = [
            {
                "turn": each.number,
                "after": None if each.before is None else each.before.number,
                "forked": each.forked,
                "state": each.state,
                "tokens": len(each.made),
            }
            for each in found.turns
        ]
        said = {"id": id_, "object": "session", "state": "open", "reward": found.reward, "turns": turns}
        return _json({**said, "final": found.is_final, "open_calls": found.open})

    async def reward(self, request: Request) -> Response:
        """Take a session's reward."""
        asked = read_reward(await _body(request))
        id_ = session_id(request.path_params["session"])
        self._gateway.reward(id_, asked.reward, is_final=asked.is_final)
        return _json({"id": id_, "object": "session", "reward": asked.reward, "final": asked.is_final})

    async def chat(self, request: Request) -> Response:
        """Answer messages."""
        return _CallResponse(self._gateway, _session_of(request), read_chat(await _body(request)))

    async def completions(self, request: Request) -> Response:
        """Go on from text or token ids."""
        return _CallResponse(self._gateway, _session_of(request), read_completion(await _body(request)))


class _CallResponse(Response):
    """The answer to one call, whole or as a stream."""

    def __init__(self, gateway: "Gateway", session: str, asked: CallAsked) -> None:
        super().__init__()
        self._gateway, self._session, self._asked = gateway, session, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and give the call up where the client goes away before."""
        work = Supervisor("a call of the gateway", on_fault=log_only)
        answering = work.start(self._answer(scope, receive, send), "answering", awaited=True)
        leaving = work.start(_gone(receive), "waiting for the client to leave", awaited=True)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            await work.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            call = await gateway.begin(self._session, self._asked)
        except Refusal as why:
            await _json(why.body(), why.status)(scope, receive, send)
            return
        answer = _Answer(gateway, call, self._asked)
        try:
            async with asyncio.timeout(gateway.call_s):
                if self._asked.is_streamed:
                    await self._stream(answer, scope, receive, send)
                else:
                    await _json(await answer.whole())(scope, receive, send)
        except TimeoutError:
            late = unavailable(504, f"no end came within {gateway.call_s:g} s: see 'tensorhub rollouts'", "timeout")
            await self._refuse(late, answer, scope, receive, send)
        except Refusal as why:
            await self._refuse(why, answer, scope, receive, send)
        finally:
            gateway.end(call)

    @staticmethod
    async def _refuse(why: Refusal, answer: "_Answer", scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has stopped reading would hold up the end of its session.
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSE_S_MAX):
                if answer.has_begun:
                    # OpenAI's clients raise this; a stream that just ends would be taken for whole by some.
                    await send({"type": "http.response.body", "body": _event(why.body())})
                else:
                    await _json(why.body(), why.status)(scope, receive, send)

    @staticmethod
    async def _stream(answer: "_Answer", scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        async for body in answer.parts():
            if not answer.has_begun:
                answer.has_begun = True
                headers = [(b"content-type", _EVENTS.encode()), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": _event(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class _Answer:
    """Makes the bodies of one answer from a call that is under way."""

    def __init__(self, gateway: "Gateway", call: GatewayCall, asked: CallAsked) -> None:
        self.has_begun = False
        """Whether something of a stream was sent."""
        self._gateway, self._call, self._asked = gateway, call, asked
        self._of = answers.Answered(
            f"{'chatcmpl' if isinstance(asked.asked, ChatAsked) else 'cmpl'}-{secrets.token_hex(12)}",
            int(time.time()),
            gateway.model,
            isinstance(asked.asked, ChatAsked),
            call.session.id,
            call.turn.number,
            call.turn.forked,
        )

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer once the call has ended. Raises `Refusal`."""
        call = self._call
        while not self._is_over():
            await self._news()
        ids, logprobs = self._end()
        said = TextStream(self._gateway.tokenizer)
        text = said.take(self._visible(ids)) + said.rest()
        self._gateway.answer(call, self._asked, text)
        return answers.whole(
            self._of,
            _reply_of(call),
            self._finish(),
            answers.Usage(len(call.prompt_ids), len(ids)),
            tokens=self._tokens(ids, logprobs),
            ids=answers.Ids(call.prompt_ids, ids) if self._asked.has_token_ids else None,
        )

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer's parts as tokens come. Raises `Refusal`."""
        call, asked, gateway = self._call, self._asked, self._gateway
        said = TextStream(gateway.tokenizer)
        held = HeldText(gateway.parser(asked).marker)
        texts, at, is_first = list[str](), 0, True
        while not self._is_over():
            new, logprobs = call.token_ids[at:], call.logprobs[at:]
            at += len(new)
            text = said.take(self._visible(new))
            texts.append(text)
            shown = held.take(text)
            if shown or (new and (asked.has_logprobs or asked.has_token_ids)):
                yield self._chunk(shown, new, logprobs, is_first=is_first)
                is_first = False
            # What came while a part was sent has been told already.
            if len(call.token_ids) == at and call.ended is None and call.error is None:
                await self._news()
        ids, all_logprobs = self._end()
        new, logprobs = ids[at:], all_logprobs[at:]
        text = said.take(self._visible(new)) + said.rest()
        texts.append(text)
        gateway.answer(call, asked, "".join(texts))
        reply = _reply_of(call)
        shown = held.take(text) + ("" if reply.tool_calls else held.rest())
        if shown or new or is_first:
            yield self._chunk(shown, new, logprobs, is_first=is_first)
        if reply.tool_calls:
            yield answers.chunk(self._of, "", reply=reply)
        yield answers.chunk(self._of, "", finish=self._finish())
        if asked.has_usage:
            yield answers.usage_chunk(self._of, answers.Usage(len(call.prompt_ids), len(ids)))

    def _chunk(self, text: str, ids: "array[int]", logprobs: "array[float]", *, is_first: bool) -> dict[str, Any]:
        shown = answers.Ids(self._call.prompt_ids, ids) if self._asked.has_token_ids else None
        return answers.chunk(self._of, text, is_first=is_first, tokens=self._tokens(ids, logprobs), ids=shown)

    def _is_over(self) -> bool:
        call = self._call
        if call.error is not None:
            raise call.error
        return call.ended is not None

    async def _news(self) -> None:
        self._call.news.clear()
        await self._call.news.wait()

    def _end(self) -> tuple["array[int]", "array[float]"]:
        """Return all tokens and log-probabilities of a call that has ended. Raises `Refusal` where it has no answer."""
        assert self._call.ended is not None
        made = self._call.ended.response
        match made.finish_reason:
            case "failed":
                raise unavailable(503, f"the answer could not be made: {made.error}", "failed")
            case "cancelled":
                raise unavailable(503, "the call was cancelled by its trainer", "cancelled")
        return array("i", made.token_ids.tolist()), array("f", made.logprobs.tolist())

    def _visible(self, ids: "array[int]") -> "array[int]":
        """Return tokens without the one that ended the answer."""
        return ids[:-1] if ids and ids[-1] in self._call.sampling.stop_token_ids else ids

    def _finish(self) -> answers.Finish:
        assert self._call.ended is not None
        if _reply_of(self._call).tool_calls:
            return "tool_calls"
        return "stop" if self._call.ended.response.finish_reason == "stop" else "length"

    def _tokens(self, ids: "array[int]", logprobs: "array[float]") -> Sequence[answers.Token] | None:
        if not self._asked.has_logprobs:
            return None
        text = self._gateway.tokenizer.text
        return [answers.Token(text([each]), logprob) for each, logprob in zip(ids, logprobs, strict=True)]


def _reply_of(call: GatewayCall) -> Any:  # noqa: ANN401 (a reply, once the call is answered)
    assert call.turn.reply is not None
    return call.turn.reply


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Return a request's body. Raises `Refusal` for one that is too long."""
    parts, nbytes = [], 0
    with suppress(ClientDisconnect):
        async for part in request.stream():
            parts.append(part)
            nbytes += len(part)
            if nbytes > BODY_BYTES_MAX:
                raise Refusal(413, f"the body has more than {BODY_BYTES_MAX} bytes", code="too_large")
    return b"".join(parts)


def _session_of(request: Request) -> str:
    given = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
    if given is None:
        raise bad(
            "X-TensorHub-Session",
            "the call is of no session: send the header X-TensorHub-Session, or take /sessions/<id>/v1 for base URL",
            "session_missing",
        )
    return session_id(given)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=_JSON)


async def _refused(_: Request, why: Exception) -> Response:
    assert isinstance(why, Refusal)
    return _json(why.body(), why.status)


async def _not_found(request: Request, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    refusal = Refusal(why.status_code, f"{request.method} {request.url.path} is not known here", code="not_found")
    return _json(refusal.body(), why.status_code)
