"""A runner's metrics, read when the metrics page is requested; docs/operate/metrics.md lists them.

The functions here run in a thread of the page's while the event loop goes on, so they only read. Before the engine is
loaded there is nothing to read.
"""

from collections.abc import Callable, Iterator

from opentelemetry.metrics import Meter

from tensorhub_common.observability.metrics import Sample, observe
from tensorhub_runner.app.engine_driver import EngineDriver
from tensorhub_runner.app.service import RunnerService
from tensorhub_runner.core.runner import Runner


def watch(runner: RunnerService, meter: Meter) -> None:
    """Have a runner's metrics read from here on; once in a process."""

    def of_core(name: str, read: Callable[[Runner], float | None]) -> None:
        def samples() -> Iterator[Sample]:
            value = None if runner.link is None else read(runner.link.core)
            if value is not None:
                yield value, {}

        observe(meter, name, samples)

    def of_driver(name: str, read: Callable[[EngineDriver], float]) -> None:
        def samples() -> Iterator[Sample]:
            if runner.link is not None:
                yield read(runner.link.driver), {}

        observe(meter, name, samples)

    def attempts() -> Iterator[Sample]:
        if runner.link is not None:
            for state, count in runner.link.core.states().items():
                yield count, {"state": state}

    of_core("tensorhub.runner.steps", lambda core: core.steps)
    of_core("tensorhub.runner.tokens", lambda core: core.tokens)
    of_core("tensorhub.runner.slots", lambda core: core.limits.slots)
    of_core("tensorhub.runner.version", lambda core: core.version)
    of_core("tensorhub.runner.frames", lambda core: core.frames)
    of_core("tensorhub.runner.frames.unanswered", lambda core: core.unanswered)
    of_driver("tensorhub.runner.busy", lambda driver: driver.busy_s)
    of_driver("tensorhub.runner.recomputed", lambda driver: driver.recomputed)
    observe(meter, "tensorhub.runner.attempts", attempts)
