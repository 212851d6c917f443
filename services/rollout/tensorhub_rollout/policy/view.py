"""What a policy sees of the fleet, and what it may do. Actions that are under way are in the view already."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Literal

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId


class InstanceView(msgspec.Struct, frozen=True):
    """One instance. A request counts as pending from its placement until its first new token is here."""

    runner: str
    slots: int
    """How many requests it runs at once."""
    pending: Collection[RequestId]
    """In the order in which they were placed; as they are now, for as long as the leader is told nothing."""
    executing: Collection[RequestId]
    """The same."""
    takes_more: bool = True
    """Whether requests may be placed on it."""
    is_leaving: bool = False
    """Whether its machine goes away soon."""
    version: int | None = None
    """What its engine has in memory."""
    keeps_versions: bool = False
    """Whether it loads the version that it is asked for, and keeps that."""
    version_wanted: int | Literal["newest"] | None = None
    """What it was told to have in memory; None: nothing was told to it."""
    may_start: bool = True
    """Whether requests that are for no version alone may begin on its version, as far as their rule is known."""
    may_stay: bool = False
    """Whether it may leave out newer versions for now: the next one, where it has the newest."""
    arrives_in_s: float | None = None
    """In how many seconds it has the newest version, where it has not; None: it has, or that is not known."""
    is_local: bool = False
    """Whether it is the trainer's own engine, which generates at the beginning of a step alone."""

    @property
    def queued(self) -> int:
        """How many of the pending ones wait for a slot; the prompts of the others are being computed."""
        return min(len(self.pending), max(0, -self.free_slots))

    @property
    def free_slots(self) -> int:
        """How many more requests would execute at once; below 0, so many wait for a slot."""
        return self.slots - len(self.pending) - len(self.executing)


class FleetView(msgspec.Struct, frozen=True):
    """The whole fleet, for as long as the leader is told nothing."""

    waiting: Collection[RequestId]
    """Requests on no instance, in the order in which they are to be placed."""
    instances: tuple[InstanceView, ...]
    step: int
    """The trainer's step, from 1 on."""
    alone: frozenset[RequestId] = frozenset()
    """Of the waiting ones, those that are placed only where nothing is pending: each may kill what begins with it."""
    pinned: Mapping[RequestId, int] = {}
    """Requests that run on one version alone."""
    demand: Mapping[int | None, int] = {}
    """How many requests are open for each version alone that is not retired; None: for those that their rule allows."""
    newest: int | None = None
    """The newest published version."""
    available: frozenset[int] = frozenset()
    """Versions that a replica of the hub has, those of instances among them."""
    kept: frozenset[int] = frozenset()
    """Versions that the hub keeps, whatever instances and trainers leave."""
    drops_cache: bool = False
    """Whether what runs is computed again where the weights change, as the latest rule has it."""
    waiting_since: Callable[[int], tuple[Iterable[RequestId], int]] | None = None
    """Returns what has come to wait since a number that it has returned before, -1 at first, with a new such number:
    to compare all that waits takes long. None: that is not known."""

    def first_waiting(self, count_max: int) -> Iterator[RequestId]:
        """Return the first that wait, without those for a version alone that no instance takes requests on."""
        served = {each.version for each in self.instances if each.takes_more} if self.pinned else set()
        waiting = (of for of in self.waiting if of not in self.pinned or self.pinned[of] in served)
        return islice(waiting if self.pinned else self.waiting, count_max)

    def kept_back(self) -> frozenset[str]:
        """Return the instances that are kept back, by runner."""
        if not any(version is not None for version in self.demand):
            return frozenset()
        return frozenset(each.runner for each in self.instances if self.is_kept_back(each))

    def is_kept_back(self, instance: InstanceView) -> bool:
        """Tell whether an instance keeps an older version for requests that run on that alone."""
        version = instance.version
        return instance.version_wanted == version and version != self.newest and bool(self.demand.get(version))

    def fits(self, request: RequestId, instance: InstanceView) -> bool:
        """Tell whether a request may go to an instance, as far as a policy knows its rule."""
        if request in self.pinned:
            return self.pinned[request] == instance.version
        return not self.is_kept_back(instance)


class PlaceAction(msgspec.Struct, frozen=True):
    """Place a waiting request on an instance."""

    request: RequestId
    runner: str
    reason: str


class MoveAction(msgspec.Struct, frozen=True):
    """Take a request from its instance, and place it on another."""

    request: RequestId
    source: str
    target: str
    reason: str


class ReleaseAction(msgspec.Struct, frozen=True):
    """Take a request from its instance, and let it wait."""

    request: RequestId
    source: str
    reason: str


class WantAction(msgspec.Struct, frozen=True):
    """Have an instance load a version and keep it, or follow the newest one."""

    runner: str
    version: int | Literal["newest"]
    reason: str


Action = PlaceAction | MoveAction | ReleaseAction
