"""The demo's processes: started, listened to, told, killed, and in the end all gone.

Always true: a process ends however the showing one ends (see `tether`); `stop` returns within a bound with none left;
the end of a process that was killed on purpose is not news.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tensorhub.demo.happenings import AnyHappening, Ended
from tensorhub.demo.messages import LINE_BYTES_MAX, TRAINER, AnyMessage, AnyOrder, Part
from tensorhub.local import tether
from tensorhub.local.children import tail
from tensorhub_common.runtime.supervision import Supervisor

STOP_S: Final = 3.0

NOT_UNDERSTOOD: Final = 1
"""A process that says what nobody understands counts as ended."""

OnNews = Callable[[str, AnyHappening], None]


@dataclass(slots=True)
class _Player:
    process: asyncio.subprocess.Process
    log: Path
    log_start: int
    is_end_expected: bool = False


class Players:
    """All processes of the demo, by the replica that they are."""

    def __init__(self, logs: Path, environment: Mapping[str, str], on_news: OnNews) -> None:
        self._logs = logs
        self._environment = dict(environment)
        self._on_news = on_news
        self._players: dict[str, _Player] = {}
        self._is_stopping = False
        self._work = Supervisor("the demo's processes")

    async def start(self, part: Part) -> int:
        """Start a process and return its id."""
        log = self._logs / f"{part.replica}.log"
        module = "tensorhub.demo.trainer" if part.replica == TRAINER else "tensorhub.demo.rollout"
        command = (sys.executable, "-P", "-m", module, msgspec.json.encode(part).decode())
        with log.open("ab") as stderr:
            log_start = stderr.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(Path(tether.__file__)),
                str(os.getpid()),
                *command,
                # Two cores are shared by all: a thread that waits must not spin.
                env=self._environment | {"OMP_NUM_THREADS": str(part.threads), "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=LINE_BYTES_MAX,
                # In a session of its own: Ctrl-C reaches the showing process alone, which ends them all.
                start_new_session=True,
            )
        player = _Player(process, log, log_start)
        self._players[part.replica] = player
        self._work.start(
            self._listen(part.replica, player),
            f"listening to {part.replica}",
            lambda fault: self._on_news(part.replica, Ended(code=NOT_UNDERSTOOD, tail=str(fault))),
        )
        return process.pid

    async def _listen(self, replica: str, player: _Player) -> None:
        assert player.process.stdout is not None
        decoder = msgspec.json.Decoder(AnyMessage)
        while line := await player.process.stdout.readline():
            self._on_news(replica, decoder.decode(line))
        code = await player.process.wait()
        if not player.is_end_expected and not self._is_stopping:
            self._on_news(replica, Ended(code=code, tail=tail(player.log, player.log_start)))

    def tell(self, replica: str, order: AnyOrder) -> None:
        """Send an order. To a process that is gone nothing is sent: its end is news already."""
        player = self._players.get(replica)
        if player is not None and player.process.stdin is not None and player.process.returncode is None:
            player.process.stdin.write(msgspec.json.encode(order) + b"\n")

    def pid(self, replica: str) -> int:
        """Return the id of a replica's process."""
        return self._players[replica].process.pid

    def expect_end(self, replica: str, *, expected: bool = True) -> None:
        """Say that a process may be killed any moment, or no longer: what it says meanwhile counts, its end doesn't."""
        self._players[replica].is_end_expected = expected

    async def stop(self) -> None:
        """End all that are left."""
        self._is_stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            for player in self._players.values():
                _signal(player.process, number)
            waiting = [
                self._work.start(player.process.wait(), f"the end of {replica}", awaited=True)
                for replica, player in self._players.items()
            ]
            if waiting:
                await asyncio.wait(waiting, timeout=STOP_S)
        await self._work.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
