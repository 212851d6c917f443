"""The fast mode: all attempts in one pass, in the dtype of the weights, close to what each is alone."""

import copy
from typing import Any

import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, Desk, Response, engine_of, tiny
from transformers import PreTrainedModel

from tensorhub_common.protocol.rollout.messages import Sampling

CASES: list[tuple[list[int], Sampling]] = [
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 7)),
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 8, temperature=0.7, top_p=0.9)),
    ([60], Sampling(12, 5, temperature=1.3, top_k=20, logprobs="temperature")),
    (list(range(30)), Sampling(9, 3, temperature=0.0)),
]


@pytest.fixture(params=sorted(CONFIGS))
def model(request: Any) -> PreTrainedModel:
    return tiny(request.param)


@torch.no_grad()
def scored(model: PreTrainedModel, prompt: list[int], response: Response) -> list[float]:
    """Return the log-probabilities of a response's tokens at temperature 1, as the model by itself has them."""
    plain = copy.deepcopy(model).float()
    tokens = [*prompt, *response.tokens]
    logits = plain(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1)[torch.arange(len(response.tokens)), response.tokens].tolist()  # type: ignore[no-any-return]


def test_log_probabilities_are_those_of_the_model(model: PreTrainedModel) -> None:
    """In a batch whose prompts are computed in parts, some of which wait."""
    desk = Desk(engine_of(model, is_exact=False, prefill_tokens_max=7, cache_tokens_max=50, context_tokens_max=48))
    cases = [(prompt, Sampling(each.tokens_max, each.seed)) for prompt, each in CASES]
    for (prompt, sampling), response in zip(cases, desk.generate(*cases), strict=True):
        assert (len(response.tokens), response.reason) == (sampling.tokens_max, "length")
        assert response.logprobs == pytest.approx(scored(model, prompt, response), abs=2e-4)


def test_it_draws_what_the_exact_mode_draws() -> None:
    """The same numbers are drawn, so tokens differ only where rounding does."""
    model = tiny("qwen3")
    fast = Desk(engine_of(model, is_exact=False)).generate(*CASES)
    for one, other in zip(fast, Desk(engine_of(model)).generate(*CASES), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_in_bfloat16_are_computed_with_as_they_are(family: str) -> None:
    model = tiny(family, torch.bfloat16)
    engine = engine_of(model, is_exact=False)
    assert engine.facts.dtype == "bfloat16"
    (response,) = Desk(engine).generate(CASES[0])
    assert response.logprobs == pytest.approx(scored(model, CASES[0][0], response), abs=0.5)
