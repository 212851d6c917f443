"""Prompts and sampling as a trainer gives them, checked before anything travels."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal

import msgspec
import numpy as np

from tensorhub import arguments
from tensorhub_common.errors import BadPrompt, NotInThisVersion
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.rollout.messages import STOP_TOKEN_IDS_MAX
from tensorhub_common.protocol.rollout.payloads import METADATA_BYTES_MAX, SubmittedPrompt, SubmittedTurn

TOKEN_ID_MAX: Final = 2**31 - 1
TOKENS_MAX: Final = 4_194_304
"""Limit of a response's tokens."""
PROMPT_TOKENS_MAX: Final = 196_608
"""Limit of a prompt's tokens: it travels to a runner in one message, and NATS takes one of 1 MiB."""
ID_CHARS_MAX: Final = 128
SEED_MAX: Final = 2**63 - 1
TURN_MAX: Final = 2**31 - 1
SEED_BITS: Final = 64
"""Of a request's own seed."""
PROMPTS_BYTES_MAX: Final = 256 * 1024 * 1024
"""Limit of the prompts of one call, with their metadata."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of responses are drawn.

    A token's noise comes from `seed`, its group's id, its index in the group and its position, and from nothing else.
    `logprobs`: of the distribution that was drawn from ("processed"), or of temperature alone ("temperature").
    """

    max_tokens: int = 512
    temperature: float = 1.0
    """0: the likeliest token, with its log-probability at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which is its last token."""
    seed: int = 0
    logprobs: Literal["processed", "temperature"] = "processed"

    def checked(self) -> messages.Sampling:
        """Return it as it travels. Raises `BadPrompt` for a value that is not possible."""
        if self.logprobs not in ("processed", "temperature"):
            raise BadPrompt(f"logprobs={self.logprobs!r:.40} is not possible: take 'processed' or 'temperature'")
        temperature, top_p = _float(self.temperature), _float(self.top_p)
        _number("temperature", self.temperature, "0 or more", is_possible=0 <= temperature < math.inf)
        _number("top_p", self.top_p, "above 0 and at most 1", is_possible=0 < top_p <= 1)
        return messages.Sampling(
            _whole("max_tokens", self.max_tokens, 1, TOKENS_MAX),
            _whole("seed", self.seed, 0, SEED_MAX),
            temperature,
            top_p,
            _whole("top_k", self.top_k, 0, TOKEN_ID_MAX),
            _stop_token_ids(self.stop_token_ids),
            self.logprobs,
        )


def checked_sampling(sampling: object) -> messages.Sampling:
    """Return a sampling as it travels. Raises `BadPrompt` for what is none, or one that is not possible."""
    if not isinstance(sampling, Sampling):
        raise BadPrompt(f"sampling={arguments.shown(sampling)} is no sampling: give tensorhub.Sampling(max_tokens=64)")
    return sampling.checked()


def sampling_of(sent: messages.Sampling) -> Sampling:
    """Return the sampling that has travelled, as a trainer gave it."""
    return Sampling(
        sent.tokens_max, sent.temperature, sent.top_p, sent.top_k, sent.stop_token_ids, sent.seed, sent.logprobs
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to go on from.

    With an `id`, the same prompt may be submitted again, and is generated once: give one where the trainer may restart.
    `metadata` is anything that JSON has; it comes back with each response, and no runner gets it. What JSON lacks comes
    back as JSON writes it: NaN as None, bytes as base64, a set as a list, a number that is a key as text.
    """

    token_ids: "Sequence[int] | np.ndarray[Any, Any]"
    id: str | None = None
    metadata: Any = None
    session: str | None = None
    """With `turn`: which call of which session it is for; both come back. See `AsyncRollouts.gateway`."""
    turn: int | None = None
    media: Any = None
    """Kept for later."""

    def checked(self) -> SubmittedPrompt:
        """Return it as it travels. Raises `BadPrompt` for one that nothing can be generated from."""
        _check_id(self.id)
        which = "a prompt" if self.id is None else f"prompt {self.id!r:.80}"
        if self.media is not None:
            raise NotInThisVersion(f"{which} has media, which this version can't use: leave them out")
        return SubmittedPrompt(_ids(which, self.token_ids), _metadata(which, self.metadata), self._turn(which))

    def _turn(self, which: str) -> SubmittedTurn | None:
        if self.session is None and self.turn is None:
            return None
        if self.session is None or self.turn is None:
            raise BadPrompt(f"{which} has a session or a turn, and not both: give both, or leave both out")
        _check_id(self.session)
        return SubmittedTurn(self.session, _whole("turn", self.turn, 0, TURN_MAX))


def checked_prompts(prompts: object) -> Iterator[tuple[Prompt, SubmittedPrompt]]:
    """Yield prompts, each with how it travels. Raises `BadPrompt`, also where they are too many bytes."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise BadPrompt(
            f"{arguments.shown(prompts)} is no list of prompts: give a list, as in [tensorhub.Prompt([1, 5, 9])]"
        )
    nbytes, ids = 0, set[str]()
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            raise BadPrompt(f"{arguments.shown(prompt)} is no prompt: give tensorhub.Prompt([1, 5, 9])")
        found = prompt.checked()
        if prompt.id in ids:
            raise BadPrompt(f"two prompts of one call have the id {prompt.id!r}: give each its own")
        if prompt.id is not None:
            ids.add(prompt.id)
        nbytes += len(found.tokens) + len(found.metadata)
        if nbytes > PROMPTS_BYTES_MAX:
            raise BadPrompt(
                f"the prompts of one call have more than {PROMPTS_BYTES_MAX} bytes: submit them in several calls, and "
                "take batches between them"
            )
        yield prompt, found


def _check_id(given: object) -> None:
    if given is None:
        return
    if not isinstance(given, str):
        raise BadPrompt(f"the id {arguments.shown(given)} is no text: take 1 to {ID_CHARS_MAX} printable characters")
    if not 1 <= len(given) <= ID_CHARS_MAX or not given.isprintable():
        raise BadPrompt(f"the id {given!r:.200} can't be used: take 1 to {ID_CHARS_MAX} printable characters")


def _ids(which: str, token_ids: "Sequence[int] | np.ndarray[Any, Any]") -> bytes:
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as why:
        raise BadPrompt(f"the token ids of {which} can't be read: {why}") from None
    if ids.size == 0:
        raise BadPrompt(f"{which} is empty: give at least one token id")
    if ids.ndim != 1:
        raise BadPrompt(f"the token ids of {which} have {ids.ndim} dimensions: give one row of them")
    if ids.dtype.kind not in "iu":
        raise BadPrompt(f"the token ids of {which} are of {ids.dtype}: give integers")
    if ids.size > PROMPT_TOKENS_MAX:
        raise BadPrompt(f"{which} has {ids.size} tokens: take at most {PROMPT_TOKENS_MAX}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > TOKEN_ID_MAX:
        raise BadPrompt(f"{which} has the token id {low if low < 0 else high}: token ids are 0 to {TOKEN_ID_MAX}")
    return ids.astype("<i4").tobytes()


def _metadata(which: str, metadata: object) -> bytes:
    if metadata is None:
        return b""
    try:
        found = msgspec.json.encode(metadata)
    except (TypeError, ValueError, *MALFORMED) as why:
        raise BadPrompt(f"the metadata of {which} is not what JSON has: {why}") from None
    if len(found) > METADATA_BYTES_MAX:
        raise BadPrompt(f"the metadata of {which} has {len(found)} bytes: take at most {METADATA_BYTES_MAX}")
    return found


def _stop_token_ids(given: object) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise BadPrompt(f"stop_token_ids={arguments.shown(given)} is not possible: give a list of token ids")
    found = tuple(_whole("a stop token id", each, 0, TOKEN_ID_MAX) for each in given)
    if len(found) > STOP_TOKEN_IDS_MAX:
        raise BadPrompt(f"a sampling has {len(found)} stop tokens: take at most {STOP_TOKEN_IDS_MAX}")
    return found


def _whole(what: str, number: object, low: int, high: int) -> int:
    """Return a whole number of any library as Python's."""
    try:
        found = arguments.whole(what, number)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        raise BadPrompt(f"{what}={arguments.shown(number)} is not possible: take a whole number from {low} to {high}")
    return found


def _number(what: str, number: object, wanted: str, *, is_possible: bool) -> None:
    if not is_possible:
        raise BadPrompt(f"{what}={arguments.shown(number)} is not possible: take a number {wanted}")


def _float(number: object) -> float:
    """Return NaN, which no comparison holds for, for what is no number."""
    return math.nan if isinstance(number, bool) or not isinstance(number, Real) else float(number)
