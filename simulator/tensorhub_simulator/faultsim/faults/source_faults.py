"""Faults that strike the source of a read in the middle of it: an agent that is being read just then."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from tensorhub_simulator.faultsim.faults import partitions
from tensorhub_simulator.faultsim.faults.injector import DRAG, Fault, Injector

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.transfers.source_session import ReadSession

STOP_SOURCE_S: Final = (0.6, 2.0, 10.0, 30.0)
"""The longest is for ever, as far as a read can know."""
AWAIT_S: Final = 4.0
LOOK_S: Final = 0.02
DRAG_S: Final = (1.0, 4.0)

Strike = Callable[[Injector, Random, "ReadSession"], None]


def _in_mid_read(strike: Strike) -> Callable[[Injector, Random], None]:
    """Strike the source of a read as soon as there is one."""

    def begin(faults: Injector, rng: Random) -> None:
        until = faults.clock.now + AWAIT_S

        def look() -> None:
            links = [link for link in faults.world.links.values() if link.reads]
            if links:
                strike(faults, rng, rng.choice(links))
            elif faults.clock.now < until:
                faults.clock.after(rng.random() * LOOK_S, None, look)

        look()

    return begin


def _kill(_faults: Injector, _rng: Random, link: "ReadSession") -> None:
    link.source.kill()


def _stop(faults: Injector, rng: Random, link: "ReadSession") -> None:
    faults.stop(link.source, rng.choice(STOP_SOURCE_S))


def _slow(faults: Injector, rng: Random, link: "ReadSession") -> None:
    agent, drag, drag_s = link.source, rng.choice(DRAG), rng.choice(DRAG_S)
    faults.world.note(f"{agent.name} sends {drag:g} times slower for {drag_s} s")
    before, agent.drag = agent.drag, drag

    def over() -> None:
        if agent.drag == drag:
            agent.drag = min(before, 1.0)

    faults.clock.after(drag_s, None, over)


def _cut(faults: Injector, rng: Random, link: "ReadSession") -> None:
    partitions.between(faults, rng, link.reader, link.source)


SOURCE_FAULTS: Final = (
    Fault("kill-source", 0.06, _in_mid_read(_kill)),
    Fault("stop-source", 0.09, _in_mid_read(_stop)),
    Fault("slow-source", 0.06, _in_mid_read(_slow)),
    Fault("cut-source", 0.06, _in_mid_read(_cut)),
)
