"""Tokens that were made before are scored again: with the same weights bit for bit, and otherwise not."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.tiny_engines import CONFIGS, CONTEXT, VOCABULARY, Desk, Response, engine_of, fill, ids, tiny
from transformers import PreTrainedModel

from tensorhub._rollouts.replay import TOLERANCE_OTHERS, TOLERANCES
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.sampling import Scored
from tensorhub_runner.engines.torch_engine import TorchEngine

PROMPT = [5, 9, 3, 17, 21]
SAMPLINGS = [
    Sampling(20, 7),
    Sampling(20, 8, temperature=0.7, top_p=0.9),
    Sampling(20, 2**63, temperature=1.3, top_k=20, logprobs="temperature"),
    Sampling(20, 3, temperature=0.0),
]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: Any) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def desk(model: PreTrainedModel) -> Desk:
    return Desk(engine_of(model))


@pytest.fixture(scope="module")
def scoring(model: PreTrainedModel) -> TorchEngine:
    """Return an engine with the same weights that has generated nothing."""
    return engine_of(model)


@pytest.fixture(scope="module")
def llama() -> TorchEngine:
    return engine_of(tiny("llama"))


def scored(
    engine: TorchEngine, prompt: list[int], made: Response, sampling: Sampling, start: int = 0, end: int | None = None
) -> list[Scored | None]:
    return engine.score(ids(prompt), ids(made.tokens), start, len(made.tokens) if end is None else end, sampling)


def as_made(found: list[Scored | None]) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities as an engine tells them."""
    assert None not in found
    return [each.drawn for each in found if each], [float(np.float32(each.logprob)) for each in found if each]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_same_weights_draw_the_same_tokens_with_the_same_bits(
    desk: Desk, scoring: TorchEngine, sampling: Sampling
) -> None:
    """They were made one at a time, beside others; here they are computed many rows a pass."""
    made, *_ = desk.generate((PROMPT, sampling), ([1], Sampling(9, 1)), ([2, 3], Sampling(30, 1)))
    assert as_made(scored(scoring, PROMPT, made, sampling)) == (made.tokens, made.logprobs)


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_any_part_of_a_response_is_scored_as_the_whole_is(
    llama: TorchEngine, prompt: list[int], seed: int, data: st.DataObject
) -> None:
    sampling = Sampling(CONTEXT - len(prompt), seed, temperature=1.5)
    (made,) = Desk(llama).generate((prompt, sampling))
    start = data.draw(st.integers(0, len(made.tokens) - 1))
    end = data.draw(st.integers(start + 1, len(made.tokens)))
    found = as_made(scored(llama, prompt, made, sampling, start, end))
    assert found == (made.tokens[start:end], made.logprobs[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_a_fast_engine_makes_is_within_what_replay_allows(dtype: torch.dtype) -> None:
    """Scored in float64, of the same weights."""
    sampling = Sampling(30, 7)
    engine = engine_of(tiny("gemma2", dtype), is_exact=False)
    (made,) = Desk(engine).generate((PROMPT, sampling))
    found = scored(engine_of(tiny("gemma2", dtype)), PROMPT, made, sampling)
    apart = max(abs(each.logprob - told) for each, told in zip(found, made.logprobs, strict=True) if each)
    assert 0 < apart < TOLERANCES.get(engine.facts.dtype, TOLERANCE_OTHERS)


def test_another_token_is_seen_and_has_its_own_log_probability(llama: TorchEngine) -> None:
    sampling = Sampling(20, 7)
    (made,) = Desk(llama).generate((PROMPT, sampling))
    other = (made.tokens[9] + 1) % VOCABULARY
    tokens = [*made.tokens[:9], other, *made.tokens[10:]]
    changed = scored(llama, PROMPT, Response(made.attempt, tokens, []), sampling)
    before, at = as_made(changed[:9]), changed[9]
    assert before == (made.tokens[:9], made.logprobs[:9])
    assert at is not None
    assert (at.drawn, math.isfinite(at.logprob)) == (made.tokens[9], True)
    assert at.logprob != pytest.approx(made.logprobs[9])
    # What follows is computed behind the token that stands there.
    assert as_made(changed[10:])[1] != made.logprobs[10:]


def test_a_token_that_could_not_be_drawn_is_told_unless_the_whole_distribution_is_asked_for(llama: TorchEngine) -> None:
    for logprobs, is_finite in (("processed", False), ("temperature", True)):
        sampling = Sampling(4, 7, top_k=1, logprobs=logprobs)  # type: ignore[arg-type]
        (made,) = Desk(llama).generate((PROMPT, sampling))
        tokens = [(made.tokens[0] + 1) % VOCABULARY]
        (found,) = scored(llama, PROMPT, Response(made.attempt, tokens, []), sampling)
        assert found is not None
        assert (found.drawn, math.isfinite(found.logprob)) == (made.tokens[0], is_finite)


def test_other_weights_have_other_log_probabilities(llama: TorchEngine) -> None:
    sampling = Sampling(20, 7)
    (made,) = Desk(llama).generate((PROMPT, sampling))
    assert as_made(scored(engine_of(tiny("llama", seed=2)), PROMPT, made, sampling))[1] != made.logprobs


def test_what_the_model_can_not_have_made_is_told(llama: TorchEngine) -> None:
    sampling = Sampling(20, 7)
    with pytest.raises(BadPrompt, match=f"token id {VOCABULARY}"):
        llama.score(ids(PROMPT), ids([1, VOCABULARY]), 0, 2, sampling)
    with pytest.raises(BadPrompt, match="context ends"):
        llama.score(ids(PROMPT), ids([1] * CONTEXT), 0, 1, Sampling(CONTEXT, 7))
    # What the response might have had in addition is of no interest.
    assert len(llama.score(ids(PROMPT), ids([1]), 0, 1, Sampling(CONTEXT, 7))) == 1


def test_logits_that_are_no_numbers_are_told_and_no_attempt_is_touched() -> None:
    model = tiny("llama")
    engine = engine_of(model)
    desk, sampling = Desk(engine), Sampling(6, 7)
    running = desk.begin(PROMPT, sampling)
    desk.step()
    (alone,) = Desk(engine_of(tiny("llama"))).generate((PROMPT, sampling))
    scored(engine, [1, 2], alone, sampling)
    desk.run()
    assert running == alone
    fill(model, 1)
    next(iter(model.parameters())).data.fill_(math.nan)
    engine.weights_changed()
    assert scored(engine, PROMPT, alone, sampling, 0, 3) == [None, None, None]
