"""Faults that strike the source of a read in the middle of it: an agent that is being read just then."""

from collections.abc import Callable
from random import Random
from typing import Final

from tensorhub_simulator.faultsim.faults import partitions
from tensorhub_simulator.faultsim.faults.injector import DRAG, Fault, Injector
from tensorhub_simulator.faultsim.models.host import Session

STOP_SOURCE_S: Final = (0.6, 2.0, 10.0, 30.0)
"""The longest is for ever, as far as a read can know."""
AWAIT_S: Final = 4.0
LOOK_S: Final = 0.02
DRAG_S: Final = (1.0, 4.0)

Strike = Callable[[Injector, Random, Session], None]


def _in_mid_read(strike: Strike) -> Callable[[Injector, Random], None]:
    """Strike the source of a read as soon as there is one."""

    def begin(faults: Injector, rng: Random) -> None:
        until = faults.clock.now + AWAIT_S

        def look() -> None:
            links = [link for link in faults.job.sessions.values() if link.reads]
            if links:
                strike(faults, rng, rng.choice(links))
            elif faults.clock.now < until:
                faults.clock.after(rng.random() * LOOK_S, None, look)

        look()

    return begin


def _kill(_faults: Injector, _rng: Random, link: Session) -> None:
    link.source.kill()


def _stop(faults: Injector, rng: Random, link: Session) -> None:
    faults.stop(link.source, rng.choice(STOP_SOURCE_S))


def _slow(faults: Injector, rng: Random, link: Session) -> None:
    agent, drag, drag_s = link.source, rng.choice(DRAG), rng.choice(DRAG_S)
    faults.job.log_line(f"{agent.name} sends {drag:g} times slower for {drag_s} s")
    before, agent.drag = agent.drag, drag

    def over() -> None:
        if agent.drag == drag:
            agent.drag = min(before, 1.0)

    faults.clock.after(drag_s, None, over)


def _cut(faults: Injector, rng: Random, link: Session) -> None:
    partitions.between(faults, rng, link.reader, link.source)


SOURCE_FAULTS: Final = (
    Fault("kill-source", 0.06, _in_mid_read(_kill)),
    Fault("stop-source", 0.09, _in_mid_read(_stop)),
    Fault("slow-source", 0.06, _in_mid_read(_slow)),
    Fault("cut-source", 0.06, _in_mid_read(_cut)),
)


def plan_holder_stop(faults: Injector) -> None:
    """In a crowd: stop the agent of the trainer once enough readers have the version."""
    crowd, workers = faults.job.config.crowd, faults.processes.workers
    readers = [worker for worker in workers if not worker.group.trains]

    def look() -> None:
        holder = next(worker.agent for worker in workers if worker.group.trains)
        assert crowd is not None
        if sum(worker.version is not None for worker in readers) < crowd.stop_at * len(readers):
            faults.clock.after(LOOK_S, None, look)
        elif holder.runs:
            faults.stop(holder, crowd.stop_s)

    if crowd is not None:
        faults.clock.after(1.0, None, look)
