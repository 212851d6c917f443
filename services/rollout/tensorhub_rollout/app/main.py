"""`tensorhub-rollout`: a rollout manager as a process. Settings come from the environment; SIGTERM ends it."""

import gc
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.service import process
from tensorhub_rollout.app import metrics
from tensorhub_rollout.app.service import RolloutManager

GC_THRESHOLDS: Final = (10_000, 10, 100)
"""When Python looks for cycles. It walks through all that lives: with 10,000 open responses that is 0.1 s in which no
frame is answered. With its own thresholds it did so each 2 to 4 s, and the p99 of an answer was 75 to 103 ms; with
these it does so some times an hour, the p99 is 16 to 31 ms, and memory is the same (docs/design/benchmarks.md)."""


def main() -> None:
    """Run a rollout manager until a signal ends it."""
    gc.set_threshold(*GC_THRESHOLDS)
    process.run("rollout", lambda settings: settings.rollout_id, _manager)


def _manager(bus: Bus, settings: Settings) -> RolloutManager:
    manager = RolloutManager(bus, settings)
    metrics.watch(manager)
    return manager
