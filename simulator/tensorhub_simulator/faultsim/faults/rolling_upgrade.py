"""A rolling upgrade: the folds are started again one by one with the new build of `models/build.py`."""

from functools import partial
from typing import Final

from tensorhub_simulator.faultsim.faults.injector import Injector
from tensorhub_simulator.faultsim.models.build import NEW, SWITCH

SWITCH_LOOK_S: Final = 0.5
START_S: Final = 3.0


def plan_upgrade(injector: Injector) -> None:
    """Start the processes that fold the log again with the new build, one by one, and then raise the job."""
    job, folding = injector.job, injector.processes.folding()

    def look() -> None:
        if all(node.build == NEW for node in folding):
            job.raise_to = SWITCH
        else:
            job.clock.after(SWITCH_LOOK_S, None, look)

    if job.config.upgrade:
        for node in folding:
            delay_s = START_S * job.stream("fault", "upgrade", node.name).random()
            job.clock.after(delay_s, None, partial(injector.upgrade, node))
        job.clock.after(SWITCH_LOOK_S, None, look)
