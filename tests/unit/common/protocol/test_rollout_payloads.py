"""What payloads of rollouts hold: no two are equal, what was written is read, and what is no payload is told."""

import struct

import pytest
from msgspec import msgpack, structs

from tensorhub_common.errors import IntegrityError
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling, TokenRun, VersionRule
from tensorhub_common.protocol.rollout.payloads import (
    StoredTokens,
    SubmittedPrompt,
    SubmittedPrompts,
    decode_prompts,
    decode_tokens,
    encode_prompts,
    encode_tokens,
    group_digest,
    request_seed,
)

TOKENS = struct.pack("<2i", 5, 9)
STORED = StoredTokens(TOKENS, struct.pack("<2f", -0.5, -1.0), (TokenRun(0, 1, "root", "runner-0", Attempt(1, 1)),))
PROMPTS = SubmittedPrompts(Sampling(4, 7), VersionRule(), (SubmittedPrompt(TOKENS, b"{}"),), "2.1")


def test_equal_prompts_and_tokens_are_different_payloads() -> None:
    """Else one that an entry is about to name could be removed, because another entry with equal content is done."""
    assert encode_prompts(PROMPTS) != encode_prompts(structs.replace(PROMPTS, nonce="2.2"))
    assert encode_tokens("1-1", (STORED,)) != encode_tokens("1-2", (STORED,))
    assert decode_prompts(encode_prompts(PROMPTS)) == PROMPTS
    assert decode_tokens(encode_tokens("1-1", (STORED, STORED))) == (STORED, STORED)


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", encode_tokens("n", (STORED,)), TOKENS])
def test_what_is_no_prompts_is_told(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="has no prompts"):
        decode_prompts(data)


@pytest.mark.parametrize("tokens", [b"", TOKENS[:5]])
def test_a_prompt_has_whole_token_ids(tokens: bytes) -> None:
    with pytest.raises(IntegrityError, match="not made of whole token ids"):
        decode_prompts(encode_prompts(structs.replace(PROMPTS, prompts=(SubmittedPrompt(tokens),))))


def test_what_is_no_tokens_is_told() -> None:
    for data in (b"", b"\xff", encode_prompts(PROMPTS), msgpack.encode(STORED)):
        with pytest.raises(IntegrityError, match="has no tokens"):
            decode_tokens(data)
    for stored in (structs.replace(STORED, logprobs=b""), structs.replace(STORED, tokens=b"1", logprobs=b"1")):
        with pytest.raises(IntegrityError, match="as many log-probabilities as tokens"):
            decode_tokens(encode_tokens("n", (stored,)))


def test_a_request_has_a_seed_of_its_own_and_a_group_stands_for_its_content() -> None:
    """Both are the same on every host and in every release: a response can be generated again."""
    assert request_seed(7, "p-17", 3) == request_seed(7, "p-17", 3) < 1 << 64
    seeds = {request_seed(seed, group, index) for seed in (7, 8) for group in ("p", "q") for index in range(4)}
    assert len(seeds) == 16
    assert request_seed(7, "p-17", 3) == 15825922659475476456
    contents = [
        (TOKENS, Sampling(4, 7), None, 8),
        (TOKENS[:4], Sampling(4, 7), None, 8),
        (TOKENS, Sampling(4, 8), None, 8),
        (TOKENS, Sampling(4, 7), 1, 8),
        (TOKENS, Sampling(4, 7), None, 4),
    ]
    assert len({group_digest(*content) for content in contents}) == len(contents)


@pytest.mark.parametrize(
    ("staleness", "age_max", "version", "expected"),
    [
        (3, None, None, VersionRule(staleness=3)),
        (3, 1, None, VersionRule(staleness=1)),
        (1, 3, None, VersionRule(staleness=1)),
        (3, 1, 7, VersionRule(pinned=7, staleness=3)),
    ],
)
def test_a_group_begins_on_no_version_that_is_too_old_to_be_delivered(
    staleness: int, age_max: int | None, version: int | None, expected: VersionRule
) -> None:
    prompts = structs.replace(PROMPTS, rule=VersionRule(staleness=staleness), age_max=age_max)
    assert prompts.rule_of(version) == expected


def test_prompts_of_an_earlier_release_name_no_newest_version() -> None:
    earlier = msgpack.decode(encode_prompts(PROMPTS))
    del earlier["newest"]
    assert decode_prompts(msgpack.encode(earlier)).newest is None
