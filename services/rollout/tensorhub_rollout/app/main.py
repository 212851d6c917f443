"""`tensorhub-rollout`: a rollout manager as a process. Settings come from the environment; SIGTERM ends it."""

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.service import process
from tensorhub_rollout.app import metrics
from tensorhub_rollout.app.service import RolloutManager


def main() -> None:
    """Run a rollout manager until a signal ends it."""
    process.run("rollout", lambda settings: settings.rollout_id, _manager)


def _manager(bus: Bus, settings: Settings) -> RolloutManager:
    manager = RolloutManager(bus, settings)
    metrics.watch(manager)
    return manager
