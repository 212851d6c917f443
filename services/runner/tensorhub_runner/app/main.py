"""`tensorhub-runner`: a runner as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

import os
import sys

from opentelemetry import metrics as api

from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.observability.metrics import METER
from tensorhub_common.service import process
from tensorhub_runner.app import metrics
from tensorhub_runner.app.service import RunnerService


def main() -> None:
    """Run a runner until a signal ends it."""
    try:
        process.run("runner", lambda settings: settings.runner_id, _runner)
    except SystemExit as end:
        # All is closed and exported. To take torch apart takes Python seconds, in which systemd and others wait.
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)


def _runner(bus: Bus, settings: Settings) -> RunnerService:
    meter = api.get_meter(METER)
    runner = RunnerService(bus, settings, meter)
    metrics.watch(runner, meter)
    return runner
