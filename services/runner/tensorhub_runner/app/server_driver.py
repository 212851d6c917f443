"""An engine that is a server, driven by the core: a stream for each attempt, and what came of all as one step. I/O.

Invariants:
- A token is told of under the version that was loaded when its stream began: none is told of between `stand_still`
  and `weights_changed`, and streams begin only outside of it.
- A stream that ends as interrupted, or without a reason, is begun again behind the tokens that came, as long as the
  core has not stopped the attempt.
- Where the server takes tokens to be of another version, somebody else has changed its weights. All responses that have
  tokens of it since it was loaded begin anew.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn, cast

from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Finished, RunEngine
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_runner.app.engine_driver import OnStepped, ignore_steps
from tensorhub_runner.core.runner_events import Begin, StepTokens, Stop
from tensorhub_runner.servers.server import Server, ServerBusy, ServerLost, ServerUnfit, Streamed, WeightSource

TELL_S: Final = 0.02
"""What came is told of so often."""
HEALTH_S: Final = 0.5
"""The server is asked so often whether it generates."""
AGAIN_S: Final = 0.2
"""The pause before a stream is begun again that got no token."""
FRUITLESS_MAX: Final = 50
"""Limit of the streams of one attempt in a row that got no token: ten seconds of a server that takes nothing."""
STREAMS_END_S_MAX: Final = 10.0
"""So long streams are given to end by themselves once the server stands still; then they are cut, with what came."""

_log: Final = logger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """One attempt that the core has begun."""

    begin: Begin
    context: list[int]
    """The prompt and all tokens of the response that are here."""
    made: int
    """How many of these are the response's."""
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """What came since it was told of."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finished: Finished | None = None
    stream: asyncio.Task[None] | None = None
    came: int = 0
    """How many tokens have come since the weights were loaded."""
    fruitless: int = 0
    is_again: bool = False
    """Whether its cache was computed anew since the weights changed."""


class ServerDriver:
    """One server; `run` is its task."""

    def __init__(self, server: Server) -> None:
        """Prepare. Nothing begins before the first `load`."""
        self.on_stepped: OnStepped = ignore_steps
        self.between_steps = asyncio.Lock()
        self.busy_s = 0.0
        self.recomputed = 0
        self.version: int | None = None
        """What the server's model holds, as far as it can be trusted; None: nothing runs there."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called once when the version that was here can't be trusted any more."""
        self._server = server
        self._work = Supervisor("an engine's server")
        self._open: dict[Attempt, _Open] = {}
        self._commands: list[Begin | Stop] = []
        self._news = asyncio.Event()
        self._told_at = time.perf_counter()
        self._is_still = False

    def do(self, command: Begin | Stop) -> None:
        """Begin or stop an attempt."""
        self._commands.append(command)
        if isinstance(command, Begin):
            self.recomputed += len(command.tokens) // TOKEN_BYTES
        self._news.set()

    async def run(self) -> NoReturn:
        """Begin streams, and tell of what comes."""
        self._work.start(self._watch(), "asking whether the server generates")
        while True:
            await self._news.wait()
            async with self.between_steps:
                self._news.clear()
                self._obey()
                self._tell()
            await asyncio.sleep(TELL_S)

    # ------------------------------------------------------------------------------------------ weights

    async def stand_still(self) -> None:
        """Have all streams end, and tell of their last tokens. A server that does not answer makes none either."""
        self._is_still = True
        streams = [each.stream for each in self._open.values() if each.stream is not None]
        try:
            await self._server.stand_still()
            # One without a token may not have reached the server before: there it would wait until the server goes on.
            begun = [each.stream for each in self._open.values() if each.stream is not None and each.came]
            if begun:
                await asyncio.wait(begun, timeout=STREAMS_END_S_MAX)
        except TensorHubError as why:
            self._lost(why)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        self._tell()
        self.version = None

    async def load(self, source: WeightSource, version: int) -> None:
        """Have the server load a version. It stands still."""
        await self._server.check()
        # A server that came anew has not been told to stand still.
        await self._server.stand_still()
        await self._server.load(source, version)
        self.version = version

    async def weights_changed(self) -> RunEngine | None:
        """Have the server make tokens again. Without a version it is left as it stands."""
        if self.version is None:
            return None
        try:
            await self._server.go_on()
            engine = await self._server.check()
        except TensorHubError as why:
            self._lost(why)
            return None
        self._is_still = False
        for each in self._open.values():
            each.is_again, each.came = True, 0
        self._news.set()
        return engine

    # ------------------------------------------------------------------------------------------ attempts

    def _obey(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            match command:
                case Stop(attempt=attempt):
                    self._stop(attempt)
                case Begin(attempt=attempt):
                    prompt, tokens = (_ints(each) for each in (command.prompt, command.tokens))
                    self._open[attempt] = _Open(command, [*prompt, *tokens], len(tokens))
        if self.version is None:
            return
        for each in self._open.values():
            if each.stream is None and each.finished is None:
                each.stream = self._work.start(self._follow(each, self.version), "reading a stream")

    def _stop(self, attempt: Attempt) -> None:
        left = self._open.pop(attempt, None)
        if left is not None and left.stream is not None:
            left.stream.cancel()

    def _tell(self) -> None:
        """Tell of all that came since it was told last."""
        made, counts = [], []
        for attempt, each in [*self._open.items()]:
            if each.tokens or each.finished is not None:
                tokens, logprobs = each.tokens.tobytes(), each.logprobs.tobytes()
                made.append(StepTokens(attempt, tokens, logprobs, each.finished, each.is_again))
                counts.append(len(each.tokens))
                each.tokens, each.logprobs = array("i"), array("f")
            if each.finished is not None:
                del self._open[attempt]
        now = time.perf_counter()
        took_s, self._told_at = now - self._told_at, now
        if made:
            self.busy_s += took_s
            # As if the server's steps, of one token each, were one step: so long one takes.
            self.on_stepped(tuple(made), took_s / max(1.0, sum(counts) / len(counts)))

    async def _follow(self, each: _Open, version: int) -> None:
        """Read the stream of an attempt until it ends, however it ends."""
        before = each.came
        try:
            name = f"{each.begin.attempt.term}-{each.begin.attempt.n}"
            stream = self._server.generate(name, each.context, each.begin.sampling, each.made)
            async with aclosing(cast("AsyncGenerator[Streamed, None]", stream)) as streamed:
                async for new in streamed:
                    self._take(each, new, version)
        except (ServerLost, ServerUnfit) as why:
            self._lost(why)
        except ServerBusy as why:
            _log.debug("the server is busy", why=str(why))
        except TensorHubError as why:
            self._fail(each, str(why))
        finally:
            each.stream = None
        if each.finished is None and self.version is not None:
            is_fruitless = each.came == before
            each.fruitless = each.fruitless + 1 if is_fruitless else 0
            if each.fruitless >= FRUITLESS_MAX:
                self._fail(each, f"the server has ended {FRUITLESS_MAX} streams in a row without a token")
            elif is_fruitless:
                await asyncio.sleep(AGAIN_S)
        self._news.set()

    def _take(self, each: _Open, new: Streamed, version: int) -> None:
        each.tokens.extend(new.tokens)
        each.logprobs.extend(new.logprobs)
        each.context += new.tokens
        each.made += len(new.tokens)
        each.came += len(new.tokens)
        if new.reason is not None:
            others = {said for said in new.versions if said != str(version)}
            if others:
                # Nor is it known what the tokens of others are of. What was told of them goes too: they begin anew.
                for one in self._open.values():
                    if one.came:
                        one.tokens, one.logprobs = array("i"), array("f")
                        one.finished = Finished(one.begin.attempt, 0, "restart")
                self._lost(
                    ServerLost(f"the server says that its tokens are of version {min(others)}, not of {version}")
                )
            elif new.reason != "interrupted":
                each.finished = Finished(each.begin.attempt, 0, new.reason)
        if new.tokens or each.finished is not None:
            self._news.set()

    def _fail(self, each: _Open, why: str) -> None:
        each.finished = Finished(each.begin.attempt, 0, "failed", why)
        self._news.set()

    # ------------------------------------------------------------------------------------------ the server

    async def _watch(self) -> NoReturn:
        """Find out that the server is gone also while nothing runs there."""
        while True:
            await asyncio.sleep(HEALTH_S)
            version = self.version
            if version is None or self._is_still or await self._server.is_healthy(version):
                continue
            # Meanwhile it may have been told to stand still, or to load another one.
            if self.version == version and not self._is_still:
                self._lost(ServerLost("the server is not healthy, or has another version than it was given"))

    def _lost(self, why: TensorHubError) -> None:
        if self.version is None:
            return
        _log.warning("the engine's server is lost", why=str(why))
        self.version = None
        if not self._is_still:
            # What came before is worth keeping: others go on behind it.
            self._tell()
            self.on_lost()

    async def leave(self, attempts: Iterable[Attempt]) -> None:  # noqa: ARG002 (all are here that were begun)
        """Cut all streams, and begin none."""
        await self.between_steps.acquire()
        self._commands.clear()
        for attempt in [*self._open]:
            self._stop(attempt)

    async def close(self) -> None:
        """Cut all streams, and let go of the server, which goes on by itself."""
        for attempt in [*self._open]:
            self._stop(attempt)
        await self._work.close()
        await self._server.close()


def _ints(data: bytes) -> "array[int]":
    found: array[int] = array("i")
    with suppress(ValueError):
        found.frombytes(data)
    return found
