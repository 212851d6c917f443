"""Plays the demo: carries out what the plot says, passes on what happens, and lets it be drawn.

Always true: while a strike may fall any moment nothing is drawn, so that it isn't late; whatever happens, this ends
within `TIME_S_MAX` beyond what was asked for.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tensorhub import AsyncHub
from tensorhub._control.hub_file import AgentEntry
from tensorhub.demo.display import Display
from tensorhub.demo.happenings import AnyHappening, Killed, Missed, Released, Started, Wreck
from tensorhub.demo.messages import MODEL, TRAINER, Part, Sealed
from tensorhub.demo.players import Players
from tensorhub.demo.plot import LATECOMER, ROLLOUTS, Act, Arm, Plot, Script, Start, Tell
from tensorhub.demo.show import Show
from tensorhub.demo.size import Size
from tensorhub.demo.strike import Memory, Strike
from tensorhub_common.config import settings
from tensorhub_common.config.segment_names import segment_beginning
from tensorhub_common.runtime.supervision import Supervisor

TIME_S_MAX: Final = 300.0
TICK_S: Final = 0.25
LAST_WORDS_S: Final = 0.3
"""What a killed agent had sent before has been decided by then."""
HUSH_S_MAX: Final = 3.0

REPLICAS: Final = (TRAINER, *ROLLOUTS)

Agents = Callable[[], Sequence[AgentEntry]]
"""The hub's agents as they are now. Where they are fewer than the replicas, some serve several."""


class Casting(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes are given; tests give less."""

    size: Size = Size()
    steps: int = 3
    rows: int = 8
    row_tokens: int = 64
    tokens: int = 40


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown and with whom. A new job in a directory that has seen a demo must have a new name."""

    script: Script = Script()
    casting: Casting = Casting()
    hosts: int = 1
    job: str = "demo"
    attach: tuple[str, ...] = ()
    """Sockets of the agents of a hub that runs already; none: bring up one of our own."""


class Stage:
    """One showing."""

    def __init__(
        self, agents: Agents, directory: Path, hub: AsyncHub, display: Display, plan: Plan, began: float
    ) -> None:
        self.show = Show(is_peaceful=plan.script.is_peaceful)
        self._plot = Plot(plan.script)
        self._agents, self._directory, self._hub, self._display = agents, directory, hub, display
        self._casting = plan.casting
        self._news: asyncio.Queue[tuple[str, AnyHappening]] = asyncio.Queue()
        self._players = Players(directory / "logs", os.environ, self._tell)
        self._strike: Strike | None = None
        self._falling: asyncio.Task[None] | None = None
        self._hushed_at: float | None = None
        self._began = began
        self._work = Supervisor("the demo")

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    async def play(self) -> list[str]:
        """Play to the end and return what went wrong."""
        limit_s = TIME_S_MAX + (self._plot.script.seconds or 0.0)
        watching = self._work.start(self._watch(), "following the log", awaited=True)
        try:
            async with self._players, asyncio.timeout(limit_s):
                await self._perform(self._plot.opening())
                while not self._plot.is_over:
                    await self._next(watching)
        except TimeoutError:
            return [f"the demo did not come to its end within {limit_s:g} s", *self.show.faults()]
        finally:
            await self._work.close()
        died = self._plot.died
        return [f"the process of {died} ended by itself" for _ in "1" if died is not None] + self.show.faults()

    async def _next(self, watching: "asyncio.Task[None]") -> None:
        for task in (watching, self._falling):
            if task is not None and task.done():
                task.result()
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                came = await self._news.get()
            await self._on(*came)
        if not self._is_hushed():
            self._display.draw(self.show, self.now_s)

    def _tell(self, replica: str, news: AnyHappening) -> None:
        self._news.put_nowait((replica, news))

    async def _on(self, replica: str, news: AnyHappening) -> None:
        strike = self._strike
        if isinstance(news, Sealed) and strike is not None and not strike.is_falling:
            strike.is_falling, self._hushed_at = True, self.now_s
            self._falling = self._work.start(self._let_fall(strike, news.version), "the strike", awaited=True)
        for note in self.show.take(replica, news, self.now_s):
            self._display.tell(note)
        await self._perform(self._plot.take(replica, news, self.now_s))

    def _is_hushed(self) -> bool:
        """Whether a strike may fall any moment, so that drawing must wait."""
        return self._hushed_at is not None and self.now_s - self._hushed_at < HUSH_S_MAX

    # ------------------------------------------------------------------------------------------------------ acts

    async def _perform(self, acts: list[Act]) -> None:
        for act in acts:
            match act:
                case Start():
                    pid = await self._players.start(self._part(act.replica))
                    self._tell(act.replica, Started(pid=pid))
                case Arm():
                    await self._arm(act.replica)
                case Tell():
                    self._players.tell(act.replica, act.order)

    def _part(self, replica: str) -> Part:
        casting = self._casting
        return Part(
            replica=replica,
            job=self._hub.job,
            agent=self._agent_of(replica).socket,
            size=casting.size,
            threads=2 if replica == TRAINER else 1,
            steps=casting.steps,
            rows=casting.rows,
            row_tokens=casting.row_tokens,
            tokens=casting.tokens,
            is_late=replica == LATECOMER,
        )

    def _agent_of(self, replica: str) -> AgentEntry:
        agents = self._agents()
        return agents[REPLICAS.index(replica) % len(agents)]

    # ---------------------------------------------------------------------------------------------------- strike

    async def _arm(self, replica: str) -> None:
        """Look at the replica's memory while it is at rest; the blow falls when the trainer publishes next."""
        agent = self._agent_of(replica)
        beginning = f"{segment_beginning(self._directory)}{agent.id}-*.seg"
        segments = sorted(settings.load(os.environ).shm_dir.glob(beginning))
        memory = await asyncio.to_thread(Memory, segments)
        self._strike = Strike(replica, self._players.pid(replica), agent.pid, memory)

    async def _watch(self) -> None:
        async for event in self._hub.watch(MODEL, kinds=()):
            if event.kind == "version.published" and event.version is not None:
                self._tell(TRAINER, Released(version=event.version, at=event.time))
            strike = self._strike
            if strike is None or not strike.is_falling or event.replica != strike.replica:
                continue
            if event.kind == "round.started":
                strike.round, strike.began = event.round, event.time
            elif event.kind == "shard.filled" and event.round == strike.round:
                strike.filled += 1

    async def _let_fall(self, strike: Strike, version: int) -> None:
        """Kill in the middle of the read of this version, and look at what is left."""
        try:
            self._players.expect_end(strike.replica)
            if not await asyncio.to_thread(strike.fall):
                self._players.expect_end(strike.replica, expected=False)
                self._tell(strike.replica, Missed(version=version))
                return
            killed_at = time.time()
            await asyncio.sleep(LAST_WORDS_S)
            after_s = killed_at - (strike.began or killed_at)
            killed = Killed(version=version, pid=strike.pid, agent_pid=strike.agent_pid, after_s=after_s)
            self._tell(strike.replica, killed)
            written = await asyncio.to_thread(strike.memory.written_bytes)
            wreck = Wreck(version=version, written_bytes=written, nbytes=strike.memory.nbytes, filled=strike.filled)
            self._tell(strike.replica, wreck)
        finally:
            self._strike = None
            self._hushed_at = None
            strike.memory.close()
