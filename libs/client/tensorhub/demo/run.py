"""`tensorhub demo`: a real model learns in one process, others follow its weights, and every byte is compared.

Always true: when it returns, no process of its is left, and its own directory is gone unless something went wrong; the
exit code is 0 only when all that was promised was seen.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tensorhub import connect_async
from tensorhub._control.hub_file import AgentEntry
from tensorhub.demo.display import PEACEFUL_INTRODUCTION, Display, Lines, Objects
from tensorhub.demo.plot import ROLLOUTS, Script
from tensorhub.demo.screen import Screen
from tensorhub.demo.show import Note
from tensorhub.demo.stage import Plan, Stage
from tensorhub.local.hub import SIGNALS, LocalHub
from tensorhub_common.errors import TensorHubError
from tensorhub_common.runtime.supervision import Supervisor

JOB: Final = "demo"
AGENTS: Final = 1 + len(ROLLOUTS)
NEEDED: Final = ("torch", "transformers", "numpy")
EXIT_OK: Final = 0
EXIT_NO: Final = 1
BY_SIGNAL: Final = 128
"""A demo that a signal has ended has this exit code plus the signal's number, as every command."""
HEADING: Final = "TensorHub demo"

_OF_OTHER_HUBS: Final = (
    "AGENT",
    "AGENT_ID",
    "CREDENTIALS",
    "DIR",
    "HOST",
    "JOB",
    "NATS",
    "SITE",
    "SOCKET",
    "STATE_DIR",
)


def run_demo(
    *,
    seconds: float | None = None,
    hosts: int = 1,
    plain: bool = False,
    json: bool = False,
    directory: Path | None = None,
    attach: Sequence[Path] = (),
) -> int:
    """Show the demo and return the exit code. Call it in the main thread of a program.

    `seconds`: train for so long; by default a bit less than a minute on two cores. `hosts`: how many hosts the agents
    pretend to stand on. `plain`: lines even on a terminal. `json`: an object a line. `directory`: where the hub's files
    and the logs stand, and stay; by default they go at the end. `attach`: the sockets of agents of a hub that runs: it
    is played there, and nobody is killed.
    """
    lines = plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    display: Display = Objects() if json else Lines() if lines else Screen()
    # The log of an earlier demo in the same directory or hub holds its versions already.
    job = JOB if directory is None and not attach else f"{JOB}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    script = Script(seconds=seconds, is_peaceful=bool(attach))
    plan = Plan(script=script, hosts=hosts, job=job, attach=tuple(str(path.absolute()) for path in attach))
    return show(display, plan, directory)


def show(display: Display, plan: Plan, directory: Path | None = None) -> int:
    """Show the demo with what a test may want otherwise, and return the exit code."""
    try:
        _check(plan)
        if not plan.attach:
            _forget_other_hubs()
        with _folder(directory) as folder:
            return asyncio.run(_until_interrupted(folder, display, plan))
    except TensorHubError as error:
        _complain(str(error))
    except BrokenPipeError:
        # Whoever read along has seen enough; Python must not stumble over it again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_NO


def _check(plan: Plan) -> None:
    if not 1 <= plan.hosts <= AGENTS:
        raise TensorHubError(f"{AGENTS} agents can't pretend {plan.hosts} hosts: take 1 to {AGENTS}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise TensorHubError(
            f"the demo needs {' and '.join(missing)}, not installed here: pip install 'tensorhub[agent,demo]'"
        )


def _forget_other_hubs() -> None:
    """Take out of the environment what speaks of a hub that runs already: this one is of its own."""
    for name in _OF_OTHER_HUBS:
        os.environ.pop(f"TENSORHUB_{name}", None)


@contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    """Give a directory for the hub; one of our own goes at the end."""
    # Nothing is downloaded: the model is built from numbers, and the text is made here.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    logging.getLogger("tensorhub").setLevel(logging.ERROR)
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TensorHubError(f"{directory} can't be the hub's directory: {error.strerror}") from None
        yield directory.absolute()
        return
    own = Path(tempfile.mkdtemp(prefix="tensorhub-demo-"))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


async def _until_interrupted(folder: Path, display: Display, plan: Plan) -> int:
    loop, work = asyncio.get_running_loop(), Supervisor("the demo")
    showing = work.start(_show(folder, display, plan), "the showing", awaited=True)
    told: list[int] = []

    def interrupt(number: int) -> None:
        # Once: the end is bounded, and a second Ctrl-C would break off the tidying up.
        if not told:
            told.append(number)
            showing.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await showing
    except asyncio.CancelledError:
        if not told:
            raise
        display.close()
        _complain("interrupted: all processes of the demo have ended")
        return BY_SIGNAL + told[0]
    finally:
        display.close()


async def _show(folder: Path, display: Display, plan: Plan) -> int:
    began = time.monotonic()
    if plan.attach:
        display.open(HEADING, PEACEFUL_INTRODUCTION)
        (folder / "logs").mkdir(exist_ok=True)
        agents = [AgentEntry(id=Path(path).stem, pid=0, socket=path, host="", site="") for path in plan.attach]
        async with await connect_async(plan.job, agent=agents[0].socket) as hub:
            stage = Stage(lambda: agents, folder, hub, display, plan, began)
            display.tell(_hub_is_there(plan, stage.now_s))
            return await _play(stage, display)
    display.open(HEADING)
    async with (
        LocalHub(folder, agents=AGENTS, hosts=plan.hosts) as up,
        await connect_async(plan.job, agent=up.hub.agents[0].socket, nats=up.hub.nats) as hub,
    ):
        stage = Stage(lambda: up.hub.agents, folder, hub, display, plan, began)
        display.tell(_hub_is_up(up, folder, plan, stage.now_s))
        return await _play(stage, display)


async def _play(stage: Stage, display: Display) -> int:
    faults = await stage.play()
    display.sum_up(stage.show, faults, stage.now_s)
    return EXIT_NO if faults else EXIT_OK


def _hub_is_there(plan: Plan, at_s: float) -> Note:
    text = f"runs already; its job {plan.job} is this demo's, at the agents {', '.join(plan.attach)}"
    facts = {"job": plan.job, "agents": list(plan.attach)}
    return Note(at_s=at_s, kind="up", replica="the hub", text=text, is_event=True, facts=facts)


def _hub_is_up(up: LocalHub, folder: Path, plan: Plan, at_s: float) -> Note:
    hub = up.hub
    text = (
        f"is up: NATS, a registry, a planner and {AGENTS} agents on {plan.hosts} pretended host(s); to look at it from "
        f"elsewhere: tensorhub status --dir {folder} --job {plan.job}"
    )
    facts = {"directory": str(folder), "job": plan.job, "pids": hub.pids}
    return Note(at_s=at_s, kind="up", replica="the hub", text=text, is_event=True, facts=facts)


def _complain(sentence: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"tensorhub demo: {sentence}\n")
