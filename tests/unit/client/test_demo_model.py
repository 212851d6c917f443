"""The demo's model: the same from the same seed, hollow for engines, and a tokenizer of bytes."""

import pytest
import torch

from tensorhub._tensors.description import bind, describe
from tensorhub.demo.model import BEGIN, END, VOCABULARY, build, decode, encode, hollow
from tensorhub.demo.size import Size
from tensorhub_common.layout.layout import segment_bytes

TINY = Size(width=32, layers=2, heads=2, hidden=64)


def test_default_size() -> None:
    parameters = sum(parameter.numel() for parameter in hollow(Size()).parameters())
    assert 20_000_000 < parameters < 60_000_000


def test_weights_follow_from_the_seed_and_leave_the_global_one_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = build(TINY, seed=1).state_dict(), build(TINY, seed=1).state_dict()
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], build(TINY, seed=2).state_dict()["lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_hollow_model_speaks_once_its_memory_is_filled(tied: bool) -> None:  # noqa: FBT001 (a parameter of the test)
    size = Size(width=32, layers=2, heads=2, hidden=64, tied=tied)
    trainer, engine = build(size), hollow(size)
    given, wanted = describe(trainer), describe(engine)
    assert given.layout == wanted.layout
    assert (given.names["lm_head.weight"] == "model.embed_tokens.weight") is tied
    memory = bytearray(segment_bytes(given.layout))
    bind(given, memory)
    bind(wanted, bytearray(memory), memory_wins=True)
    tokens = torch.tensor([encode("the river")])
    with torch.inference_mode():
        assert torch.equal(engine(tokens).logits, trainer.eval()(tokens).logits)


def test_tokens_are_bytes() -> None:
    assert decode([BEGIN, *encode("größer\n"), END]) == "größer\n"
    assert decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert max(BEGIN, END) < VOCABULARY
