"""Appends to a job's log that this registry leads, until the log has taken it: the I/O around `TermFence`."""

import asyncio
from collections.abc import Callable
from typing import Final

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Lead
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.subjects import REGISTRY, registry_command_subject
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.term_fence import TermFence

CLAIM_AGAIN_S: Final = 1.0
"""How often a leader appends that it leads, until that is folded."""

OnAppended = Callable[[Exception | None], None]


class TermClaim:
    """One job's claim, as its leader makes it."""

    def __init__(
        self, log: JobLog, registry: str, catalog: Callable[[], Catalog], work: Supervisor, on_appended: OnAppended
    ) -> None:
        """Claim nothing yet. `on_appended` is called after each attempt."""
        self._log, self._work, self._on_appended = log, work, on_appended
        self._claim = TermFence(registry)
        self._catalog = catalog
        self._lease_term: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def term(self) -> int | None:
        """The term under which this registry may expire agents now, or None."""
        return self._claim.term

    def raise_to(self, level: int) -> None:
        """Raise the job to this level, as soon as this registry leads; a lower one than it has changes nothing."""
        self._claim.level = max(level, self._claim.level)
        self._go_on()

    async def say_first(self, lease_term: int, level: int) -> int:
        """Append to an empty log that this registry leads, and at which level; return the entry."""
        self._claim.level = level
        return await self._append(self._claim.ask(lease_term, self._catalog()))

    def begin(self, lease_term: int) -> None:
        """Begin: this registry leads, and has folded the whole log as it was before."""
        self._lease_term = lease_term
        if self._catalog().seq == 0:
            self._claim.begin(lease_term)
        else:
            self._go_on()

    def drop(self) -> None:
        """End: this registry does not lead any longer."""
        self._lease_term = None
        self._claim.drop()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def see(self, event: AnyEvent) -> None:
        """Take the outcome of a folded command; where another registry has claimed the term, claim it again."""
        self._claim.see(event)
        self._go_on()

    def _go_on(self) -> None:
        if self._lease_term is None or not self._claim.is_due(self._catalog()):
            # A deleted job takes no claim, and has no agents.
            return
        if self._task is None or self._task.done():
            self._task = self._work.start(self._claim_until_taken(self._lease_term), "claiming the term")

    async def _claim_until_taken(self, lease_term: int) -> None:
        while self._claim.is_due(self._catalog()):
            try:
                await self._append(self._claim.ask(lease_term, self._catalog()))
            except TensorHubError as why:
                self._on_appended(why)
            else:
                self._on_appended(None)
            await asyncio.sleep(CLAIM_AGAIN_S)

    async def _append(self, command: Lead) -> int:
        msg_id = f"{REGISTRY}.{command.registry}.{command.term}"
        return await self._log.append(registry_command_subject(self._log.job, "lead"), encode(command), msg_id)
