"""`tensorhub rollouts`: consumers, queue and instances of a job's rollouts, once or as a live table.

`tensorhub rollouts why GROUP` says of each response of a group what it waits for, and why it was placed where it was.
"""

import asyncio
import sys
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorhub._control.registry_client import RegistryClient
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub.cli import options, why_tables
from tensorhub.cli.output import json_line, line, size, table
from tensorhub.cli.runner import CommandDeadline, registry_of, run
from tensorhub_common.errors import RolloutUnavailable
from tensorhub_common.protocol.rollout.questions import WHY_INDEX_MAX, RolloutStatus, WhyAnswer, WhyQuestion

LOOK_S: Final = 1.0
"""How often the live table asks."""
WATCH: Final = "watch"
WHY: Final = "why"

_CONSUMERS: Final = ("CONSUMER", "MODEL", "EPOCH", "OPEN", "WAITING", "ENDED", "VERSIONS BEHIND")
_INSTANCES: Final = ("INSTANCE", "MODEL", "STATE", "VERSION", "KEPT", "SLOTS", "PENDING", "EXECUTING", "TOKENS/S")
_NUMBERS: Final = ("EPOCH", "OPEN", "WAITING", "ENDED", "VERSION", "KEPT", "SLOTS", "PENDING", "EXECUTING", "TOKENS/S")


def _watch_or_why(given: object) -> str:
    if given not in {WATCH, WHY}:
        raise typer.BadParameter(f"{given!s:.40} is not possible: leave it out, or say watch, or why and a group")
    return str(given)


def _group(given: object) -> str:
    text = str(given)
    # Bytes of the command line that are no UTF-8 come as surrogates, which no question can carry.
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise typer.BadParameter(f"{text!a:.40} is no text in UTF-8")
    return text


def rollouts(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="watch|why",
            help="watch: a live table until Ctrl-C. why: what a group's responses wait for.",
            show_default=False,
            parser=_watch_or_why,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Argument(metavar="GROUP", help="The group, of why.", show_default=False, parser=_group),
    ] = None,
    index: Annotated[
        int | None,
        typer.Argument(
            metavar="INDEX",
            help="One response of it alone.",
            show_default=False,
            parser=options.whole(0, WHY_INDEX_MAX),
        ),
    ] = None,
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 5,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Show the rollouts of a job: who submits, what waits, and which instances generate.

    With why and a group: what each of its responses waits for, how long it is expected to be, and its attempts.
    """
    if what != WHY and group is not None:
        raise typer.BadParameter("only why takes a group", param_hint="GROUP")
    if what == WHY and not group:
        raise typer.BadParameter("why needs a group, as in: tensorhub rollouts why p-17", param_hint="GROUP")
    registry = registry_of(job, directory, nats)
    if what == WATCH:
        run(_watch(registry, json=json))
        return
    if group is not None:
        _show_why(
            run(_asked_why(registry, WhyQuestion(group, index), CommandDeadline(timeout))), registry.job, json=json
        )
        return
    found = run(_once(registry, CommandDeadline(timeout)))
    if json:
        json_line(found)
        return
    line(_headline(found))
    if found.consumers:
        line("")
        table(_CONSUMERS, _consumers(found), right=_NUMBERS)
    if found.instances:
        line("")
        table(_INSTANCES, _instances(found), right=_NUMBERS)


def _show_why(found: WhyAnswer, job: str, *, json: bool) -> None:
    if json:
        json_line(found)
        return
    line(why_tables.headline(found, job))
    for hold in why_tables.holds(found):
        line(hold)
    if found.requests:
        line("")
        table(why_tables.RESPONSES, why_tables.responses(found), right=why_tables.NUMBERS)
    if any(each.attempts for each in found.requests):
        line("")
        table(why_tables.ATTEMPTS, why_tables.attempts(found), right=why_tables.NUMBERS)


async def _asked_why(registry: RegistryClient, question: WhyQuestion, bound: CommandDeadline) -> WhyAnswer:
    async with registry, bound.held():
        deadline = asyncio.get_running_loop().time() + bound.left_s("asking the rollout manager")
        return await ManagerClient(registry).ask("why", question, WhyAnswer, deadline)


async def _once(registry: RegistryClient, bound: CommandDeadline) -> RolloutStatus:
    async with registry, bound.held():
        return await _ask(registry, bound.left_s("asking the rollout manager"))


async def _ask(registry: RegistryClient, timeout_s: float) -> RolloutStatus:
    deadline = asyncio.get_running_loop().time() + timeout_s
    return await ManagerClient(registry).ask("status", None, RolloutStatus, deadline)


async def _watch(registry: RegistryClient, *, json: bool) -> None:
    async with registry:
        if json or not sys.stdout.isatty():
            while True:
                json_line(await _ask(registry, LOOK_S * 60))
                await asyncio.sleep(LOOK_S)
        with Live(Text("asking the rollout manager"), screen=True, auto_refresh=False) as live:
            while True:
                try:
                    drawn = _drawn(await _ask(registry, 2 * LOOK_S))
                except RolloutUnavailable as why:
                    drawn = Text(str(why), style="yellow")
                live.update(drawn, refresh=True)
                await asyncio.sleep(LOOK_S)


def _drawn(found: RolloutStatus) -> RenderableType:
    parts: list[RenderableType] = [Text(_headline(found), style="bold"), Text("")]
    for head, rows in ((_CONSUMERS, _consumers(found)), (_INSTANCES, _instances(found))):
        drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in head:
            drawn.add_column(name, justify="right" if name in _NUMBERS else "left")
        for row in rows:
            drawn.add_row(*("-" if cell in {None, ""} else str(cell) for cell in row))
        parts += [drawn, Text("")]
    return Group(*parts)


def _headline(found: RolloutStatus) -> str:
    wished = "" if found.wished is None else f" (wished for: {found.wished})"
    open_, waiting = (sum(getattr(each, what) for each in found.consumers) for what in ("open", "waiting"))
    return (
        f"job {found.job}: {open_} open, {waiting} of them wait; {len(found.instances)} instance(s){wished}, "
        f"{found.tokens_per_s:.0f} tokens/s; payloads {size(found.payload_bytes)}; led by {found.manager} "
        f"(term {found.term})"
    )


def _consumers(found: RolloutStatus) -> Iterator[tuple[object, ...]]:
    for each in found.consumers:
        behind = ", ".join(f"{number}: {count}" for number, count in enumerate(each.versions_behind) if count)
        yield (each.name, each.model, each.epoch, each.open, each.waiting, each.ended, behind)


def _instances(found: RolloutStatus) -> Iterator[tuple[object, ...]]:
    for each in found.instances:
        rate = f"{each.tokens_per_s:.0f}"
        yield (
            each.runner,
            each.model,
            each.state,
            each.version,
            each.version_kept,
            each.slots,
            each.pending,
            each.executing,
            rate,
        )
