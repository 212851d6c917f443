"""`ucx_perftest`, UCX's own measure: one message of so many bytes from one process to another, and four at once.

It stands in the wheel of UCX, and runs with the settings that our agents have. It takes the time itself, over `TIMED`
messages after one that does not count, so each run here starts a server and a client for each reader. Four at once are
four pairs; their mean is taken, which flatters it a little where they don't end together.
"""

import asyncio
import socket
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.contender import Failed, Took
from tensorhub_agent.transports.ucxx import library

LISTEN: Final = "127.0.0.1"
TIMED: Final = 2
RUN_S: Final = 60.0
LISTEN_S: Final = 5.0
POLL_S: Final = 0.01
LATENCY: Final = "overall_lat"
"""Of the table's columns the mean time of a message, in µs."""


class Perftest:
    """The contender."""

    title = "ucx_perftest"

    def __init__(self, nbytes: int, environment: Mapping[str, str]) -> None:
        self._nbytes = nbytes
        folder = Path(sysconfig.get_path("purelib")) / "libucx"
        self._program = folder / "bin" / "ucx_perftest"
        own = {"LD_LIBRARY_PATH": str(folder / "lib"), "UCX_LOG_LEVEL": "error"}
        self._environment = dict(environment) | own | settings(environment)

    async def start(self) -> None:
        """See that it is there."""
        if not self._program.exists():
            raise Failed(f"{self._program} does not exist: pip install ucxx-cu13")

    async def run(self, readers: int) -> Took:
        """Let so many pairs run at once."""
        times = await asyncio.gather(*(self._pair() for _ in range(readers)))
        return Took(sum(times) / readers)

    async def check(self) -> None:
        """It keeps its bytes to itself, so there is nothing to compare."""

    async def stop(self) -> None:
        """Each run ends what it has started."""

    async def _pair(self) -> float:
        port = str(free_port())
        server = await self._start("-p", port)
        try:
            await _listening(int(port))
            message = ("-t", "tag_bw", "-s", str(self._nbytes), "-O", "1", "-n", str(TIMED), "-w", "1", "-fv")
            client = await self._start(LISTEN, "-p", port, *message)
            try:
                out, why = await _said(client)
            finally:
                _kill(client)
            await _said(server)  # It ends with its client.
        finally:
            _kill(server)
        return _seconds(out, why)

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            str(self._program), *arguments, stdout=pipe, stderr=pipe, env=self._environment
        )


async def _said(process: asyncio.subprocess.Process) -> tuple[str, str]:
    try:
        async with asyncio.timeout(RUN_S):
            out, why = await process.communicate()
    except TimeoutError:
        raise Failed(f"it has not ended within {RUN_S:g} s") from None
    return out.decode(), why.decode()


def _seconds(out: str, why: str) -> float:
    lines = [line.split(",") for line in out.splitlines() if "," in line]
    names = next((line for line in lines if LATENCY in line), None)
    if names is None or lines[-1] is names:
        raise Failed(f"it did not say how long it took: {why.strip() or out.strip() or 'it said nothing'}")
    return float(lines[-1][names.index(LATENCY)]) / 1e6


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server((LISTEN, 0)) as server:
        return int(server.getsockname()[1])


async def _listening(port: int) -> None:
    """Return once something listens there. To connect would be taken for the client."""
    wanted = f":{port:04X} "
    try:
        async with asyncio.timeout(LISTEN_S):
            while not any(wanted in line and " 0A " in line for line in _sockets()):  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Failed(f"its server did not listen within {LISTEN_S:g} s") from None


def _sockets() -> list[str]:
    return [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return UCX's settings for it: our agents' own, which a user's come before, and never anything but TCP."""
    ours = {f"UCX_{name}": value for name, value in library.CONTEXT_DEFAULTS.items()}
    users = {name: value for name, value in environment.items() if name.startswith("UCX_")}
    return ours | {"UCX_TLS": "tcp"} | users
