"""`tensorhub-runner`: a runner as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

from opentelemetry import metrics as api

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.metrics import METER
from tensorhub_common.service import process
from tensorhub_runner.app import metrics
from tensorhub_runner.app.service import RunnerService


def main() -> None:
    """Run a runner until a signal ends it."""
    process.run("runner", lambda settings: settings.runner_id, _runner)


def _runner(bus: Bus, settings: Settings) -> RunnerService:
    meter = api.get_meter(METER)
    runner = RunnerService(bus, settings, meter)
    metrics.watch(runner, meter)
    return runner
