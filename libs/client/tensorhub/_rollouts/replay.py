"""What scoring a response again says of it: verdicts, from numbers alone. Pure.

Invariants:
- Only what was scored with the weights of its version is `confirmed`.
- A response is as good as the worst of its runs.
- A run that can't be scored is never `differs`: `gone` and `kept` say why.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from tensorhub._rollouts.records import ResponseRecord
from tensorhub._rollouts.responses import RunEngine, TokenRun
from tensorhub_common.protocol.queries import VersionInfo, VersionState
from tensorhub_common.protocol.rollout.messages import Kv
from tensorhub_common.protocol.subjects import LOCAL_RUNNER

Verdict = Literal["differs", "gone", "kept", "empty", "confirmed"]
"""`differs`: another token is drawn, or a log-probability is off by more than the tolerance, or the root or the end is
another. `gone`: the hub has the version no more. `kept`: made with a cache of several versions, which no version makes
again. `empty`: there is no token to score."""
WORST_FIRST: Final[tuple[Verdict, ...]] = ("differs", "gone", "kept", "confirmed", "empty")

TOLERANCES: Final = {"float64": 1e-4, "float32": 1e-3, "float16": 0.1}
"""By what an engine computed in: how far its log-probabilities may be off those in float64, in nats. It is 0 for what
an exact engine of this build has made."""
TOLERANCE_OTHERS: Final = 0.5
"""The same for bfloat16, and where it is not known what an engine computed in."""


class RunScore(msgspec.Struct, frozen=True):
    """What a version's weights make at the places of a run."""

    root: str
    """Of the weights; empty where digests are off."""
    engine: RunEngine
    """What scored."""
    drawn: Sequence[int]
    """The tokens that the seed draws; -1 where the logits are no numbers."""
    logprobs: Sequence[float]
    """Of the tokens that stand there; NaN where the logits are no numbers."""
    lowest: Sequence[float]
    """The same where the border of top_p lies a little elsewhere, as it may in an engine that rounds otherwise."""
    highest: Sequence[float]


class NotScored(msgspec.Struct, frozen=True):
    """Why a run was not scored."""

    verdict: Literal["differs", "gone"]
    reason: str


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Differences of log-probabilities are in nats; None: it was not scored."""

    start: int
    end: int
    version: int
    root: str
    instance: str
    attempt: tuple[int, int]
    kv: Kv
    engine: RunEngine | None
    verdict: Verdict
    reason: str = ""
    first_difference: int | None = None
    """The first token that is not as it was made, counted from the response's beginning."""
    drawn_again: int | None = None
    """How many of its tokens the seed draws again."""
    logprob_diff_max: float | None = None
    logprob_diff_mean: float | None = None
    tolerance: float | None = None


class ResponseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One response. Its seed is that of all its runs."""

    group: str
    index: int
    seed: int
    verdict: Verdict
    reason: str = ""
    """What is wrong with it as a whole."""
    runs: tuple[RunVerdict, ...] = ()


def judge_run(
    record: ResponseRecord, run: TokenRun, scored: RunScore | NotScored | None, tolerance: float | None = None
) -> RunVerdict:
    """Judge one run. `scored`: None for one that `is_kept`. `tolerance` None: as exact as its engine allows."""
    if is_kept(run):
        return _verdict(run, "kept", "it began with the cache of a version before, so no version alone makes it again")
    assert scored is not None
    if isinstance(scored, NotScored):
        return _verdict(run, scored.verdict, scored.reason)
    made_by = run.engine
    is_alike = made_by is None or made_by.kind == scored.engine.kind
    # Others may lay the same weights out otherwise, which has another digest: another kind of engine, and a trainer,
    # whose own engine names the root of what was published.
    if is_alike and run.instance != LOCAL_RUNNER and run.root and scored.root and run.root != scored.root:
        reason = f"its root is {run.root}, and version {run.version} in the hub has {scored.root}"
        return _verdict(run, "differs", reason, run.start)
    bound = tolerance_of(made_by, scored.engine) if tolerance is None else tolerance
    tokens = np.array(record.token_ids[run.start : run.end], np.int64)
    drawn = np.array(scored.drawn, np.int64)
    told = np.array([np.nan if each is None else each for each in record.logprobs[run.start : run.end]], np.float32)
    # What an engine tells is float32.
    found = np.array(scored.logprobs, np.float64).astype(np.float32)
    is_exact = made_by is not None and is_alike and made_by.is_exact
    with np.errstate(invalid="ignore"):
        apart = np.abs(told.astype(np.float64) - found)
        if not is_exact:
            lowest, highest = np.array(scored.lowest, np.float64), np.array(scored.highest, np.float64)
            is_beyond = ~((told > lowest) & (told < highest))
            apart = np.where(is_beyond, np.minimum(np.abs(told - lowest), np.abs(told - highest)), 0.0)
    apart[np.isnan(apart)] = np.inf
    is_redrawn = drawn == tokens
    is_off = apart > bound
    wrong = np.flatnonzero(is_off | ~is_redrawn if is_exact else is_off)
    judged = msgspec.structs.replace(
        _verdict(run, "confirmed"),
        drawn_again=int(is_redrawn.sum()),
        logprob_diff_max=float(apart.max()),
        logprob_diff_mean=float(apart.mean()),
        tolerance=bound,
    )
    if not wrong.size:
        return judged
    at = int(wrong[0])
    place = run.start + at
    if is_exact and not is_redrawn[at]:
        reason = f"token {place} is {tokens[at]}, and its seed draws {drawn[at]}"
    else:
        reason = (
            f"the log-probability of token {place} is {told[at]:.7g}, and version {run.version} gives it "
            f"{found[at]:.7g}: {apart[at]:.3g} apart, of which {bound:.3g} is allowed"
        )
    return msgspec.structs.replace(judged, verdict="differs", reason=reason, first_difference=place)


def judge_response(record: ResponseRecord, runs: Sequence[RunVerdict]) -> ResponseVerdict:
    """Judge a response by its runs and by its end."""
    reason = _wrong_end(record)
    found = {each.verdict for each in runs} or {"empty"}
    verdict: Verdict = "differs" if reason else next(each for each in WORST_FIRST if each in found)
    return ResponseVerdict(
        group=record.group, index=record.index, seed=record.seed, verdict=verdict, reason=reason, runs=tuple(runs)
    )


def tolerance_of(made_by: RunEngine | None, scored_by: RunEngine) -> float:
    """Return how far a log-probability may be off, in nats."""
    if made_by is None:
        return TOLERANCE_OTHERS
    if made_by.is_exact and made_by == scored_by:
        return 0.0
    return TOLERANCES.get(made_by.dtype, TOLERANCE_OTHERS)


def is_kept(run: TokenRun) -> bool:
    """Tell whether a run was made with a cache of several versions."""
    return run.kv == "kept"


def why_gone(model: str, version: int, known: VersionInfo | None) -> str:
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


def counts(verdicts: Iterable[Verdict]) -> dict[Verdict, int]:
    """Count verdicts, the worst first."""
    found = Counter(verdicts)
    return {each: found[each] for each in WORST_FIRST if found[each]}


def _wrong_end(record: ResponseRecord) -> str:
    """Say where a response did not end as it says it did."""
    sampling, tokens = record.sampling, record.token_ids
    stops = [place for place, token in enumerate(tokens) if token in sampling.stop_token_ids]
    if stops and stops[0] < len(tokens) - 1:
        return f"token {stops[0]} is the stop token {tokens[stops[0]]}, and {len(tokens) - 1 - stops[0]} follow it"
    match record.finish_reason:
        case "stop" if not stops:
            return f"it ended by a stop token, and has none in its {len(tokens)} tokens"
        case "length" if len(tokens) != sampling.max_tokens:
            return f"it ended by its length, and has {len(tokens)} of {sampling.max_tokens} tokens"
    return ""


def _verdict(run: TokenRun, verdict: Verdict, reason: str = "", first_difference: int | None = None) -> RunVerdict:
    return RunVerdict(
        start=run.start,
        end=run.end,
        version=run.version,
        root=run.root,
        instance=run.instance,
        attempt=run.attempt,
        kv=run.kv,
        engine=run.engine,
        verdict=verdict,
        reason=reason,
        first_difference=first_difference,
    )
