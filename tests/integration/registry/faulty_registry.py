"""A registry whose core for all jobs' agents fails at its first tick: `python -m …faulty_registry`."""

from tensorhub_common.machine import Tick
from tensorhub_registry.app.main import main
from tensorhub_registry.core import liveness

if __name__ == "__main__":
    works = liveness.Liveness.handle

    def fails(self: liveness.Liveness, event: liveness.Input, now: float) -> list[liveness.ExpireAgent]:
        if isinstance(event, Tick):
            raise ArithmeticError("it is broken")  # noqa: TRY004 (any error will do)
        return works(self, event, now)

    liveness.Liveness.handle = fails  # type: ignore[method-assign]  # The process is this test's own.
    main()
