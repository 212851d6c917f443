"""The demo's generation: cached like the uncached, reproducible, and safe to print."""

import torch

from tensorhub.demo.generate import generate, one_line
from tensorhub.demo.model import END, build, decode, encode
from tensorhub.demo.size import Size

MODEL = build(Size(width=32, layers=2, heads=2, hidden=64))


def test_greedy_text_is_what_the_uncached_model_says() -> None:
    tokens = encode("the river")
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(MODEL(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert generate(MODEL, "the river", tokens=8) == decode(tokens[len("the river") :])
    assert MODEL.training


def test_drawn_text_follows_from_the_seed() -> None:
    drawn = {seed: generate(MODEL, "", tokens=20, temperature=1.0, seed=seed) for seed in (1, 2)}
    assert drawn[1] != drawn[2]
    assert drawn[1] == generate(MODEL, "", tokens=20, temperature=1.0, seed=1)


def test_text_ends_where_the_model_ends_it() -> None:
    model = build(Size(width=32, layers=1, heads=2, hidden=64))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[END] = 0
        model.lm_head.weight[END].add_(
            model(torch.tensor([encode("x")]), output_hidden_states=True).hidden_states[-1][0, -1]
        )
    assert generate(model, "x") == ""


def test_one_line_is_safe_for_a_terminal() -> None:
    assert one_line("a\nb\x1b[2J\tü") == "a / b·[2J·ü"
