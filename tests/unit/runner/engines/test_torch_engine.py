"""What an engine promises to its runner: what it refuses, how attempts end, and what it does when weights change."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, CONTEXT, VOCABULARY, Desk, engine_of, fill, ids, tiny
from transformers import PreTrainedModel

from tensorhub_common.errors import BadPrompt, NotInThisVersion
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Finished, Sampling
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines.engine import Engine, EngineCapacity
from tensorhub_runner.engines.models import build
from tensorhub_runner.engines.schedule import EngineLimits
from tensorhub_runner.engines.torch_engine import TorchEngine

PROMPT = [5, 9, 3, 17]
ATTEMPT = Attempt(1, 1)


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(params=[True, False], ids=["exact", "fast"])
def desk(request: Any, shared: PreTrainedModel) -> Iterator[Desk]:
    fill(shared, 1)
    yield Desk(engine_of(shared, is_exact=request.param))
    fill(shared, 1)


# ---------------------------------------------------------------------------------------------- what it refuses


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(tiny("llama"))


@pytest.mark.parametrize(
    ("prompt", "tokens", "sampling", "said"),
    [
        ([], [], Sampling(4, 0), "no token"),
        ([3, VOCABULARY], [], Sampling(4, 0), f"prompt has the token id {VOCABULARY}"),
        ([3, -1], [], Sampling(4, 0), "prompt has the token id -1"),
        (PROMPT, [VOCABULARY], Sampling(4, 0), f"response has the token id {VOCABULARY}"),
        (PROMPT, [], Sampling(CONTEXT - 3, 0), f"context ends at {CONTEXT}"),
        (PROMPT, [1, 2, 3], Sampling(2, 0), "3 tokens already"),
        (PROMPT, [], Sampling(0, 0), "tokens_max is 0"),
        (PROMPT, [], Sampling(4, 0, temperature=-0.1), "temperature is -0.1"),
        (PROMPT, [], Sampling(4, 0, temperature=math.nan), "temperature is nan"),
        (PROMPT, [], Sampling(4, 0, temperature=math.inf), "temperature is inf"),
        (PROMPT, [], Sampling(4, 0, top_p=0.0), "top_p is 0.0"),
        (PROMPT, [], Sampling(4, 0, top_p=1.5), "top_p is 1.5"),
        (PROMPT, [], Sampling(4, 0, top_p=math.nan), "top_p is nan"),
        (PROMPT, [], Sampling(4, 0, top_k=-1), "top_k is -1"),
        (PROMPT, [], Sampling(4, 1 << 64), "does not fit 64 bits"),
    ],
)
def test_what_can_not_be_generated_from_is_refused_and_changes_nothing(
    engine: Engine, prompt: list[int], tokens: list[int], sampling: Sampling, said: str
) -> None:
    with pytest.raises(BadPrompt, match=said):
        engine.begin(ATTEMPT, ids(prompt), ids(tokens), sampling)
    assert not engine.has_work
    # The longest that fits is taken.
    engine.begin(ATTEMPT, ids(PROMPT), b"", Sampling(CONTEXT - len(PROMPT), 0))
    engine.stop(ATTEMPT)


def test_bytes_that_are_no_tokens_are_refused(engine: Engine) -> None:
    with pytest.raises(BadPrompt, match="no whole number"):
        engine.begin(ATTEMPT, b"\1\0\0\0\2", b"", Sampling(4, 0))


def test_it_takes_so_many_attempts_each_once() -> None:
    engine: Engine = engine_of(tiny("llama"), slots=2)
    assert engine.capacity == EngineCapacity(2, CONTEXT, EngineLimits().cache_tokens_max)
    engine.begin(ATTEMPT, ids(PROMPT), b"", Sampling(4, 0))
    with pytest.raises(RuntimeError, match="already"):
        engine.begin(ATTEMPT, ids(PROMPT), b"", Sampling(4, 0))
    engine.begin(Attempt(1, 2), ids(PROMPT), b"", Sampling(4, 0))
    with pytest.raises(RuntimeError, match="all it takes"):
        engine.begin(Attempt(1, 3), ids(PROMPT), b"", Sampling(4, 0))
    engine.stop(ATTEMPT)
    # One that has ended already counts until a step has told it.
    engine.begin(ATTEMPT, ids(PROMPT), ids([1]), Sampling(1, 0))
    with pytest.raises(RuntimeError, match="already"):
        engine.begin(ATTEMPT, ids(PROMPT), ids([1]), Sampling(1, 0))
    with pytest.raises(RuntimeError, match="all it takes"):
        engine.begin(Attempt(1, 3), ids(PROMPT), b"", Sampling(4, 0))
    engine.step()
    engine.begin(Attempt(1, 3), ids(PROMPT), b"", Sampling(4, 0))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (EngineLimits(context_tokens_max=CONTEXT + 1), f"context_tokens_max is {CONTEXT + 1}"),
        (EngineLimits(context_tokens_max=30, cache_tokens_max=20), "cache at 20"),
        (EngineLimits(slots=0), "slots is 0"),
    ],
)
def test_limits_that_do_not_fit_are_refused(shared: PreTrainedModel, limits: EngineLimits, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TorchEngine(shared, is_exact=False, limits=limits)


def test_a_context_is_no_longer_than_the_cache(shared: PreTrainedModel) -> None:
    engine = TorchEngine(shared, is_exact=False, limits=EngineLimits(cache_tokens_max=20))
    assert engine.capacity.context_tokens_max == 20


def test_without_weights_nothing_begins(shared: PreTrainedModel) -> None:
    engine = TorchEngine(shared, is_exact=True)
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.begin(ATTEMPT, ids(PROMPT), b"", Sampling(4, 0))


# ---------------------------------------------------------------------------------------------- how attempts end


def test_a_stop_token_ends_a_response_and_is_its_last_token(desk: Desk) -> None:
    (whole,) = desk.generate((PROMPT, Sampling(12, 3)))
    stop = whole.tokens[5]
    length = whole.tokens.index(stop) + 1
    (response,) = desk.generate((PROMPT, Sampling(12, 3, stop_token_ids=(59, stop))))
    assert (response.tokens, response.reason) == (whole.tokens[:length], "stop")
    assert response.logprobs == pytest.approx(whole.logprobs[:length])
    assert response.finished is not None
    assert response.finished.tokens == length


@pytest.mark.parametrize(
    ("sampling", "reason"), [(Sampling(2, 0), "length"), (Sampling(9, 0, stop_token_ids=(8,)), "stop")]
)
def test_what_had_ended_before_it_was_begun_ends_without_a_token(desk: Desk, sampling: Sampling, reason: Any) -> None:
    for _ in range(2):
        desk.engine.begin(ATTEMPT, ids(PROMPT), ids([7, 8]), sampling)
        assert desk.engine.has_work
        assert desk.engine.step() == (StepTokens(ATTEMPT, b"", b"", Finished(ATTEMPT, 2, reason)),)
        assert not desk.engine.has_work
    desk.engine.begin(ATTEMPT, ids(PROMPT), ids([7, 8]), sampling)
    desk.engine.stop(ATTEMPT)
    assert desk.engine.step() == ()


def test_a_stopped_attempt_makes_nothing_more(desk: Desk) -> None:
    one, other = desk.begin(PROMPT, Sampling(8, 1)), desk.begin(PROMPT, Sampling(8, 2))
    desk.step()
    desk.stop(one)
    desk.stop(one)
    tokens = len(one.tokens)
    desk.run()
    assert (len(one.tokens), len(other.tokens)) == (tokens, 8)


def test_logits_that_are_no_numbers_end_their_attempt_alone(desk: Desk, shared: PreTrainedModel) -> None:
    """The embedding of one token is NaN, and only one prompt has it."""
    weight = shared.get_input_embeddings().weight
    (right,) = desk.generate((PROMPT, Sampling(6, 1)))
    with torch.no_grad():
        weight[50] = math.nan
    desk.engine.weights_changed()
    bad, good = desk.generate(([1, 50, 2], Sampling(6, 1)), (PROMPT, Sampling(6, 1)))
    assert bad.finished is not None
    assert (bad.reason, bad.tokens, bad.finished.tokens) == ("failed", [], 0)
    assert "NaN" in str(bad.finished.error)
    assert (good.tokens, good.reason) == (right.tokens, "length")


def test_what_a_failed_attempt_has_left_in_the_cache_counts_nothing(desk: Desk, shared: PreTrainedModel) -> None:
    """Also where sequences of unlike lengths are padded."""
    cases = [(PROMPT, Sampling(6, 1)), (PROMPT * 3, Sampling(6, 2))]
    right = [desk.generate(case)[0] for case in cases]
    with torch.no_grad():
        shared.get_input_embeddings().weight[50] = math.nan
    desk.engine.weights_changed()
    # The one that fails has all places that had been used before.
    assert desk.generate(([50] * 30, Sampling(6, 1)))[0].reason == "failed"
    assert [each.tokens for each in desk.generate(*cases)] == [each.tokens for each in right]


def test_an_error_of_the_model_ends_its_attempt_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises: here for each pass that has a certain token."""
    (right,) = desk.generate((PROMPT, Sampling(6, 1)))
    embedding = torch.nn.functional.embedding

    def raising(input: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:  # noqa: A002 (torch's name)
        if (input == 50).any():
            raise RuntimeError("out of something: " + "x" * 2000)
        return embedding(input, *others, **more)

    monkeypatch.setattr(torch.nn.functional, "embedding", raising)
    first, bad, last = (
        desk.begin(PROMPT, Sampling(6, 1)),
        desk.begin([50], Sampling(6, 1)),
        desk.begin(PROMPT[::-1], Sampling(3, 1)),
    )
    desk.run()
    assert bad.finished is not None
    assert bad.reason == "failed"
    error = str(bad.finished.error)
    assert error.startswith("RuntimeError: out of something")
    assert len(error) <= 500
    assert (first.tokens, first.reason, last.reason) == (right.tokens, "length", "length")
    # It also goes on.
    assert desk.generate((PROMPT, Sampling(6, 1)))[0].tokens == right.tokens


# ---------------------------------------------------------------------------------------------- weights


def test_weights_that_changed_count_from_the_next_step_on(desk: Desk, shared: PreTrainedModel) -> None:
    before, after = Sampling(8, 1), Sampling(8, 1)
    (old,) = desk.generate((PROMPT, before))
    fill(shared, 2)
    desk.engine.weights_changed()
    (new,) = desk.generate((PROMPT, after))
    assert new.tokens != old.tokens
    fill(shared, 1)
    desk.engine.weights_changed()
    assert desk.generate((PROMPT, before))[0].tokens == old.tokens


def test_a_kept_cache_goes_on_with_new_weights_and_no_other_attempt_shares_it(
    desk: Desk, shared: PreTrainedModel
) -> None:
    """What is kept has old keys and new weights; the same prompt that begins now has new keys."""
    kept = desk.begin(PROMPT, Sampling(9, 1))
    while len(kept.tokens) < 4:
        desk.step()
    fill(shared, 2)
    desk.engine.weights_changed()
    recomputed, fresh = desk.begin(PROMPT, Sampling(9, 1), before=kept), desk.begin(PROMPT, Sampling(9, 1))
    desk.run()
    assert kept.tokens[:4] == recomputed.tokens[:4]
    assert kept.logprobs[4] != pytest.approx(recomputed.logprobs[4], abs=1e-6)
    moved = desk.begin(PROMPT, Sampling(9, 1))
    desk.run()
    assert fresh.tokens == moved.tokens
    # The recomputed one is what an engine makes that has known the new weights alone.
    other = Desk(engine_of(shared, is_exact=desk.engine.facts.is_exact))
    prefix = desk.begin(PROMPT, Sampling(4, 1))
    prefix.tokens, prefix.logprobs = kept.tokens[:4], kept.logprobs[:4]
    desk.stop(prefix)
    again = other.begin(PROMPT, Sampling(9, 1), before=prefix)
    other.run()
    assert again.tokens == recomputed.tokens
    assert again.logprobs == pytest.approx(recomputed.logprobs, abs=1e-5)


def test_parameters_that_were_replaced_are_found(desk: Desk, shared: PreTrainedModel) -> None:
    fill(shared, 2)
    desk.engine.weights_changed()
    (right,) = desk.generate((PROMPT, Sampling(8, 1)))
    state = {name: value.clone() for name, value in shared.state_dict().items()}
    fill(shared, 1)
    shared.load_state_dict(state, assign=True)
    desk.engine.weights_changed()
    assert desk.generate((PROMPT, Sampling(8, 1)))[0].tokens == right.tokens


def test_the_given_model_is_not_changed(shared: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in [*shared.named_parameters(), *shared.named_buffers()]}
    attention, is_training = shared.config._attn_implementation, shared.training
    for is_exact in (True, False):
        Desk(engine_of(shared, is_exact=is_exact)).generate((PROMPT, Sampling(4, 1)))
    assert (shared.config._attn_implementation, shared.training) == (attention, is_training)
    after = dict([*shared.named_parameters(), *shared.named_buffers()])
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_fast_mode_has_no_copy_of_the_weights(shared: PreTrainedModel) -> None:
    """What others write is read in the next step, also before `weights_changed` says so."""
    desk = Desk(engine_of(shared, is_exact=False))
    (old,) = desk.generate((PROMPT, Sampling(8, 1)))
    fill(shared, 2)
    (new,) = desk.generate((PROMPT[::-1], Sampling(8, 1)))
    fill(shared, 1)
    assert desk.generate((PROMPT[::-1], Sampling(8, 1)))[0].tokens != new.tokens
    assert old.reason == new.reason == "length"


# ---------------------------------------------------------------------------------------------- models and facts


def test_facts_say_what_it_is_and_how_fast_it_was(shared: PreTrainedModel) -> None:
    """Each look at this clock takes half a second."""
    times = iter(range(10_000))
    engine = TorchEngine(shared, is_exact=True, clock=lambda: next(times) / 2)
    engine.weights_changed()
    assert (engine.facts.kind, engine.facts.device, engine.facts.dtype) == ("torch", "cpu", "float64")
    assert (engine.facts.decode_s, engine.facts.prefill_s) == ((), None)
    assert {"torch", "transformers", "processor", "exact rows"} <= dict(engine.facts.build).keys()
    Desk(engine).generate((PROMPT, Sampling(3, 1)), (PROMPT[::-1], Sampling(5, 2)))
    assert engine.facts.prefill_s == 0.5 / (2 * len(PROMPT))
    assert engine.facts.decode_s == ((1, 0.5), (2, 0.5))


def test_exact_mode_computes_in_one_thread(shared: PreTrainedModel) -> None:
    threads = torch.get_num_threads()
    try:
        engine = engine_of(shared)
        torch.set_num_threads(2)
        engine.step()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_a_model_that_looks_across_tokens_elsewhere_is_refused() -> None:
    """Here the second half of what each token has comes from the token before, as in a convolution."""
    model = tiny("llama")
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: (given[0] + given[0].roll(1, dims=1),))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = TorchEngine(model, is_exact=False)
    # Zeros show nothing.
    engine.weights_changed()
    fill(model, 1)
    with pytest.raises(NotInThisVersion, match="LlamaForCausalLM computes other logits when sequences are packed"):
        engine.weights_changed()


def test_where_a_row_has_other_bits_in_another_place_a_pass_has_one_row() -> None:
    """Here what each row has depends on its place by less than anything but bits can show."""
    model = tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, __, out: out * (1.0 + 1e-15 * torch.arange(out.shape[1], dtype=out.dtype).unsqueeze(-1))
    )
    desk, alone = (Desk(engine_of(model)) for _ in range(2))
    assert dict(desk.engine.facts.build)["exact rows"] == "1"
    cases = [(PROMPT, Sampling(6, 1)), (PROMPT[::-1], Sampling(6, 2))]
    assert desk.generate(*cases) == [alone.generate(case)[0] for case in cases]


def test_a_model_whose_attention_is_its_own_is_refused() -> None:
    model = build(
        {
            "model_type": "bloom",
            "hidden_size": 32,
            "n_layer": 1,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "pad_token_id": 2,
        }
    )
    with pytest.raises(NotInThisVersion, match="BloomForCausalLM"):
        TorchEngine(model, is_exact=False, limits=EngineLimits(context_tokens_max=CONTEXT))


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = build({"model_type": "llama", **CONFIGS["llama"]})
    with pytest.raises(ValueError, match="register the model at the hub first"):
        TorchEngine(model, is_exact=True)


def test_weights_that_are_no_numbers_fail_attempts_and_the_model_is_asked_later() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    desk = Desk(engine_of(model))
    (response,) = desk.generate((PROMPT, Sampling(4, 1)))
    assert response.reason == "failed"
    fill(model, 1)
    desk.engine.weights_changed()
    assert dict(desk.engine.facts.build)["exact rows"] == "16"
    (right,) = Desk(engine_of(model)).generate((PROMPT, Sampling(4, 1)))
    assert desk.generate((PROMPT, Sampling(4, 1))) == [right]
