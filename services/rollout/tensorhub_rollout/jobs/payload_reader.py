"""Reads and writes the payloads of one job, and keeps the prompts that were read last. I/O.

Invariant: what is kept has at most `PROMPTS_BYTES_MAX` as it was in the store.
"""

import asyncio
from collections import OrderedDict
from typing import Final

import msgspec

from tensorhub_common.errors import IntegrityError
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.protocol.rollout.entries import Payload, RequestId
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, TokenRun
from tensorhub_common.protocol.rollout.payloads import (
    StoredTokens,
    SubmittedPrompts,
    decode_prompts,
    decode_tokens,
    encode_tokens,
    request_seed,
)
from tensorhub_rollout.core.leader_events import PrefixLoaded, PromptLoaded
from tensorhub_rollout.log.state import RolloutState

PROMPTS_BYTES_MAX: Final = 256 * 1024 * 1024


class PayloadReader:
    """The payloads of one job."""

    def __init__(self, job: str, store: PayloadStore) -> None:
        self._job, self._store = job, store
        self._prompts: OrderedDict[str, tuple[int, SubmittedPrompts]] = OrderedDict()
        self._prompts_bytes = 0
        self._reading: dict[str, asyncio.Lock] = {}

    def known_prompt(self, state: RolloutState, of: RequestId) -> PromptLoaded | None:
        """Return what an attempt needs of a request's submission if it was read lately."""
        submission = state.submissions.get(of.submission)
        if submission is None or of.index not in submission.requests:
            return None
        found = self._prompts.get(submission.payload)
        if found is None:
            return None
        self._prompts.move_to_end(submission.payload)
        return _prompt_of(state, of, found[1])

    async def read_prompts(self, state: RolloutState, of: RequestId) -> None:
        """Read the submission of a request, so that `known_prompt` has it.

        Raises `BlobMissing`, `IntegrityError`, or `NoBus` when NATS doesn't answer.
        """
        submission = state.submissions.get(of.submission)
        if submission is None:
            return
        digest = submission.payload
        # A thousand requests of one submission read it once.
        async with self._reading.setdefault(digest, asyncio.Lock()):
            if digest not in self._prompts:
                data = await self._store.get(self._job, digest)
                prompts = decode_prompts(data)
                if len(prompts.prompts) <= max(submission.groups):
                    raise IntegrityError(
                        f"payload {digest} has {len(prompts.prompts)} prompts, and more were submitted"
                    )
                self._keep(digest, len(data), prompts)
        self._reading.pop(digest, None)

    def _keep(self, digest: str, nbytes: int, prompts: SubmittedPrompts) -> None:
        self._prompts[digest] = (nbytes, prompts)
        self._prompts_bytes += nbytes
        while self._prompts_bytes > PROMPTS_BYTES_MAX and len(self._prompts) > 1:
            self._prompts_bytes -= self._prompts.popitem(last=False)[1][0]

    async def read_prefix(self, state: RolloutState, of: RequestId) -> PrefixLoaded | None:
        """Return what checkpoints hold of a request; None: it has ended meanwhile.

        Raises `BlobMissing`, `IntegrityError`, or `NoBus` when NATS doesn't answer.
        """
        request = state.request(of)
        if request is None:
            return None
        parts = [(each.payload, each.index, each.stop - each.start, each.stop) for each in request.parts]
        tokens, logprobs, runs = bytearray(), bytearray(), list[TokenRun]()
        for payload, index, count, stop in parts:
            stored = decode_tokens(await self._store.get(self._job, payload))[index]
            if len(stored.tokens) < TOKEN_BYTES * count:
                raise IntegrityError(f"payload {payload} has fewer tokens of request {of} than its checkpoint says")
            tokens += stored.tokens[: TOKEN_BYTES * count]
            logprobs += stored.logprobs[: TOKEN_BYTES * count]
            runs += [run for run in stored.runs if run.start < stop and (not runs or run.start > runs[-1].start)]
        return PrefixLoaded(of, bytes(tokens), bytes(logprobs), tuple(runs))

    async def write(self, nonce: str, tokens: tuple[StoredTokens, ...]) -> Payload:
        """Store tokens and return what an entry says of them. Raises `LogFull`, or `NoBus` when NATS doesn't answer."""
        data = encode_tokens(nonce, tokens)
        return Payload(await self._store.put(self._job, data), len(data))

    async def drop(self, digest: str) -> None:
        """Remove a payload that no entry names any more."""
        found = self._prompts.pop(digest, None)
        if found is not None:
            self._prompts_bytes -= found[0]
        await self._store.drop(self._job, digest)


def _prompt_of(state: RolloutState, of: RequestId, prompts: SubmittedPrompts) -> PromptLoaded:
    submission = state.submissions[of.submission]
    index = submission.requests[of.index].group
    group = submission.groups[index]
    seed = request_seed(prompts.sampling.seed, group.id, of.index - group.first)
    sampling = msgspec.structs.replace(prompts.sampling, seed=seed)
    rule = prompts.rule_of(group.version)
    return PromptLoaded(of, prompts.prompts[index].tokens, sampling, rule, prompts.age_max, prompts.newest)
