"""The exact mode: tokens and log-probabilities bit for bit the same, whatever else the engine does.

Right is what a plain loop makes: the whole sequence through transformers' own model in float64 for each token, without
a cache, with this engine's draws.
"""

import copy
import random
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, CONTEXT, VOCABULARY, Desk, Response, engine_of, fill, tiny
from transformers import PreTrainedModel

from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.packed_model import PackedModel
from tensorhub_runner.engines.sampling import draw
from tensorhub_runner.engines.schedule import Chunk

FAMILIES = sorted(CONFIGS)
Case = tuple[list[int], Sampling]
CASES: list[Case] = [
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 7)),
    ([5, 9, 3, 17, 21, 8, 2, 40, 33], Sampling(10, 8, temperature=0.7, top_p=0.9)),
    ([60], Sampling(12, 2**63, temperature=1.3, top_k=20, logprobs="temperature")),
    ([1, 2, 3, 4], Sampling(9, 3, temperature=0.0)),
]


@pytest.fixture(scope="module", autouse=True)
def same_logits() -> Iterator[None]:
    """Let equal tokens have equal logits in all tests here: in float64, where a response has float32."""
    seen = dict[Hashable, torch.Tensor]()
    values = dict[Hashable, tuple[float, ...]]()
    compute = PackedModel.compute

    def witnessed(self: PackedModel, cache: KvCache, chunks: list[Chunk]) -> list[tuple[Chunk, torch.Tensor]]:
        made = compute(self, cache, chunks)
        written = (id(self), *(each._version for each in self._model.parameters()))
        if written not in values:
            values[written] = tuple(each.double().sum().item() for each in self._model.parameters())
        # Those of term 0 are the engine's own, by which it finds out how many rows a pass may have.
        for chunk, logits in [each for each in made if each[0].sequence.attempt.term]:
            key = (self.name, values[written], chunk.sequence.tokens.tobytes())
            assert torch.equal(seen.setdefault(key, logits.clone()), logits)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedModel, "compute", witnessed)
        yield
    assert seen


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def here(model: PreTrainedModel) -> Desk:
    return Desk(engine_of(model))


@pytest.fixture(scope="module")
def there(model: PreTrainedModel) -> Desk:
    """Return an engine that computes prompts in small parts, and whose cache has no room for two long responses."""
    return Desk(engine_of(model, prefill_tokens_max=3, cache_tokens_max=24, context_tokens_max=24))


@pytest.fixture(scope="module")
def alone(here: Desk) -> list[Response]:
    """Return each case as it is generated with nothing else in the engine."""
    return [here.generate(case)[0] for case in CASES]


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

    def without_rounding(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Transformers has attention's softmax in float32, whatever the model's dtype is; and that of experts."""
        return softmax(scores, dim, dtype=None if scores.ndim == 4 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", without_rounding)
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


def test_the_machine_computes_rows_alike_in_each_place(model: PreTrainedModel, here: Desk) -> None:
    """Else the engine takes one row a pass, as it does with experts, and is slower. Odd sizes may be either."""
    rows = "1" if "Moe" in type(model).__name__ else "16"
    if model.config.model_type != "gpt2":
        assert dict(here.engine.facts.build)["exact rows"] == rows


def test_a_batch_changes_no_bit(here: Desk, alone: list[Response]) -> None:
    """A batch in another order has each row in another place."""
    assert here.generate(*CASES) == alone
    assert here.generate(*CASES[::-1]) == alone[::-1]


def test_parts_of_prompts_and_a_full_cache_change_no_bit(there: Desk, alone: list[Response]) -> None:
    """Attempts wait and are computed again, some of them several times."""
    assert there.generate(*CASES) == alone


@pytest.mark.parametrize("after", [1, 5])
def test_a_response_that_moves_changes_no_bit(here: Desk, there: Desk, alone: list[Response], after: int) -> None:
    """Stopped after some tokens, and gone on with in another engine beside another attempt."""
    begun = [here.begin(*case) for case in CASES]
    while any(len(each.tokens) < after for each in begun):
        here.step()
    for each in begun:
        here.stop(each)
    assert not here.engine.has_work
    there.begin([7, 7, 7, 7, 7], Sampling(9, 1))
    moved = [there.begin(*case, before=each) for case, each in zip(CASES, begun, strict=True)]
    there.run()
    assert moved == alone


def test_each_place_is_one_to_stop_at() -> None:
    """A response moves between two engines after each of its tokens."""
    desks = [Desk(engine_of(tiny("llama"), prefill_tokens_max=size)) for size in (4, 64)]
    (right,) = desks[0].generate(CASES[1])
    response = desks[0].begin(*CASES[1])
    for number in range(1, CASES[1][1].tokens_max):
        here, there = desks[::-1] if number % 2 else desks
        while len(response.tokens) < number:
            there.step()
        there.stop(response)
        response = here.begin(*CASES[1], before=response)
    here.run()
    assert response == right


def test_the_weights_dtype_is_not_the_computations() -> None:
    """Weights in bfloat16 are computed with in float64, exactly as the same values in float32 are."""
    halves, singles = tiny("llama", torch.bfloat16), tiny("llama")
    with torch.no_grad():
        for single, half in zip(singles.parameters(), halves.parameters(), strict=True):
            single.copy_(half)
    assert Desk(engine_of(halves)).generate(*CASES) == Desk(engine_of(singles)).generate(*CASES)


def test_drawn_orders_of_begins_stops_and_steps_change_no_bit() -> None:
    """Many attempts that come and go at one engine, over two versions of the weights."""
    model, chance = tiny("qwen3"), random.Random(5)
    cases: list[Case] = [
        (
            [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 12))],
            Sampling(chance.randrange(1, 12), number, temperature=chance.choice([0.0, 1.0]), top_p=0.95),
        )
        for number in range(8)
    ]
    cases += cases[:3]  # Prompts that are shared.
    here = Desk(engine_of(model))
    desk = Desk(engine_of(model, slots=6, cache_tokens_max=CONTEXT, prefill_tokens_max=7))
    for seed in (1, 2):
        fill(model, seed)
        for each in (here, desk):
            each.engine.weights_changed()
        waiting: list[tuple[int, Response | None]] = [(number, None) for number in range(len(cases))]
        running, ended = dict[int, Response](), dict[int, Response]()
        while waiting or running:
            if waiting and len(running) < 6:
                number, before = waiting.pop(0)
                running[number] = desk.begin(*cases[number], before=before)
            elif chance.random() < 0.1:
                number = chance.choice(sorted(running))
                desk.stop(running[number])
                waiting.append((number, running.pop(number)))
            else:
                desk.step()
            for number in [each for each, response in running.items() if response.finished is not None]:
                ended[number] = running.pop(number)
        assert [ended[number] for number in range(len(cases))] == [here.generate(case)[0] for case in cases]
