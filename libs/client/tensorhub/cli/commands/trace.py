"""`tensorhub trace`: which transfers there were, and how one of them went.

Every process of the hub keeps its own spans, so all are asked; no collector of traces is needed.
"""

import asyncio
import io
import re
import sys
from collections.abc import Collection, Sequence
from typing import Annotated, Final

import typer
from msgspec import structs
from rich.console import Console

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, size, table, when
from tensorhub.cli.runner import print_error, registry_of, run
from tensorhub.cli.trace import responses
from tensorhub.cli.trace.span_tree import forest, rows, without_other_transfers
from tensorhub.cli.trace.waterfall import ASCII, UNICODE, draw, number, took, trouble
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.span_query import CollectedSpans, collect_spans
from tensorhub_common.protocol.spans import RESPONSE, TRANSFER, TRANSFERS_MAX, FinishedSpan, SpansAsk, TransfersAsk

ID_CHARS_MIN: Final = 8
"""So much of an id is shown, or more where two begin alike."""

TRACES_MAX: Final = 16
"""The most traces that one picture is put together from."""

STATUS_S: Final = 1.0
PIPE_COLUMNS: Final = 120
END_CHARS_MAX: Final = 60
_NS_PER_S: Final = 1_000_000_000
_TRACE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


def trace(
    transfer: Annotated[
        str | None,
        typer.Argument(
            metavar="TRANSFER",
            help="A transfer's id, or how it begins, or the whole id of a trace, as logs name it.",
            show_default=False,
        ),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Transfers of this model.", show_default=False, parser=options.name_of("model"), metavar="MODEL"
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(help="Draw the transfers of this version.", parser=options.version_number, metavar="NUMBER"),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            help="Transfers to this replica.", show_default=False, parser=options.name_of("replica"), metavar="NAME"
        ),
    ] = None,
    of_responses: Annotated[bool, typer.Option("--responses", help="List responses of rollouts instead.")] = False,
    response: Annotated[
        str | None,
        typer.Option(help="Draw this response of rollouts: its group and index.", metavar="GROUP/INDEX"),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many.", parser=options.whole(1, TRANSFERS_MAX), metavar="N")] = 20,
    job: options.Job = None,
    json: options.Json = False,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """List the latest transfers, or draw how one went: its sources, its bytes, and what it waited for.

    The same of responses of rollouts.
    """
    if transfer == "":
        raise typer.BadParameter("an id, or how it begins, is not empty", param_hint="TRANSFER")
    registry = registry_of(job, directory, nats)
    if of_responses or response is not None:
        if (transfer, version, replica) != (None, None, None):
            raise typer.BadParameter("responses are no transfers: ask for one of the two", param_hint="--response")
        _show_responses(registry, _responses_ask(response, model, limit), json=json)
        return
    ask = TransfersAsk(
        begins=(transfer or "").lower(),
        model=model,
        version=version,
        replica=replica,
        limit=limit if transfer is None and version is None else TRANSFERS_MAX,
    )
    if transfer is None and version is None:
        _list(run(_transfers(registry, ask)), registry.job, limit, json=json)
    else:
        spans, wanted = run(_spans(registry, ask))
        _draw(spans, wanted, json=json)


def _responses_ask(response: str | None, model: str | None, limit: int) -> TransfersAsk:
    if response is None:
        return TransfersAsk(kind=RESPONSE, model=model, limit=limit)
    group, _, index = response.rpartition("/")
    if not group or not index.isdecimal():
        raise typer.BadParameter(f"{response!r} is not GROUP/INDEX, as in p-17/3", param_hint="--response")
    return TransfersAsk(kind=RESPONSE, model=model, group=group, index=int(index), limit=1)


def _show_responses(registry: RegistryClient, ask: TransfersAsk, *, json: bool) -> None:
    if ask.group is not None:
        spans, wanted = run(_spans(registry, ask))
        _draw(spans, wanted, json=json)
        return
    shown = run(_transfers(registry, ask))[: ask.limit]
    if json:
        for span in shown:
            json_line(span)
    elif not shown:
        line(f"no response of job {registry.job} is kept yet: submit prompts to its rollouts, then look again")
    else:
        rows_shown = ((span, took(span.end_ns - span.start_ns)) for span in shown)
        table(responses.HEAD, (responses.cells(span, _begun(span), long) for span, long in rows_shown))


# ---------------------------------------------------------------------------------------------------------- asking


async def _transfers(registry: RegistryClient, ask: TransfersAsk) -> list[FinishedSpan]:
    async with registry:
        return await _ask_transfers(registry, ask, await _known(registry))


async def _spans(registry: RegistryClient, ask: TransfersAsk) -> tuple[list[FinishedSpan], list[FinishedSpan]]:
    """Return all spans of the transfers' traces, and of those that they are linked to, and the transfers."""
    async with registry:
        known = await _known(registry)
        if _TRACE.fullmatch(ask.begins):
            wanted = await _of_trace(registry, ask, known)
        else:
            wanted = _chosen(await _ask_transfers(registry, ask, known), ask, registry.job)
        traces = list(dict.fromkeys(place for span in wanted for place in _traces_of(span)))
        bus = await registry.bus()
        found = await asyncio.gather(
            *(collect_spans(bus, registry.job, SpansAsk(trace=each), known) for each in traces[:TRACES_MAX])
        )
    _tell_missing(known, found)
    spans = {(span.trace, span.span): span for each in found for span in each.spans if span.trace in traces}
    return list(spans.values()), wanted


async def _of_trace(registry: RegistryClient, ask: TransfersAsk, known: set[str]) -> list[FinishedSpan]:
    """Return the transfers of a trace; of one without any, as of a read that failed before it began, what there is."""
    found = await collect_spans(await registry.bus(), registry.job, SpansAsk(trace=ask.begins), known)
    _check_answered(found)
    spans = [span for span in found.spans if span.trace == ask.begins]
    if not spans:
        _tell_missing(known, [found], count_left_out=False)
        raise TensorHubError(f"no process of the hub keeps spans of trace {ask.begins}: they may be too old")
    transfers = [span for span in spans if span.name == TRANSFER]
    same = {"tensorhub.model": ask.model, "tensorhub.version": ask.version, "tensorhub.replica": ask.replica}
    fit = [
        span
        for span in transfers
        if all(value is None or span.attributes.get(key) == value for key, value in same.items())
    ]
    if transfers and not fit:
        raise TensorHubError(f"there is no transfer {_told(structs.replace(ask, begins=''))} in trace {ask.begins}")
    return fit or [root.span for root in forest(spans)]


def _traces_of(span: FinishedSpan) -> list[str]:
    return [span.trace, *(link.trace for link in span.links)]


async def _known(registry: RegistryClient) -> set[str]:
    """Return the processes that should answer, by the registry; without one, every answer counts."""
    # Without NATS there is nothing to ask, and that is the one thing to be said.
    await registry.bus()
    try:
        status = await registry.status(STATUS_S)
    except RegistryUnavailable as error:
        print_error(f"{error}; so it is not known which processes did not answer here")
        return set()
    except TensorHubError:
        return set()
    return {agent.agent for agent in status.agents if agent.live} | {status.registry}


async def _ask_transfers(registry: RegistryClient, ask: TransfersAsk, known: set[str]) -> list[FinishedSpan]:
    found = await collect_spans(await registry.bus(), registry.job, ask, known)
    _check_answered(found)
    _tell_missing(known, [found], count_left_out=False)
    # A process of an older release answers with transfers, whatever is asked.
    return sorted((span for span in found.spans if span.name == ask.kind), key=lambda span: -span.end_ns)


def _check_answered(found: CollectedSpans) -> None:
    if not found.processes:
        raise TensorHubError(
            "no process of the hub answers questions about spans: see 'tensorhub doctor' (with OTEL_SDK_DISABLED=true "
            "none are kept)"
        )


def _tell_missing(known: set[str], found: Sequence[CollectedSpans], *, count_left_out: bool = True) -> None:
    silent = known - {process for each in found for process in each.processes}
    if silent:
        print_error(f"{', '.join(sorted(silent))} did not answer, so what they know is missing here")
    left_out = sum(each.left_out for each in found)
    if left_out and count_left_out:
        print_error(f"{left_out} spans are left out: give the id of one transfer to see less at a time")


def _chosen(found: list[FinishedSpan], ask: TransfersAsk, job: str) -> list[FinishedSpan]:
    """Return the transfers that are to be drawn. Raises for none, and for an id that does not say which."""
    if ask.kind == RESPONSE:
        if not found:
            look = f"'tensorhub trace --responses --job {job}' lists those that are kept, a hundred a second"
            raise TensorHubError(f"there is no response {ask.group}/{ask.index} in job {job!r}: {look}")
        return found[:1]
    look = f"'tensorhub trace --job {job}' lists those that are kept"
    if not found:
        raise TensorHubError(f"there is no transfer {_told(ask)} in job {job!r}: {look}")
    if ask.begins and len({span.span for span in found}) > 1:
        raise TensorHubError(
            f"{len(found)} transfers begin with {ask.begins!r} ({', '.join(span.span for span in found[:3])}, …): "
            "give more of the id"
        )
    models = sorted({str(span.attributes.get("tensorhub.model")) for span in found})
    if len(models) > 1:
        raise TensorHubError(f"several models have version {ask.version}: say --model with one of {', '.join(models)}")
    return found


def _told(ask: TransfersAsk) -> str:
    parts = [repr(ask.begins)] if ask.begins else []
    parts += [f"of model {ask.model!r}"] if ask.model else []
    parts += [f"of version {ask.version}"] if ask.version is not None else []
    parts += [f"to replica {ask.replica!r}"] if ask.replica else []
    return " ".join(parts)


# --------------------------------------------------------------------------------------------------------- showing


def _list(transfers: list[FinishedSpan], job: str, limit: int, *, json: bool) -> None:
    shown = transfers[:limit]
    if json:
        for span in shown:
            json_line(span)
    elif not shown:
        line(f"no transfer of job {job} is kept yet: replicate or update a replica, then look again")
    else:
        head = ("ID", "MODEL", "VERSION", "REPLICA", "SHARD", "WHEN", "TOOK", "BYTES", "GB/S")
        table((*head, "TRANSPORTS", "SOURCES", "RETRIES", "END"), (row(span, shown) for span in shown))


def row(span: FinishedSpan, beside: Sequence[FinishedSpan]) -> tuple[object, ...]:
    """Return the cells of one transfer; `beside` are the others of the table."""
    get = span.attributes.get
    # What it took once the version was decided: an engine may have waited for it for an hour.
    seconds = max((span.end_ns - span.start_ns) / _NS_PER_S - number(get("tensorhub.round_s")), 0.0)
    nbytes = number(get("tensorhub.bytes"))
    rate = number(get("tensorhub.GBps")) or (nbytes / 1e9 / seconds if seconds > 0 else 0)
    transports = get("tensorhub.transports")
    return (
        short_id(span, beside),
        get("tensorhub.model"),
        get("tensorhub.version"),
        get("tensorhub.replica"),
        get("tensorhub.shard"),
        when(span.start_ns / _NS_PER_S),
        took(round(seconds * _NS_PER_S)),
        size(nbytes),
        f"{rate:.2f}",
        ",".join(map(str, transports)) if isinstance(transports, tuple) else transports,
        get("tensorhub.sources"),
        get("tensorhub.retries"),
        trouble(span)[:END_CHARS_MAX] or "done",
    )


def short_id(span: FinishedSpan, beside: Sequence[FinishedSpan]) -> str:
    """Return enough of an id to tell it from the others."""
    for chars in range(ID_CHARS_MIN, len(span.span)):
        if sum(other.span.startswith(span.span[:chars]) for other in beside) == 1:
            return span.span[:chars]
    return span.span


def _draw(spans: list[FinishedSpan], wanted: list[FinishedSpan], *, json: bool) -> None:
    ids = {span.span for span in wanted}
    roots = without_other_transfers(forest(spans), ids)
    if json:
        for _, span in rows(roots):
            json_line(span)
        return
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else PIPE_COLUMNS
    for each in title(wanted):
        line(each)
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    if not is_unicode and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for text in draw(roots, ids, width, UNICODE if is_unicode else ASCII):
        text.rstrip()
        console.print(text)


def title(wanted: Collection[FinishedSpan]) -> list[str]:
    """Say which transfers are drawn, a line each."""
    lines = []
    for span in sorted(wanted, key=lambda span: span.start_ns):
        if span.name == RESPONSE:
            lines.append(responses.title(span, _begun(span)))
            continue
        get = span.attributes.get
        version = get("tensorhub.version")
        what = f"{get('tensorhub.model')}" + ("" if version is None else f" version {version}")
        where = f"{get('tensorhub.replica')}, shard {get('tensorhub.shard')}"
        end = "failed" if trouble(span) else "done"
        lines.append(f"{span.name} {span.span}  {what} to {where}  {_begun(span)}  {end}, trace {span.trace}")
    return lines


def _begun(span: FinishedSpan) -> str:
    return when(span.start_ns / _NS_PER_S)
