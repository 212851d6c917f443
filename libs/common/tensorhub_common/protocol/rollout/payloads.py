"""What payloads of rollouts hold, as msgpack: prompts of a `submit`, and tokens of an `end` or a `checkpoint`.

Tokens are int32 and log-probabilities float32, both little-endian and without padding, as in `messages`.

No two payloads are equal, since each has a `nonce` of its own. Else one that an entry is about to name could be
removed, because an earlier entry with equal content is done or was refused.
"""

import hashlib
from typing import Annotated, Final

import msgspec

from tensorhub_common.errors import IntegrityError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Sampling, TokenRun, VersionRule

METADATA_BYTES_MAX: Final = 64 * 1024
"""Of one prompt."""


class SubmittedTurn(msgspec.Struct, frozen=True, array_like=True):
    """Which call of which session of a gateway a prompt is for."""

    session: str
    turn: int


class SubmittedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One group's prompt: token ids, and the user's metadata as JSON, which no runner gets."""

    tokens: bytes
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)] = b""
    turn: SubmittedTurn | None = None
    """Earlier releases read past it."""


class SubmittedPrompts(msgspec.Struct, frozen=True):
    """The payload of a `submit`: the prompts of its groups, in their order.

    `sampling.seed` is the seed of all; each request has its own of it (`request_seed`). `rule.pinned` is None: a group
    names its version itself. `age_max`: how many newer versions may be published when a response is delivered, counted
    from its oldest token; None: any number. `newest`: the newest published version that the trainer knew of, by which
    the age of its groups is told; None: it knew of none, or is of an earlier release.
    """

    sampling: Sampling
    rule: VersionRule
    prompts: tuple[SubmittedPrompt, ...]
    nonce: str
    age_max: int | None = None
    newest: int | None = None

    def rule_of(self, version: int | None) -> VersionRule:
        """Return on which versions a group may begin. `version`: the one that it is for alone.

        It does not begin on one that is older than `age_max` allows: each of its tokens would be made in vain.
        """
        if version is not None:
            return msgspec.structs.replace(self.rule, pinned=version)
        if self.age_max is None or self.rule.staleness <= self.age_max:
            return self.rule
        return msgspec.structs.replace(self.rule, staleness=self.age_max)


class StoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request, with their log-probabilities, and the runs that they belong to."""

    tokens: bytes
    logprobs: bytes
    runs: tuple[TokenRun, ...]


class StoredTokensOf(msgspec.Struct, frozen=True, array_like=True):
    """The payload of an `end` or a `checkpoint`, in the order of its requests."""

    nonce: str
    requests: tuple[StoredTokens, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_prompts: Final = msgspec.msgpack.Decoder(SubmittedPrompts)
_tokens: Final = msgspec.msgpack.Decoder(StoredTokensOf)


def encode_prompts(prompts: SubmittedPrompts) -> bytes:
    """Return the payload of a `submit`."""
    return _encoder.encode(prompts)


def decode_prompts(data: bytes) -> SubmittedPrompts:
    """Read the payload of a `submit`. Raises `IntegrityError` on anything else."""
    try:
        found = _prompts.decode(data)
    except MALFORMED as why:
        raise IntegrityError(f"a payload has no prompts: {why}. Submit them again"[:500]) from None
    if any(len(each.tokens) % TOKEN_BYTES or not each.tokens for each in found.prompts):
        raise IntegrityError("a payload has a prompt that is not made of whole token ids: submit it again")
    return found


def encode_tokens(nonce: str, tokens: tuple[StoredTokens, ...]) -> bytes:
    """Return the payload of an `end` or a `checkpoint`."""
    return _encoder.encode(StoredTokensOf(nonce, tokens))


def decode_tokens(data: bytes) -> tuple[StoredTokens, ...]:
    """Read the payload of an `end` or a `checkpoint`. Raises `IntegrityError` on anything else."""
    try:
        found = _tokens.decode(data).requests
    except MALFORMED as why:
        raise IntegrityError(f"a payload has no tokens: {why}"[:500]) from None
    if any(len(each.tokens) % TOKEN_BYTES or len(each.tokens) != len(each.logprobs) for each in found):
        raise IntegrityError("a payload has not as many log-probabilities as tokens")
    return found


def request_seed(seed: int, group: str, index: int) -> int:
    """Return a request's own seed, of 64 bits: of its sampling's seed, its group's id and its index in the group."""
    said = f"{seed}\0{group}\0{index}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


def group_digest(prompt: bytes, sampling: Sampling, version: int | None, size: int) -> str:
    """Return what a group's id stands for, as 64 hexadecimal digits."""
    said = _encoder.encode((prompt, sampling, version, size))
    return hashlib.blake2b(said, digest_size=32).hexdigest()
