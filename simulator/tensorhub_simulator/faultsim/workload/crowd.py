"""A crowd: hundreds of replicas read one version at once, and its holder is stopped in the middle and woken.

Production's cores stand still where something costs as much as there are readers, each time; and a reader that is one
of many is refused, kept waiting and asked again more often than one of a few ever is. Nobody unpublishes here, and the
log never loses the stopped agent, so the rule is simple.

Invariants:
- Every read returns the version: none raises, whatever stands still, while the log counts a holder.
- What the world costs grows with its readers, and not with their square: `STEPS_OF_ONE_MAX` steps for each.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tensorhub_agent.core.config import CoreConfig
from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.config import STRIPED, WorldConfig
from tensorhub_simulator.faultsim.models.segments import Violation
from tensorhub_simulator.faultsim.workload.director import Director
from tensorhub_simulator.faultsim.world import World

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan

T = TypeVar("T")

EVERY: Final = 50
"""One seed of so many is a crowd."""

READERS: Final = (100, 100, 200, 400)
READ_S: Final = 30.0
"""The bound of each read: many times what all of them take together."""

CHECK_STEPS: Final = 200
"""The world is looked at every so many steps: each look costs as much as there are readers."""

STEPS_OF_ONE_MAX: Final = 4000
LOST_AFTER_S: Final = 100.0
TOGETHER_S: Final = 0.05
"""All begin to read within this."""


def is_crowd(seed: int) -> bool:
    """Tell whether a seed's world is a crowd."""
    return seed % EVERY == EVERY // 2


def crowd(streams: Streams, setting: WorldConfig, readers: int | None = None) -> WorldConfig:
    """Make a crowd of what was drawn for a seed."""

    def drawn(field: str, *among: T) -> T:
        return streams.of("crowd", field).choice(among)

    return replace(
        setting,
        beside=None,
        digests=True,
        models=("policy",),
        agents=drawn("agents", 2, 3, 5),
        trainers=1,
        rollouts=readers or drawn("readers", *READERS),
        shards=1,
        pieces=drawn("pieces", 1, 2, 4),
        registries=1,
        loss_odds=0.0,
        late_odds=0.0,
        window_s=120.0,
        slowness=drawn("slowness", 0.5, 5.0),
        lost_after_s=LOST_AFTER_S,
        troubles=0,
        trouble_s=drawn("trouble_s", 1.0, 3.0),
        slow_agents=0.0,
        late_agents=False,
        skewed=False,
        upgrade=False,
        limits=CoreConfig(digests=True, window_bytes=64, stall_s=0.5, cache_bytes=0),
        planner=drawn("planner", PlannerLimits(), STRIPED),
        retain=0,
        rewinds=0.0,
        spot=0.0,
        sites=False,
        one_rack=False,
        deleted_after_s=0.0,
        cuttings=None,
    )


class Once(Director):
    """Tells the trainer to publish once, and each reader to read it once."""

    def start(self) -> None:
        """Tell everybody, at about the same time."""
        for group in self.world.groups:
            delay_s = 0.5 if group.trains else 1.0 + group.user.random() * TOGETHER_S
            self.clock.after(delay_s, None, partial(self._tell, group))

    def _tell(self, group: "ReplicaPlan") -> None:
        group.act, group.want = ("publish", 1) if group.trains else ("read", "latest")
        group.version = 1 if group.trains else None
        group.timeout_s = group.wait_s = READ_S
        group.serial += 1

    def missing(self) -> str | None:
        """Say which readers do not have the version yet."""
        late = [rank.name for rank in self.world.ranks if rank.version != 1]
        return f"{len(late)} of {len(self.world.ranks)} do not hold version 1, {late[:3]} among them" if late else None


class Crowd(World):
    """A world with a crowd in it."""

    def __init__(self, seed: int, setting: WorldConfig, *, steps: bool = False) -> None:
        """Build it, with a holder that will be stopped."""
        super().__init__(seed, setting, steps=steps)
        self.director = Once(self)
        self._stop_s = self.streams.of("crowd", "stop_s").choice((0.5, 4.0, 8.0))
        self._stop_at = self.streams.of("crowd", "stop_at").choice((0.0, 0.0, 0.2))
        """When so great a part of the readers has the version."""
        self.clock.after(1.0, None, self._strike)

    def _strike(self) -> None:
        """Stop the holder once enough readers have the version."""
        readers = [rank for rank in self.ranks if not rank.group.trains]
        holder = self._holder()
        if sum(rank.version is not None for rank in readers) < self._stop_at * len(readers):
            self.clock.after(0.02, None, self._strike)
        elif holder.runs:
            self.faults.stop(holder, self._stop_s)

    def _holder(self) -> "AgentNode":
        return next(rank.agent for rank in self.ranks if rank.group.trains)

    def check(self) -> None:
        """Look at everything now and then, and at every read's end."""
        # The holder may be stopped while others register at it: those are told within their bound, and register again.
        if self.calls.reads_raised:
            raise Violation("patience", f"reads raised {self.calls.reads_raised} though the log counts a holder")
        if self.clock.steps > STEPS_OF_ONE_MAX * len(self.ranks):
            raise Violation("bounded work", f"{self.clock.steps} steps for {len(self.ranks)} readers")
        if self.clock.steps % CHECK_STEPS == 0:
            super().check()
