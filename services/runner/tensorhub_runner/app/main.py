"""`tensorhub-runner`: a runner as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

from tensorhub_common.service import process
from tensorhub_runner.app.service import RunnerService


def main() -> None:
    """Run a runner until a signal ends it."""
    process.run("runner", lambda settings: settings.runner_id, RunnerService)
