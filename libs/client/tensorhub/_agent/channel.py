"""The connection to an agent that comes back by itself.

An agent that restarts, or that `tensorhub up` restarts, listens on the same socket again a moment later. So the
channel dials again for as long as its session lives; its users wait, within a bound, for it to be up.

Always true: `on_up` is called after each handshake and `on_down` after each end of a connection, in turns; nothing is
sent before the handshake is done; in a child of `fork` the link holds no socket and `check` raises.
"""

import asyncio
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tensorhub._agent.connection import Connection, OnFrame, dial
from tensorhub.errors import closed_error
from tensorhub_common.errors import AgentUnavailable, BadCommand, TensorHubError, from_code
from tensorhub_common.observability import logs
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL, Speaks, agreed, speaks
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.worker import Attach, Attached, AttachRefused, Frame, FromAgent
from tensorhub_common.runtime.release import release
from tensorhub_common.runtime.supervision import Fault, Supervisor

ATTACH_S: Final = 5.0
DRAIN_S: Final = 0.2
"""How long the end of a channel waits for what was sent before it to go out: spans, which have no answer."""

RECONNECT_WAIT_S: Final = 0.05
RECONNECT_WAIT_MAX_S: Final = 0.5

log = logs.logger(__name__)


class ChannelLost(Exception):
    """There is no connection, or it ended while an answer was awaited. No caller of the SDK ever sees it."""


class AgentChannel:
    """The way to one agent, for one job. It belongs to the event loop that made it."""

    def __init__(
        self,
        socket_path: Path,
        job: str,
        on_frame: OnFrame,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        last_words: Callable[[], None] | None = None,
    ) -> None:
        self.work = Supervisor(f"the hub of job {job!r} in this process")
        """Runs all that goes on beside the calls, of the link and of what is kept over it."""
        self.socket_path = socket_path
        self.job = job
        self.agent: Attached | None = None
        self.reason = "it was never reached"
        self.epoch = 0
        """Counts the connections, so that work for an earlier one can tell that it is no longer wanted."""
        self._on_frame, self._on_up, self._on_down = on_frame, on_up, on_down
        self._last_words = last_words
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._hello: asyncio.Future[Attached] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        _links.add(self)

    @property
    def is_up(self) -> bool:
        """Whether the agent serves this connection now."""
        return self._connection is not None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the link."""
        return os.getpid() != self._pid

    def send(self, frame: Frame, *fds: int) -> None:
        """Send a frame, and with it descriptors, which stay the caller's.

        Raises `ChannelLost` without a connection, `AgentUnavailable` when the agent doesn't read.
        """
        if self._connection is None:
            raise ChannelLost(self.reason)
        self._connection.send(frame, *fds)

    # ------------------------------------------------------------------------------------------------- dialling

    async def open(self, timeout_s: float) -> Attached:
        """Reach the agent for the first time. Raises `AgentUnavailable` at the bound, or the agent's refusal."""
        deadline = self._loop.time() + timeout_s
        wait_s = RECONNECT_WAIT_S
        while True:
            try:
                agent = await self._connect(deadline)
                break
            except OSError as error:
                self.reason = str(error)
            if self._loop.time() + wait_s >= deadline:
                raise self.unavailable()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_WAIT_MAX_S)
        self._keep_up()
        return agent

    def _keep_up(self) -> None:
        self.work.start(self._keep(), "connecting to the agent again", self._keep_up_later)

    def _keep_up_later(self, _: Fault) -> None:
        """A fault of this program must not leave the shards without their agent for good."""
        self.work.call_later(RECONNECT_WAIT_MAX_S, self._keep_up, what="connecting to the agent again")

    async def _connect(self, deadline: float) -> Attached:
        """Connect and shake hands. Raises `OSError` (`TimeoutError` is one), or the agent's refusal."""
        connection: Connection | None = None
        self._hello = self._loop.create_future()
        try:
            async with asyncio.timeout_at(deadline):
                connection = await dial(self.socket_path, self._take, self._end, self.work, self._last_words)
                connection.send(Attach(protocol=OLDEST_PROTOCOL, newest=PROTOCOL, release=release(), job=self.job))
                self.agent = await self._hello
        except TimeoutError:
            raise TimeoutError("the agent did not answer in time") from None
        except ChannelLost as error:
            raise ConnectionError(str(error)) from None
        else:
            if not connection.is_open:
                raise ConnectionError(self.reason)
            self._connection = connection
            self.epoch += 1
            self.notify()
            self._on_up()
            return self.agent
        finally:
            self._hello = None
            if connection is not None and self._connection is not connection:
                connection.close()

    async def _keep(self) -> None:
        """Whenever the connection has ended, make it anew."""
        while True:
            await self.until(lambda: self._connection is None)
            wait_s = RECONNECT_WAIT_S
            while self._connection is None:
                try:
                    await self._connect(self._loop.time() + ATTACH_S)
                except (OSError, TensorHubError) as error:
                    self.reason = str(error)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, RECONNECT_WAIT_MAX_S)
            log.info("attached to the agent again", socket=str(self.socket_path))

    def _take(self, frame: FromAgent, fds: tuple[int, ...]) -> None:
        if self._hello is None or self._hello.done():
            self._on_frame(frame, fds)
        elif isinstance(frame, Attached):
            try:
                agent = Speaks(f"agent {frame.agent}", frame.protocol, frame.newest, frame.release)
                agreed(speaks("this worker", release()), agent)
            except BadCommand as why:
                self._hello.set_exception(why)
            else:
                self._hello.set_result(frame)
        elif isinstance(frame, AttachRefused):
            self._hello.set_exception(from_code(frame.error, frame.message))

    def _end(self, reason: str) -> None:
        self.reason = reason
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(ChannelLost(reason))
        if self._connection is not None:
            self._connection = None
            self._on_down()
            self.notify()

    # -------------------------------------------------------------------------------------------------- waiting

    def notify(self) -> None:
        """Let all who wait look again at what they wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Return whether the condition came to hold by the loop's time `deadline`."""
        while not condition():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return condition()
        return True

    async def until_up(self, deadline: float) -> None:
        """Return once there is a connection and time left to use it. Raises `AgentUnavailable`."""
        await self.until(lambda: self._connection is not None or self._closed, deadline)
        self.check()
        if self._connection is None or self._loop.time() > deadline:
            raise self.unavailable()

    def unavailable(self) -> AgentUnavailable:
        """Return the error for a bound that was reached without an agent."""
        return AgentUnavailable(
            f"no agent answers at {self.socket_path} ({self.reason}): start a hub with 'tensorhub up', or name an "
            "agent with connect(agent=…) or TENSORHUB_AGENT"
        )

    # -------------------------------------------------------------------------------------------- beginning, end

    def check(self) -> None:
        """Raise `AgentUnavailable` in a child of `fork`, and after `close`."""
        if self.is_forked:
            raise AgentUnavailable(
                "this process was forked off after connect(), and a connection can't be shared: call "
                "tensorhub.connect() again in the child"
            )
        if self._closed:
            raise closed_error()

    def push(self) -> None:
        """Send what waits, as far as the socket takes it at once: the event loop turns no more."""
        if self._connection is not None and not self.is_forked:
            self._connection.push()

    async def close(self) -> None:
        """End the connection and the tasks beside it. A second call does nothing."""
        self._closed = True
        if self._connection is not None:
            await self._connection.drain(DRAIN_S)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        await self.work.close()
        self.notify()

    def drop(self) -> None:
        """Close the socket without an event loop, which has ended: nothing runs any more that would."""
        self._closed = True
        self.let_go()

    def let_go(self) -> None:
        """Close the socket alone. A child of `fork` must, or its copy would hide the parent's end from the agent."""
        if self._connection is not None:
            self._connection.abandon()


_links: "weakref.WeakSet[AgentChannel]" = weakref.WeakSet()


def _let_go_of_all() -> None:
    for link in list(_links):
        link.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
