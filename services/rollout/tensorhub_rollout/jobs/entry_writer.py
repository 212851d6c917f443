"""Writes the leader's entries: ends and checkpoints, many in one entry, each behind its payload. I/O.

What comes while an entry is being written goes into the next one, so that the log is written as often as NATS takes,
and not once for each response.

Invariants:
- A payload is stored before the entry that names it.
- Each end is written, or reported as failed, while this manager leads; nothing is written after `close`.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.rollout_log import RolloutLog
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.rollout.entries import Checkpoint, End, LeaderEntry, Payload, RequestId, Scale
from tensorhub_common.protocol.rollout.payloads import StoredTokens
from tensorhub_rollout.core.leader_events import StoreEnd, StoreTokens
from tensorhub_rollout.jobs.payload_reader import PayloadReader
from tensorhub_rollout.log.state import ANY_SITE

PARTS_MAX: Final = 256
"""Limit of the ends, or parts of a checkpoint, in one entry."""
PAYLOAD_TOKENS_BYTES_MAX: Final = 8 * 1024 * 1024
"""What one payload has at most, but for a response that is longer by itself."""
RETRY_S: Final = 0.25
"""The pause after something could not be written."""

_log: Final = logger(__name__)

Effect = TypeVar("Effect")


class EntryWriter:
    """The writer of one leader; `run` is its task."""

    def __init__(
        self,
        log: RolloutLog,
        payloads: PayloadReader,
        term: int,
        on_failed: Callable[[tuple[RequestId, ...]], None],
    ) -> None:
        self._log, self._payloads, self._term, self._on_failed = log, payloads, term, on_failed
        self._ends: dict[RequestId, StoreEnd] = {}
        self._parts: dict[str, dict[RequestId, StoreTokens]] = {}
        """By instance and request; a new checkpoint of a request takes the place of one that waits."""
        self._scale: Scale | None = None
        self._wanted = asyncio.Event()
        self._number = 0

    def end(self, effect: StoreEnd) -> None:
        """Write the end of a request."""
        self._ends[effect.ended.request] = effect
        self._wanted.set()

    def keep(self, effect: StoreTokens) -> None:
        """Write tokens of a checkpoint."""
        self._parts.setdefault(effect.instance, {})[effect.part.request] = effect
        self._wanted.set()

    def scale(self, instances: int, reason: str) -> None:
        """Write how many remote instances are wished for at any site; the last word counts."""
        self._scale = Scale(self._term, instances, ANY_SITE, reason)
        self._wanted.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._ends or self._parts or self._scale is not None:
                # Ends first: they give room, and let runners forget.
                if self._ends:
                    await self._write_ends()
                elif self._scale is not None:
                    await self._write_scale(self._scale)
                else:
                    await self._write_parts()

    async def _write_scale(self, scale: Scale) -> None:
        try:
            await self._append(scale)
        except TensorHubError as why:
            _log.warning("a wish for instances could not be written", why=str(why))
            await asyncio.sleep(RETRY_S)
            return
        if self._scale is scale:
            self._scale = None

    async def _write_ends(self) -> None:
        taken = _taken(((effect, effect.tokens) for effect in [*self._ends.values()]), PARTS_MAX)
        for effect in taken:
            del self._ends[effect.ended.request]
        requests = tuple(each.ended.request for each in taken)
        tokens = tuple(StoredTokens(each.tokens, each.logprobs, each.runs) for each in taken)
        try:
            payload = await self._write(tokens) if any(each.tokens for each in taken) else None
            await self._append(End(self._term, tuple(each.ended for each in taken), payload))
        except TensorHubError as why:
            _log.warning("ends could not be written, and are written again", count=len(taken), why=str(why))
            await asyncio.sleep(RETRY_S)
            self._on_failed(requests)

    async def _write_parts(self) -> None:
        instance, waiting = next(iter(self._parts.items()))
        taken = _taken(((effect, effect.tokens) for effect in [*waiting.values()]), PARTS_MAX)
        for effect in taken:
            del waiting[effect.part.request]
        if not waiting:
            del self._parts[instance]
        try:
            tokens = tuple(StoredTokens(each.tokens, each.logprobs, each.runs) for each in taken)
            payload = await self._write(tokens)
            await self._append(Checkpoint(self._term, instance, tuple(each.part for each in taken), payload))
        except TensorHubError as why:
            # The next checkpoint has these tokens too.
            _log.warning("a checkpoint could not be written", instance=instance, why=str(why))
            await asyncio.sleep(RETRY_S)

    async def _write(self, tokens: tuple[StoredTokens, ...]) -> Payload:
        self._number += 1
        return await self._payloads.write(f"{self._term}-{self._number}", tokens)

    async def _append(self, entry: LeaderEntry) -> None:
        self._number += 1
        await self._log.append(entry, f"leader-{self._term}-{self._number}")


def _taken(effects: Iterable[tuple[Effect, bytes]], count_max: int) -> list[Effect]:
    """Return the first effects that fit into one entry and its payload."""
    taken, nbytes = list[Effect](), 0
    for effect, tokens in effects:
        nbytes += 2 * len(tokens)
        if taken and (nbytes > PAYLOAD_TOKENS_BYTES_MAX or len(taken) == count_max):
            break
        taken.append(effect)
    return taken
