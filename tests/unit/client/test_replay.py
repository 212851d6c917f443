"""What scoring says of responses: verdicts from numbers, and the lines that responses are saved as."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorhub
from tensorhub import RunEngine, TokenRun
from tensorhub._rollouts import records
from tensorhub._rollouts.records import ResponseRecord
from tensorhub._rollouts.replay import (
    TOLERANCE_OTHERS,
    TOLERANCES,
    NotScored,
    RunScore,
    RunVerdict,
    counts,
    judge_response,
    judge_run,
    why_gone,
)
from tensorhub_common.protocol.queries import VersionInfo
from tensorhub_common.protocol.subjects import LOCAL_RUNNER

EXACT = RunEngine("torch", "torch 2.9, one processor", "float64", is_exact=True)
ELSEWHERE = RunEngine("torch", "torch 2.9, another processor", "float64", is_exact=True)
FAST = RunEngine("torch", "torch 2.9, a GPU", "bfloat16", is_exact=False)
OTHER = RunEngine("vllm", "vllm 0.12", "bfloat16", is_exact=False)
GONE = NotScored("gone", "version 7 is no longer in the hub")


def run_of(start: int, end: int, version: int = 7, **more: Any) -> TokenRun:
    given: dict[str, Any] = {"kv": "fresh", "engine": EXACT, "root": f"root-{version}", "instance": "runner-0"} | more
    return TokenRun(start, end, version, attempt=(1, 1), age=0, **given)


def record_of(*runs: TokenRun, **more: Any) -> ResponseRecord:
    """Return a response whose token at each place is the place, with that over -8 as its log-probability."""
    count = runs[-1].end if runs else 0
    given: dict[str, Any] = {
        "finish_reason": "length",
        "error": None,
        "sampling": tensorhub.Sampling(count or 4),
        "token_ids": tuple(range(count)),
        "logprobs": tuple(place / -8 for place in range(count)),
    }
    return ResponseRecord(
        job="default", model="policy", group="p", index=0, seed=5, prompt_ids=(1, 2), runs=runs, **(given | more)
    )


def score(record: ResponseRecord, run: TokenRun, **more: Any) -> RunScore:
    """Return what an engine that makes the same finds."""
    found: dict[str, Any] = {
        "root": run.root,
        "engine": EXACT,
        "drawn": record.token_ids[run.start : run.end],
        "logprobs": record.logprobs[run.start : run.end],
    } | more
    borders = {"lowest": found["logprobs"], "highest": found["logprobs"]}
    return RunScore(**(borders | found))


def judged(run: TokenRun, tolerance: float | None = None, **more: Any) -> RunVerdict:
    """Judge a run of tokens 0 to its end, whose score has these differences."""
    record = record_of(run)
    return judge_run(record, run, score(record, run, **more), tolerance)


def test_between_the_borders_of_a_cut_an_engine_that_rounds_otherwise_is_confirmed_and_an_exact_one_is_not() -> None:
    # Told are 0, -0.125 and -0.25.
    borders: dict[str, Any] = {
        "logprobs": (0.0, -0.1, -0.25),
        "lowest": (0.0, -0.15, -0.25),
        "highest": (0.0, -0.1, -0.25),
    }
    fast = RunEngine("vllm", "vllm 0.12", "float32", is_exact=False)
    found = judged(run_of(0, 3, engine=fast), **borders)
    assert (found.verdict, found.logprob_diff_max) == ("confirmed", 0.0)
    assert judged(run_of(0, 3, engine=EXACT), **borders).verdict == "differs"
    beyond = borders | {"lowest": (0.0, -0.12, -0.25)}
    found = judged(run_of(0, 3, engine=fast), **beyond)
    assert (found.verdict, found.first_difference) == ("differs", 1)
    assert found.logprob_diff_max == pytest.approx(0.005)


def test_equal_tokens_and_log_probabilities_are_confirmed() -> None:
    found = judged(run_of(0, 4))
    assert (found.verdict, found.reason, found.first_difference) == ("confirmed", "", None)
    assert (found.drawn_again, found.logprob_diff_max, found.logprob_diff_mean, found.tolerance) == (4, 0.0, 0.0, 0.0)


def test_another_token_of_an_exact_engine_differs_wherever_it_was_made() -> None:
    for engine in (EXACT, ELSEWHERE):
        found = judged(run_of(0, 4, engine=engine), drawn=(0, 1, 9, 8))
        assert (found.verdict, found.first_difference, found.drawn_again) == ("differs", 2, 2)
        assert found.reason == "token 2 is 2, and its seed draws 9"


def test_other_engines_draw_in_their_own_way_and_are_judged_by_their_log_probabilities() -> None:
    for engine in (FAST, OTHER, None):
        found = judged(run_of(0, 4, engine=engine), drawn=(9, 9, 9, 9), logprobs=(0.1, -0.1, -0.3, -0.4))
        assert (found.verdict, found.drawn_again) == ("confirmed", 0)
        assert found.logprob_diff_max == pytest.approx(0.1)
        assert judged(run_of(0, 4, engine=engine), logprobs=(0, 0, -1, 0)).first_difference == 2


@pytest.mark.parametrize(
    ("engine", "bound"),
    [
        (EXACT, 0.0),
        (ELSEWHERE, TOLERANCES["float64"]),
        (RunEngine("torch", "", "float32", is_exact=False), TOLERANCES["float32"]),
        (FAST, TOLERANCE_OTHERS),
        (None, TOLERANCE_OTHERS),
    ],
)
def test_a_log_probability_may_be_off_as_far_as_its_engine_is_inexact(engine: RunEngine | None, bound: float) -> None:
    run = run_of(0, 2, engine=engine)
    within = judged(run, logprobs=(-bound * 0.9, -0.125))
    beyond = judged(run, logprobs=(0.0, -0.125 - max(bound * 1.1, 1e-7)))
    assert (within.verdict, within.tolerance) == ("confirmed", bound)
    assert (beyond.verdict, beyond.first_difference) == ("differs", 1)
    assert "the log-probability of token 1 is -0.125" in beyond.reason


def test_a_place_is_counted_from_the_beginning_of_the_response() -> None:
    record = record_of(run_of(0, 2), run_of(2, 4))
    found = judge_run(record, record.runs[1], score(record, record.runs[1], logprobs=(-0.25, 0.0)))
    assert (found.first_difference, "of token 3 is" in found.reason) == (3, True)


def test_a_tolerance_that_is_given_counts_for_all() -> None:
    assert judged(run_of(0, 2), 0.01, logprobs=(0.009, -0.125)).verdict == "confirmed"
    assert judged(run_of(0, 2, engine=OTHER), 0.01, logprobs=(0.011, -0.125)).verdict == "differs"


def test_what_is_no_number_is_never_confirmed() -> None:
    for logprobs in ((float("nan"), -0.125), (-float("inf"), -0.125)):
        assert judged(run_of(0, 2, engine=OTHER), 1e3, logprobs=logprobs).first_difference == 0
    run = run_of(0, 2)
    record = record_of(run, logprobs=(None, -0.125))
    assert judge_run(record, run, score(record, run, logprobs=(0.0, -0.125))).first_difference == 0


def test_another_root_differs_unless_the_weights_may_have_been_laid_out_otherwise() -> None:
    found = judged(run_of(2, 4, root="a"), root="b")
    assert (found.verdict, found.first_difference, found.logprob_diff_max) == ("differs", 2, None)
    assert "its root is a, and version 7 in the hub has b" in found.reason
    assert judged(run_of(0, 4, root="a", engine=OTHER), root="b").verdict == "confirmed"
    assert judged(run_of(0, 4, root="a", instance=LOCAL_RUNNER), root="b").verdict == "confirmed"
    # With digests off there is none.
    assert judged(run_of(0, 4, root=""), root="b").verdict == "confirmed"
    assert judged(run_of(0, 4, root="a"), root="").verdict == "confirmed"


def test_a_version_that_is_gone_is_neither_confirmed_nor_differs() -> None:
    run = run_of(0, 4)
    record = record_of(run)
    found = judge_run(record, run, GONE)
    assert (found.verdict, found.reason, found.logprob_diff_max) == ("gone", GONE.reason, None)


def version(**more: Any) -> VersionInfo:
    given: dict[str, Any] = {"state": "available", "holders": ("trainer",)} | more
    return VersionInfo(model="policy", version=7, publisher="trainer", published_at=0.0, **given)


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (version(), ""),
        (None, "the hub knows no version 7 of policy"),
        (version(state="retired"), "version 7 was retired by a rewind"),
        (version(state="unavailable", holders=()), "'tensorhub retain policy --last 8' or 'tensorhub pin policy N'"),
    ],
)
def test_why_a_version_can_not_be_scored_is_told_with_what_to_do(known: VersionInfo | None, why: str) -> None:
    found = why_gone("policy", 7, known)
    assert why in found
    assert bool(found) == bool(why)


def test_a_kept_cache_can_not_be_confirmed_whatever_was_scored() -> None:
    run = run_of(2, 4, kv="kept")
    record = record_of(run_of(0, 2), run)
    for scored in (None, GONE, score(record, run), score(record, run, root="b")):
        assert judge_run(record, run, scored).verdict == "kept"


def response(*verdicts: str, **more: Any) -> str:
    runs = [run_of(at, at + 1) for at in range(len(verdicts))]
    record = record_of(*runs, **more)
    judged = [
        msgspec.structs.replace(judge_run(record, run, GONE), verdict=each)
        for run, each in zip(runs, verdicts, strict=True)
    ]
    return judge_response(record, judged).verdict


def test_a_response_is_as_good_as_the_worst_of_its_runs() -> None:
    assert response("confirmed", "confirmed") == "confirmed"
    assert response("confirmed", "kept") == "kept"
    assert response("kept", "gone", "confirmed") == "gone"
    assert response("gone", "differs", "kept") == "differs"
    assert list(counts(["gone", "confirmed", "gone"])) == ["gone", "confirmed"]


def test_a_response_without_tokens_has_nothing_to_confirm() -> None:
    assert response(finish_reason="cancelled") == "empty"
    assert response(finish_reason="failed", error="no attempt made a token") == "empty"


def test_a_response_that_did_not_end_as_it_says_differs() -> None:
    stop = tensorhub.Sampling(8, stop_token_ids=(1,))
    assert response("confirmed", "confirmed", finish_reason="stop", sampling=stop) == "confirmed"
    assert response("confirmed", finish_reason="stop", sampling=stop) == "differs"
    assert response("confirmed", "confirmed", "confirmed", finish_reason="stop", sampling=stop) == "differs"
    assert response("confirmed", finish_reason="length", sampling=tensorhub.Sampling(8)) == "differs"
    # A trainer may cancel at any token.
    assert response("confirmed", finish_reason="cancelled", sampling=tensorhub.Sampling(8)) == "confirmed"
    assert response(finish_reason="length") == "differs"


# ---------------------------------------------------------------------------------------------------------- records

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(logprobs=st.lists(FLOATS, min_size=1, max_size=5), seed=st.integers(0, 2**64 - 1))
def test_a_saved_response_is_read_again_bit_for_bit(logprobs: list[float], seed: int) -> None:
    values = np.array(logprobs, np.float32)
    run = run_of(0, len(logprobs))
    record = record_of(run, logprobs=tuple(values.tolist()))
    record = msgspec.structs.replace(record, seed=seed)
    again = records.decode(records.encode(record))
    assert again == record
    assert np.array([*again.logprobs], np.float32).tobytes() == values.tobytes()


def said(**changes: Any) -> bytes:
    record = json.loads(records.encode(record_of(run_of(0, 2), run_of(2, 4, engine=None))))
    return json.dumps(record | changes).encode()


def runs_said(*spans: tuple[int, int]) -> list[dict[str, Any]]:
    (first, *_) = json.loads(said())["runs"]
    return [first | {"start": start, "end": end} for start, end in spans]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "it is no response"),
        (b"[]", "it is no response"),
        (said(token_ids=[0, 1, 2, -1]), "it is no response"),
        (said(format=2), "it has format 2, and this release reads 1"),
        (said(seed=2**64), "does not fit 64 bits"),
        (said(logprobs=[0.0] * 3), "a log-probability for each token"),
        (said(prompt_ids=[]), "it needs a prompt"),
        (said(runs=[]), "its runs are not one behind the other from token 0 to token 4"),
        (said(runs=runs_said((0, 2))), "its runs"),
        (said(runs=runs_said((0, 2), (3, 4))), "its runs"),
        (said(runs=runs_said((0, 3), (2, 4))), "its runs"),
        (said(runs=runs_said((0, 2), (2, 2), (2, 4))), "its runs"),
        (said(runs=runs_said((0, 2), (2, 5))), "its runs"),
        (said(sampling={"max_tokens": 0}), "max_tokens=0 is not possible"),
    ],
)
def test_a_line_that_is_no_response_is_told(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        records.decode(line)


def test_a_file_grows_and_a_bad_line_of_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    made = [msgspec.structs.replace(record_of(run_of(0, 4)), index=index) for index in range(3)]
    records.append(file, made[:2])
    records.append(file, made[2:])
    assert list(records.read(file)) == made
    file.write_bytes(file.read_bytes() + b"\n{}\n")
    with pytest.raises(ValueError, match="line 5: it is no response"):
        list(records.read(file))


def test_what_was_saved_behind_a_line_that_was_broken_off_is_whole(tmp_path: Path) -> None:
    file, record = tmp_path / "rollouts.jsonl", record_of(run_of(0, 4))
    records.append(file, [record] * 2)
    file.write_bytes(file.read_bytes()[:-30])
    records.append(file, [record])
    with pytest.raises(ValueError, match=r"^line 2: it is no response"):
        list(records.read(file))
    first, _, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + last)
    assert list(records.read(file)) == [record] * 2


def test_a_file_has_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_MAX", 2)
    file = tmp_path / "rollouts.jsonl"
    records.append(file, [record_of(run_of(0, 4))] * 3)
    with pytest.raises(ValueError, match="more than 2 lines: split it"):
        list(records.read(file))
