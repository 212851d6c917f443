"""The exact mode: tokens and log-probabilities bit for bit the same, whatever else the engine does.

Right is what a plain loop makes: the whole sequence through transformers' own model in float64 for each token, without
a cache, with this engine's draws.
"""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, CONTEXT, VOCABULARY, Desk, Response, engine_of, fill, tiny
from transformers import PreTrainedModel

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.sampling import draw

FAMILIES = sorted(CONFIGS)
CASES: list[tuple[list[int], Sampling]] = [
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 7)),
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 8, temperature=0.7, top_p=0.9)),
    ([60], Sampling(12, 2**63, temperature=1.3, top_k=20, logprobs="temperature")),
    ([1, 2, 3, 4], Sampling(9, 3, temperature=0.0)),
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> list[Response]:
    """Return each case as it is generated with nothing else in the engine."""
    return [generated(model, [case])[0] for case in CASES]


def generated(model: PreTrainedModel, cases: list[tuple[list[int], Sampling]], **limits: int) -> list[Response]:
    desk = Desk(engine_of(model, **limits))
    responses = [desk.begin(number, *case) for number, case in enumerate(cases)]
    desk.run()
    return responses


@torch.no_grad()
def plain_loop(model: PreTrainedModel, prompt: list[int], sampling: Sampling) -> tuple[list[int], list[float]]:
    tokens, logprobs = list(prompt), list[float]()
    for _ in range(sampling.tokens_max):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[:, -1]
        (drawn,) = draw(logits, [sampling], [len(tokens)])
        assert drawn is not None
        tokens.append(drawn.token)
        logprobs.append(drawn.logprob)
    return tokens[len(prompt) :], logprobs


def test_it_generates_what_a_plain_loop_does(
    model: PreTrainedModel, alone: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax = torch.nn.functional.softmax
    # Transformers has its softmax in float32, whatever the model's dtype is.
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")
    for (prompt, sampling), response in zip(CASES, alone, strict=True):
        tokens, logprobs = plain_loop(plain, prompt, sampling)
        assert response.tokens == tokens
        # On the wire they are float32.
        rounding = np.spacing(np.abs(np.array(logprobs, np.float32))) / 2
        assert (np.abs(np.array(response.logprobs) - logprobs) <= 1e-9 + rounding).all()
        assert response.reason == "length"


def test_a_batch_and_the_parts_of_prompts_change_no_bit(model: PreTrainedModel, alone: list[Response]) -> None:
    assert generated(model, CASES) == alone
    assert generated(model, CASES[::-1], prefill_tokens_max=2) == alone[::-1]


def test_a_full_cache_changes_no_bit(model: PreTrainedModel, alone: list[Response]) -> None:
    """Attempts wait and are computed again, some of them several times."""
    assert generated(model, CASES, cache_tokens_max=24, context_tokens_max=24) == alone


def test_a_response_that_moves_changes_no_bit(model: PreTrainedModel, alone: list[Response]) -> None:
    """Stopped after any number of tokens, and gone on with in another engine between other attempts."""
    there = Desk(engine_of(model, prefill_tokens_max=3))
    there.begin(90, [7, 7, 7, 7, 7], Sampling(20, 1))
    there.step()
    for number, (case, right) in enumerate(zip(CASES, alone, strict=True)):
        for after in range(1, case[1].tokens_max, 3):
            here = Desk(engine_of(model))
            begun = here.begin(0, *case)
            while len(begun.tokens) < after:
                here.step()
            here.engine.stop(Attempt(1, 0))
            assert not here.engine.has_work
            moved = there.begin(10 * number + after, *case, before=begun)
            while moved.finished is None:
                there.step()
            assert moved == right


def test_the_weights_dtype_is_not_the_computations() -> None:
    """Weights in bfloat16 are computed with in float64, exactly as the same values in float32 are."""
    halves = tiny("llama", torch.bfloat16)
    singles = tiny("llama")
    with torch.no_grad():
        for single, half in zip(singles.parameters(), halves.parameters(), strict=True):
            single.copy_(half)
    assert generated(halves, CASES) == generated(singles, CASES)


def test_drawn_orders_of_begins_stops_and_steps_change_no_bit() -> None:
    """Many attempts that come and go at one engine, over two versions of the weights."""
    model, chance = tiny("qwen3"), random.Random(5)
    cases = [
        (
            [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 12))],
            Sampling(chance.randrange(1, 16), number, temperature=chance.choice([0.0, 1.0]), top_p=0.95),
        )
        for number in range(16)
    ]
    cases += cases[:4]  # Prompts that are shared.
    right = {seed: list[Response]() for seed in (1, 2)}
    for seed, responses in right.items():
        fill(model, seed)
        responses += [generated(model, [case])[0] for case in cases]
    fill(model, 1)
    desk = Desk(engine_of(model, slots=6, cache_tokens_max=CONTEXT, prefill_tokens_max=7))
    for seed in (1, 2):
        fill(model, seed)
        desk.engine.weights_changed()
        waiting = [(number, case, None) for number, case in enumerate(cases)]
        running = dict[int, Response]()
        ended = dict[int, Response]()
        base = 1000 * seed
        while waiting or running:
            if waiting and len(running) < 6:
                number, case, before = waiting.pop(0)
                base += 100
                running[number] = desk.begin(base + number, *case, before=before)
            elif chance.random() < 0.1:
                number = chance.choice(sorted(running))
                attempt = next(key for key, each in desk.responses.items() if each is running[number])
                desk.engine.stop(attempt)
                waiting.append((number, cases[number], running.pop(number)))
            else:
                desk.step()
            for number in [each for each, response in running.items() if response.finished is not None]:
                ended[number] = running.pop(number)
        assert [ended[number] for number in range(len(cases))] == right[seed]
