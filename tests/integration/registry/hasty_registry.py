"""A registry that makes a snapshot of every few dozen entries and trims at once: `python -m …hasty_registry`."""

from tensorhub_registry import trimming
from tensorhub_registry.main import main

ENTRIES = 60
KEEP = 20

if __name__ == "__main__":
    trimming.SNAPSHOT_ENTRIES_MAX = ENTRIES  # type: ignore[misc]  # The process is this test's own.
    trimming.LOG_KEEP_S_MIN = 0.0  # type: ignore[misc]
    trimming.LOG_KEEP_ENTRIES_MIN = KEEP  # type: ignore[misc]
    main()
