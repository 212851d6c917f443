"""`tensorhub replay`: responses of rollouts, scored again with the weights of the versions that made them.

Each version is fetched once, as by any other replica, and each of its runs is scored by the torch engine in float64.
The engine is of a service, which this package doesn't import: it is found by its name.

Always true: nothing is said to be confirmed that was not scored; the replica is gone afterwards.
"""

import asyncio
import dataclasses
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Protocol

import msgspec
import typer

from tensorhub._rollouts import records
from tensorhub._rollouts.records import ResponseRecord
from tensorhub._rollouts.replay import (
    WORST_FIRST,
    NotScored,
    ResponseVerdict,
    RunScore,
    RunVerdict,
    Verdict,
    counts,
    is_kept,
    judge_response,
    judge_run,
)
from tensorhub._rollouts.responses import RunEngine, engine_of
from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, table
from tensorhub.cli.progress_bar import Bar
from tensorhub.cli.runner import SAID_NO, AgentTarget, CommandDeadline, door_of, hub_of, need, run, settings_of
from tensorhub.cli.temporary_replica import TemporaryReplica
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import BadPrompt, VersionUnavailable
from tensorhub_common.protocol.queries import VersionInfo, VersionState
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.subjects import check_job

if TYPE_CHECKING:
    from torch import nn

GONE: Final = 3
"""The exit code where nothing differs, and a version is in the hub no more."""
REASONS_MAX: Final = 20
"""Limit of the runs that are told one by one."""
TOLERANCE_MAX: Final = 1e3

_MEANS: Final[dict[Verdict, str]] = {"differs": "differ", "gone": "can't be scored", "kept": "can't be confirmed"}
_ENGINES: Final = "tensorhub_runner.app.engines"
_HEAD: Final = ("VERSION", "RUNS", "TOKENS", "CONFIRMED", "DIFFER", "GONE", "KEPT", "MAX DIFFERENCE", "MEAN")


class Scored(Protocol):
    """What is drawn at a place, and the log-probability of the token that stands there."""

    drawn: int
    logprob: float


class ScoringEngine(Protocol):
    """What is asked of the torch engine (tensorhub_runner.engines.torch_engine)."""

    @property
    def facts(self) -> Any:  # noqa: ANN401 (of a service, whose types this package doesn't have)
        """What it is."""

    def weights_changed(self) -> None:
        """Take the weights as they are now."""

    def score(
        self, prompt: bytes, tokens: bytes, start: int, end: int, sampling: messages.Sampling
    ) -> Sequence[Scored | None]:
        """Score tokens `start` to `end` of a response."""


class LoadedEngine(Protocol):
    """An engine, and the module whose parameters it reads."""

    engine: ScoringEngine
    module: "nn.Module"


class RunPlace(NamedTuple):
    """A run: which response of the file, and which of its runs."""

    response: int
    run: int


Scores = dict[RunPlace, RunScore | NotScored]


def _nats(given: object) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if not 0 <= value <= TOLERANCE_MAX:
        raise typer.BadParameter(f"{given!s:.40} is no number from 0 to {TOLERANCE_MAX:.0f}")
    return value


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Responses, as batch.save has written them.")],
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model's config.json; by default TENSORHUB_RUNNER_MODEL.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far log-probabilities may be off, in nats; by default as exact as their engine.",
            parser=_nats,
            metavar="X",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            help="The job that has the versions; by default the one that the file names.",
            show_default=False,
            parser=check_job,
            metavar="NAME",
        ),
    ] = None,
    json: options.Json = False,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for the hub, for each version.", parser=options.seconds(), metavar="S"),
    ] = 120,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Score responses again with the weights that made them, and say what differs."""
    found = _read(file)
    settings = _model_settings(settings_of(directory), model)
    need("replay", "torch", "transformers", extra="engine-torch")
    loaded: LoadedEngine = importlib.import_module(_ENGINES).load_engine(settings)
    door = door_of(job or found[0].job, directory, nats, agent)
    scores = run(_replay(door, loaded, found, timeout))
    verdicts = [_judged(record, number, scores, tolerance) for number, record in enumerate(found)]
    if json:
        for verdict in verdicts:
            json_line(verdict)
    else:
        _print(verdicts, engine_of(loaded.engine.facts.run_engine))
    totals = counts(each.verdict for each in verdicts)
    code = SAID_NO if totals.get("differs") else GONE if totals.get("gone") else 0
    if code:
        raise typer.Exit(code)


def _read(file: Path) -> list[ResponseRecord]:
    """Return the responses of a file, which are of one job and one model."""
    try:
        found = list(records.read(file))
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}", param_hint="FILE") from None
    except ValueError as why:
        raise typer.BadParameter(f"{file}: {why}", param_hint="FILE") from None
    if not found:
        raise typer.BadParameter(f"{file} has no response: batch.save writes some", param_hint="FILE")
    places = sorted({(each.job, each.model) for each in found})
    if len(places) > 1:
        named = ", ".join(f"{model} of job {job}" for job, model in places)
        raise typer.BadParameter(f"{file} has responses of several models: {named}; split it", param_hint="FILE")
    return found


def _model_settings(settings: Settings, model: Path | None) -> Settings:
    """Return settings that load the exact torch engine of the model."""
    folder = settings.runner_model if model is None else model
    if folder is None:
        raise typer.BadParameter("the model that made them is needed, as in --model ./my-model", param_hint="--model")
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(f"there is no config.json in {folder}", param_hint="--model")
    return dataclasses.replace(
        settings, runner_engine="torch", runner_model=folder, runner_exact=True, runner_device="cpu"
    )


# ---------------------------------------------------------------------------------------------------------- scoring


async def _replay(door: AgentTarget, loaded: LoadedEngine, found: Sequence[ResponseRecord], timeout_s: float) -> Scores:
    """Score all runs that can be scored, version by version, and say of the others why not."""
    model, scores = found[0].model, Scores()
    by_version = _by_version(found)
    if not by_version:
        return scores
    guest, bound = TemporaryReplica(model, "replay"), CommandDeadline(timeout_s)
    async with hub_of(door, bound, guest.release) as hub:
        async with bound.held():
            asked = await hub.versions(model, timeout_s=bound.left_s("asking the registry for the versions"))
            known = {each.version: each for each in asked}
            missing = {version: _why_gone(model, version, known.get(version)) for version in by_version}
            shard = None if all(missing.values()) else await guest.register_module(hub, loaded.module, bound)
        for version, places in sorted(by_version.items()):
            why = missing[version] or await _fetch(hub, shard, version, CommandDeadline(timeout_s))
            if shard is None or why:
                scores |= dict.fromkeys(places, NotScored("gone", why))
            else:
                scores |= await _score(loaded.engine, found, version, places, shard.root)
    return scores


def _by_version(found: Sequence[ResponseRecord]) -> dict[int, list[RunPlace]]:
    """Return the runs that one version alone has made, by version."""
    by_version = dict[int, list[RunPlace]]()
    for number, record in enumerate(found):
        for index, each in enumerate(record.runs):
            if not is_kept(each):
                by_version.setdefault(each.version, []).append(RunPlace(number, index))
    return by_version


def _why_gone(model: str, version: int, known: VersionInfo | None) -> str:
    """Say why a version can't be fetched; empty where it can."""
    if known is None:
        return f"the hub knows no version {version} of {model}: was the job deleted, or is it of another hub?"
    if known.state == VersionState.RETIRED:
        return f"version {version} was retired by a rewind, and is no longer read"
    if not known.holders:
        return (
            f"version {version} is no longer in the hub: retain what is to be replayed, as by "
            f"'tensorhub retain {model} --last 8' or 'tensorhub pin {model} N'"
        )
    return ""


async def _fetch(hub: AsyncHub, shard: AsyncShard | None, version: int, bound: CommandDeadline) -> str:
    """Read a version into the model. Return why it can't be had, where it has gone meanwhile."""
    assert shard is not None
    async with bound.held():
        with Bar(f"{shard.model} version {version}") as bar:
            try:
                await shard.replicate(version, timeout_s=bound.left_s(f"reading version {version}"), on_progress=bar.to)
            except VersionUnavailable as error:
                asked = await hub.versions(shard.model, timeout_s=bound.left_s("asking what became of the version"))
                known = next((each for each in asked if each.version == version), None)
                return _why_gone(shard.model, version, known) or str(error)
    return ""


async def _score(
    engine: ScoringEngine, found: Sequence[ResponseRecord], version: int, places: Sequence[RunPlace], root: str
) -> Scores:
    """Score the runs of one version, whose weights are in the engine's memory."""
    await asyncio.to_thread(engine.weights_changed)
    scorer = engine_of(engine.facts.run_engine)
    by_response = dict[int, list[int]]()
    for place in places:
        by_response.setdefault(place.response, []).append(place.run)
    scores, done, total = Scores(), 0, sum(_length(found, each) for each in places)
    with Bar(f"scoring version {version}", total, counted="tokens") as bar:
        for number, runs in by_response.items():
            record = found[number]
            spans = [(record.runs[each].start, record.runs[each].end) for each in runs]
            first, last = min(start for start, _ in spans), max(end for _, end in spans)
            try:
                made = await asyncio.to_thread(_scored, engine, record, first, last)
            except BadPrompt as why:
                scores |= dict.fromkeys((RunPlace(number, each) for each in runs), NotScored("differs", str(why)))
            else:
                for each, (start, end) in zip(runs, spans, strict=True):
                    part = made[start - first : end - first]
                    drawn = [-1 if one is None else one.drawn for one in part]
                    logprobs = [math.nan if one is None else one.logprob for one in part]
                    scores[RunPlace(number, each)] = RunScore(root, scorer, drawn, logprobs)
            done += sum(end - start for start, end in spans)
            bar.to(done, total)
    return scores


def _scored(engine: ScoringEngine, record: ResponseRecord, first: int, last: int) -> Sequence[Scored | None]:
    # What an engine is given has the response's own seed.
    sampling = msgspec.structs.replace(record.sampling.checked(), seed=record.seed)
    prompt, tokens = records.ids_bytes(record.prompt_ids), records.ids_bytes(record.token_ids[:last])
    return engine.score(prompt, tokens, first, last, sampling)


def _length(found: Sequence[ResponseRecord], place: RunPlace) -> int:
    each = found[place.response].runs[place.run]
    return each.end - each.start


def _judged(record: ResponseRecord, number: int, scores: Scores, tolerance: float | None) -> ResponseVerdict:
    runs = [
        judge_run(record, each, scores.get(RunPlace(number, index)), tolerance)
        for index, each in enumerate(record.runs)
    ]
    return judge_response(record, runs)


# ---------------------------------------------------------------------------------------------------------- showing


def _print(verdicts: Sequence[ResponseVerdict], engine: RunEngine) -> None:
    runs = [each for verdict in verdicts for each in verdict.runs]
    if runs:
        table(_HEAD, _rows(runs), right=_HEAD)
        line("")
    told = list(_reasons(verdicts))
    for reason in told[:REASONS_MAX]:
        line(reason)
    if len(told) > REASONS_MAX:
        line(f"and {len(told) - REASONS_MAX} more: --json tells all")
    named = ", ".join(f"{count} {verdict}" for verdict, count in counts(each.verdict for each in verdicts).items())
    tokens = sum(each.end - each.start for each in runs)
    line(f"{len(verdicts)} responses ({tokens} tokens in {len(runs)} runs): {named}")
    line(f"scored in {engine.dtype} by {engine.kind}: {engine.build}")


def _rows(runs: Sequence[RunVerdict]) -> Iterator[tuple[object, ...]]:
    by_version = dict[int, list[RunVerdict]]()
    for each in runs:
        by_version.setdefault(each.version, []).append(each)
    for version, those in sorted(by_version.items()):
        found = counts(each.verdict for each in those)
        tokens = sum(each.end - each.start for each in those)
        differences = [
            (each.logprob_diff_max, each.logprob_diff_mean, each.end - each.start)
            for each in those
            if each.logprob_diff_max is not None and each.logprob_diff_mean is not None
        ]
        scored = sum(count for _, _, count in differences)
        numbers = (found.get(each, 0) for each in ("confirmed", "differs", "gone", "kept"))
        yield (
            version,
            len(those),
            tokens,
            *numbers,
            f"{max(most for most, _, _ in differences):.3g}" if scored else None,
            f"{sum(mean * count for _, mean, count in differences) / scored:.3g}" if scored else None,
        )


def _reasons(verdicts: Sequence[ResponseVerdict]) -> Iterator[str]:
    """Say of each run that is not confirmed why it is not, the worst first."""
    told = list[tuple[Verdict, str]]()
    for response in verdicts:
        where = f"{response.group}/{response.index}"
        if response.reason:
            told.append(("differs", f"{where} differs: {response.reason}"))
        told += [
            (
                each.verdict,
                f"{where} tokens {each.start} to {each.end} ({each.instance}) {_MEANS[each.verdict]}: {each.reason}",
            )
            for each in response.runs
            if each.verdict != "confirmed"
        ]
    for _, reason in sorted(told, key=lambda each: WORST_FIRST.index(each[0])):
        yield reason
