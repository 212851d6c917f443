"""Removes payloads that nothing names: those that entries have freed, and those that no entry ever named. I/O.

Invariant: nothing that the state names is removed, and nothing that was written so lately that its entry may yet come.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.payload_store import LIST_MAX, PayloadStore
from tensorhub_common.observability.logs import logger
from tensorhub_rollout.jobs.payload_reader import PayloadReader
from tensorhub_rollout.log.state import RolloutState

ORPHAN_S: Final = 900.0
"""A payload that no entry names is removed at this age: an entry follows its payload within two minutes, or not."""
ORPHAN_LOOK_S: Final = 300.0
FREED_WAITING_MAX: Final = 65_536
"""Limit of the payloads that wait to be removed; what is beyond is found as an orphan."""

_log: Final = logger(__name__)


class PayloadRemoval:
    """What one leader removes; `run_freed` and `run_orphans` are its tasks."""

    def __init__(
        self, job: str, store: PayloadStore, payloads: PayloadReader, state: Callable[[], RolloutState]
    ) -> None:
        self._job, self._store, self._payloads, self._state = job, store, payloads, state
        self._freed: asyncio.Queue[str] = asyncio.Queue(FREED_WAITING_MAX)

    def free(self, digest: str) -> None:
        """Remove a payload that an entry has freed."""
        if not self._freed.full():
            self._freed.put_nowait(digest)

    async def run_freed(self) -> NoReturn:
        """Remove what was freed."""
        while True:
            digest = await self._freed.get()
            try:
                if digest not in self._state().payloads:
                    await self._payloads.drop(digest)
            except TensorHubError as why:
                _log.debug("a payload could not be removed", job=self._job, digest=digest, why=str(why))

    async def run_orphans(self) -> NoReturn:
        """Look for payloads that no entry names: a sender has ended before its entry, or a leader before it removed."""
        while True:
            await asyncio.sleep(ORPHAN_LOOK_S)
            try:
                await self._remove_orphans()
            except TensorHubError as why:
                _log.debug("orphans could not be looked for", job=self._job, why=str(why))

    async def _remove_orphans(self) -> None:
        after, removed = 0, 0
        while True:
            page = await self._store.listed(self._job, after)
            for record in page:
                if record.age_s > ORPHAN_S and record.digest not in self._state().payloads:
                    await self._store.drop(self._job, record.digest, record.seq)
                    removed += 1
            if len(page) < LIST_MAX:
                break
            after = page[-1].seq
        if removed:
            _log.info("removed payloads that no entry names", job=self._job, count=removed)
