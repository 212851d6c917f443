"""`tensorhub watch`: what happens to a model's versions, as it happens."""

import asyncio
import os
import stat
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Annotated, Any

import typer

from tensorhub._control.registry_client import RegistryClient
from tensorhub._control.watch import Watched
from tensorhub.arguments import SEQ_MAX
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, read_no_further, when
from tensorhub.cli.runner import print_error, registry_of, run
from tensorhub_common.runtime.supervision import Supervisor


def watch(
    model: options.Model,
    *,
    job: options.Job = None,
    json: options.Json = False,
    after: Annotated[
        int | None,
        typer.Option(help="Go on after the event with this seq.", parser=options.whole(0, SEQ_MAX), metavar="SEQ"),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Leave out what has happened before.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Rounds, replicas and shards too.")] = False,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Show what happened to a model's versions, then what happens, until Ctrl-C."""
    registry = registry_of(job, directory, nats)
    run(_while_read(_follow(registry, model, after=after, new=new, every=every, json=json)))


async def _while_read(following: Coroutine[Any, Any, None]) -> None:
    """Follow until the output's reader has gone: in `watch … | head -1` the next event may be far away."""
    work = Supervisor("watch")
    task = work.start(following, "following the log", awaited=True)
    reader_gone = asyncio.Event()

    def stop() -> None:
        reader_gone.set()
        task.cancel()

    out = sys.stdout.fileno()
    if stat.S_ISFIFO(os.fstat(out).st_mode):
        # Of a pipe's writing end the selector can report one thing only: that the other end is closed.
        asyncio.get_running_loop().add_reader(out, work.guarded(stop, "the end of the pipe"))
    try:
        await task
    except asyncio.CancelledError:
        if not reader_gone.is_set():
            raise
        read_no_further()
    finally:
        await work.close()


async def _follow(
    registry: RegistryClient, model: str, *, after: int | None, new: bool, every: bool, json: bool
) -> None:
    async with registry:
        unwatch = (await registry.bus()).watch(_tell_silence)
        try:
            if new and after is None:
                after = (await registry.status()).seq
            async with aclosing(registry.watch(model, after, () if every else None)) as events:
                async for event in events:
                    if json:
                        json_line(event)
                    else:
                        line(_told(event))
        finally:
            unwatch()


def _tell_silence(connected: bool) -> None:  # noqa: FBT001 (as the bus tells it)
    """Say that no event can come for now: else it would look as if none had happened."""
    print_error("NATS is back" if connected else "there is no connection to NATS; events are shown once it is back")


def _told(event: Watched) -> str:
    details = [event.model]
    if event.version is not None:
        details.append(f"version {event.version}")
    if event.replica is not None:
        details.append(f"by {event.replica}" if event.kind == "version.published" else f"replica {event.replica}")
    if event.shard is not None:
        details.append(f"shard {event.shard}")
    if event.agent is not None:
        details.append(f"on {event.agent}")
    details += [text for text in (event.reason, event.error, event.message) if text]
    return f"{event.seq:>6}  {when(event.time)}  {event.kind:<20}  {', '.join(details)}"
