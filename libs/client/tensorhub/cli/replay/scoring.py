"""Responses scored again: each version is fetched once, as by any other replica, and each of its runs is scored.

The engine is of a service, which this package doesn't import: it is found by its name.

Always true: nothing is said to be confirmed that was not scored; the replica is gone afterwards.
"""

import asyncio
import importlib
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from tensorhub._rollouts import records
from tensorhub._rollouts.records import ResponseRecord
from tensorhub._rollouts.replay import (
    NotScored,
    ResponseVerdict,
    RunScore,
    is_kept,
    judge_response,
    judge_run,
    why_gone,
)
from tensorhub._rollouts.responses import RunEngine, engine_of
from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub.cli.progress_bar import Bar
from tensorhub.cli.runner import AgentTarget, CommandDeadline, hub_of
from tensorhub.cli.temporary_replica import TemporaryReplica
from tensorhub.mapping import Mapping
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import BadPrompt, VersionUnavailable
from tensorhub_common.protocol.rollout import messages

if TYPE_CHECKING:
    from torch import nn

_ENGINES: Final = "tensorhub_runner.app.engines"


class Scored(Protocol):
    """What is drawn at a place, and the log-probability of the token that stands there."""

    drawn: int
    logprob: float
    lowest: float
    highest: float


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

    def mapping(self, sent: Collection[str]) -> Mapping | None:
        """Return what leaves out of the module what it computes itself and a version of these tensors lacks."""


class RunPlace(NamedTuple):
    """A run: which response of the file, and which of its runs."""

    response: int
    run: int


Scores = dict[RunPlace, RunScore | NotScored]


def load_engine(settings: Settings) -> LoadedEngine:
    """Load the engine that settings name. Raises `InvalidSetting` where that can't be."""
    loaded: LoadedEngine = importlib.import_module(_ENGINES).load_engine(settings)
    return loaded


def engine_facts(loaded: LoadedEngine) -> RunEngine:
    """Return what scores."""
    return engine_of(loaded.engine.facts.run_engine)


async def score(door: AgentTarget, loaded: LoadedEngine, found: Sequence[ResponseRecord], timeout_s: float) -> Scores:
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
            missing = {version: why_gone(model, version, known.get(version)) for version in by_version}
            shard = None if all(missing.values()) else await _registered(hub, guest, loaded, bound)
        for version, places in sorted(by_version.items()):
            why = missing[version] or await _fetch(hub, shard, version, CommandDeadline(timeout_s))
            if shard is None or why:
                scores |= dict.fromkeys(places, NotScored("gone", why))
            else:
                scores |= await _score_version(loaded.engine, found, version, places, shard.root)
    return scores


async def _registered(
    hub: AsyncHub, guest: TemporaryReplica, loaded: LoadedEngine, bound: CommandDeadline
) -> AsyncShard:
    """Register the module as a runner does, so that equal weights have equal roots."""
    sent = await hub.specs(guest.model, timeout_s=bound.left_s("asking the registry what versions have"))
    return await guest.register_module(hub, loaded.module, loaded.mapping(sent), bound)


def _by_version(found: Sequence[ResponseRecord]) -> dict[int, list[RunPlace]]:
    """Return the runs that one version alone has made, by version."""
    by_version = dict[int, list[RunPlace]]()
    for number, record in enumerate(found):
        for index, each in enumerate(record.runs):
            if not is_kept(each):
                by_version.setdefault(each.version, []).append(RunPlace(number, index))
    return by_version


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
                return why_gone(shard.model, version, known) or str(error)
    return ""


async def _score_version(
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
                    lowest = [math.nan if one is None else one.lowest for one in part]
                    highest = [math.nan if one is None else one.highest for one in part]
                    scores[RunPlace(number, each)] = RunScore(root, scorer, drawn, logprobs, lowest, highest)
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


def judged(record: ResponseRecord, number: int, scores: Scores, tolerance: float | None) -> ResponseVerdict:
    """Judge one response of the file, the one of this number."""
    runs = [
        judge_run(record, each, scores.get(RunPlace(number, index)), tolerance)
        for index, each in enumerate(record.runs)
    ]
    return judge_response(record, runs)
