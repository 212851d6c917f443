"""A registry that makes a snapshot of every few dozen entries and trims at once: `python -m …hasty_registry`.

With `HELD_UNTIL` in its environment the first snapshot waits until that file is there, and the second one fails. With
`UNTRIMMED_UNTIL` no log can be trimmed until that file is there.
"""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.snapshot_store import PackedSnapshot
from tensorhub_registry.app.main import main
from tensorhub_registry.core import snapshot_policy
from tensorhub_registry.jobs import snapshot_maker

ENTRIES = 60
KEEP = 20
HELD_UNTIL: Final = "TEST_SNAPSHOT_HELD_UNTIL"
UNTRIMMED_UNTIL: Final = "TEST_LOG_UNTRIMMED_UNTIL"
HELD_S_MAX: Final = 60.0


class HeldPacking:
    """Stands in for `PackedSnapshot`: packs what it is given, but for the first two."""

    def __init__(self, until: Path) -> None:
        self._until, self._asked = until, 0

    def of(self, body: bytes) -> PackedSnapshot:
        self._asked += 1
        if self._asked == 1:
            deadline = time.monotonic() + HELD_S_MAX
            while not self._until.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._asked == 2:
            raise TensorHubError("the second snapshot is not to be kept")
        return PackedSnapshot.of(body)


def untrimmed_until(there: Path) -> None:
    for name in ("trim", "trim_commands"):
        trims = getattr(JobLog, name)

        async def trim(log: JobLog, first: int, trims: Callable[[JobLog, int], Awaitable[None]] = trims) -> None:
            if not there.exists():  # noqa: ASYNC240  # One look at a local file of the test.
                raise StreamFailure("nothing is trimmed yet")
            await trims(log, first)

        setattr(JobLog, name, trim)


if __name__ == "__main__":
    snapshot_policy.SNAPSHOT_ENTRIES_MAX = ENTRIES  # type: ignore[misc]  # The process is this test's own.
    snapshot_policy.LOG_KEEP_S_MIN = 0.0  # type: ignore[misc]
    snapshot_policy.LOG_KEEP_ENTRIES_MIN = KEEP  # type: ignore[misc]
    snapshot_maker.AGAIN_S = 0.1  # type: ignore[misc]
    if HELD_UNTIL in os.environ:
        snapshot_maker.PackedSnapshot = HeldPacking(Path(os.environ[HELD_UNTIL]))  # type: ignore[attr-defined, assignment]
    if UNTRIMMED_UNTIL in os.environ:
        untrimmed_until(Path(os.environ[UNTRIMMED_UNTIL]))
    main()
