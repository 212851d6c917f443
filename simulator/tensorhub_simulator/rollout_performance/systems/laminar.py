"""Laminar's relays and its repack (arXiv 2510.12633), for a trainer with GPUs of its own. Pure.

*Relays* (section 4). The trainer publishes and goes on. A relay in the memory of each instance's host comes to have
each version; an instance takes the newest that its own relay has once all of its batch has ended, and no sooner. So a
response is made on one version, nothing is computed again for an update, and no instance waits for others.

*Repack* (section 5). Every five seconds, and when a version is published, instances whose cache empties (nothing waits
there, and it has less in memory than it had) give their responses to others of them with the same version, so that as
many as possible are free: these take the newest version and a new batch. Each in turn, the one with the least context
first, goes to that which is fullest with it (best fit), as far as the memory for KV and the batch size allow beyond
which more requests make steps longer.

A batch is a multiple of an equal part of all responses that may be open (`trainer.repack`). An instance takes prompts
until its batch is full, and none once its relay has a newer version.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import VersionRule
from tensorhub_rollout.core.leader_events import EndSeeding, Place, Want, Withdraw
from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, MoveAction, PlaceAction, WantAction
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Scenario
from tensorhub_simulator.rollout_performance.job.drive import Drive
from tensorhub_simulator.rollout_performance.job.job import JobRun, said
from tensorhub_simulator.rollout_performance.job.log import MODEL
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
from tensorhub_simulator.rollout_performance.models.machine import Machine

REPACK_S: Final = 5.0
"""Every so often responses are packed anew."""
PULL_S: Final = 0.5
"""An instance stands still so long to take a version from the memory of its host."""
_ROUNDING: Final = 1e-6


def roofline(costs: EngineCosts) -> int:
    """Return up to how many requests a step's weights take longer to read than to compute with."""
    whole = costs.fixed_s >= costs.each_s * costs.slots
    return costs.slots if whole else max(1, int(costs.fixed_s / costs.each_s))


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance has, whose cache empties."""

    runner: str
    requests: tuple[RequestId, ...]
    context: int
    """Tokens in its memory."""


def best_fit(loads: list[Load], kv_tokens: float, requests_max: int) -> list[tuple[Load, str]]:
    """Return which of some instances of one version are to be freed, each with where all of its requests go.

    `kv_tokens`: limit of an instance's context; `requests_max`: of its requests.
    """
    context = {each.runner: each.context for each in loads}
    count = {each.runner: len(each.requests) for each in loads}
    moved: list[tuple[Load, str]] = []
    targets: set[str] = set()
    for source in sorted(loads, key=lambda each: (each.context, each.runner)):
        if source.runner in targets:
            continue
        fits = [
            runner
            for runner in context
            if runner != source.runner
            and context[runner] + source.context <= kv_tokens
            and count[runner] + len(source.requests) <= requests_max
        ]
        if not fits:
            continue
        target = max(fits, key=lambda each: (context[each], each))
        context[target] += context.pop(source.runner)
        count[target] += len(source.requests)
        targets.add(target)
        moved.append((source, target))
    return moved


@dataclass(slots=True)
class Repacking:
    """What instances are told, look by look."""

    batch: int
    """How many requests an instance is given until all of them have ended."""
    requests_max: int
    """Limit of the requests of an instance that gets those of others."""
    kv_tokens: float
    """Limit of the context tokens that an instance has in memory."""
    _packed_at: float = -math.inf
    _newest: int | None = None
    """The newest version at the last look."""
    _given: dict[str, int] = field(default_factory=dict)
    """By instance: how many requests its batch has until now."""
    _most: dict[str, int] = field(default_factory=dict)
    """By instance: the most context that its batch had in memory when it was looked at."""
    _takes: dict[str, int] = field(default_factory=dict)
    """Which version an instance was told to take."""

    def actions(
        self, view: FleetView, relays: Mapping[str, int], context_of: Callable[[RequestId], int], now: float
    ) -> Iterator[Action | WantAction]:
        """Yield what to do now. `relays`: the newest version that each instance's relay has; `now` in seconds."""
        yield from released(view)
        waiting = iter(view.waiting)
        for each in view.instances:
            if not each.takes_more:
                continue
            is_free = not (each.executing or each.pending)
            if is_free:
                self._given[each.runner] = self._most[each.runner] = 0
            version = relays.get(each.runner)
            if version is not None and each.version is not None and version > each.version:
                if is_free and self._takes.get(each.runner) != version:
                    self._takes[each.runner] = version
                    yield WantAction(each.runner, version, "its batch has ended")
                continue
            given = self._given.get(each.runner, 0)
            for number, of in zip(range(given, self.batch), waiting, strict=False):
                self._given[each.runner] = number + 1
                yield PlaceAction(of, each.runner, "it is of its batch")
        if now - self._packed_at >= REPACK_S - _ROUNDING or view.newest != self._newest:
            self._packed_at, self._newest = now, view.newest
            yield from self._packed(view, context_of)

    def _packed(self, view: FleetView, context_of: Callable[[RequestId], int]) -> Iterator[MoveAction]:
        of_version: dict[int | None, list[Load]] = {}
        for each in view.instances:
            if not each.takes_more or not each.executing:
                continue
            load = Load(each.runner, (*each.executing,), sum(map(context_of, each.executing)))
            most = self._most.get(each.runner, 0)
            self._most[each.runner] = max(most, load.context)
            empties = load.context < min(most, self.kv_tokens) and len(load.requests) < self.requests_max
            if empties and not each.pending:
                of_version.setdefault(each.version, []).append(load)
        for loads in of_version.values():
            for source, target in best_fit(loads, self.kv_tokens, self.requests_max):
                for of in source.requests:
                    yield MoveAction(of, source.runner, target, "its instance is freed for a newer version")


def misfit_of(scenario: Scenario) -> str | None:
    """Say why it is not made for a scenario's trainer, and what to do; None: it is."""
    if scenario.trainer.steps_ahead:
        return None
    return "laminar's instances go on with older weights: set trainer.seeds to false and trainer.steps_ahead to 1"


class LaminarRun(JobRun):
    """One job; `run` it once."""

    def __init__(self, scenario: Scenario, drive: Drive, timeline: Timeline | None = None) -> None:
        """Begin."""
        super().__init__(scenario, drive, timeline)
        # A response may end on its version, and move to an instance that has it, however many are newer.
        self._rule = VersionRule(staleness=scenario.trainer.steps)
        self._relays: dict[str, int] = {}
        """The newest version that each instance's relay has."""
        engine, repack = scenario.engine, scenario.trainer.repack
        self._repacking = Repacking(
            self._batch(repack.parts),
            roofline(engine) if repack.requests is None else repack.requests,
            math.inf if engine.kv_tokens is None else engine.kv_tokens,
        )

    def _batch(self, parts: float) -> int:
        trainer = self._trainer.limits
        instances = max(1, self._scenario.spot.most + len(self._fleet.far))
        prompts = parts * trainer.groups * (1 + trainer.steps_ahead) / instances
        return max(1, math.ceil(prompts - _ROUNDING)) * trainer.group_size

    def _wanted(self) -> Iterator[Want | Place | Withdraw | EndSeeding]:
        view = self._leader.view(MODEL)
        actions: list[Action] = []
        for each in self._repacking.actions(view, self._relays, self._context_of, self._agenda.now):
            if isinstance(each, WantAction):
                assert isinstance(each.version, int)
                machine = self._fleet.machines.get(each.runner)
                # An instance takes a version from its own relay: both are gone where the leader doesn't know it yet.
                if machine is not None:
                    self._agenda.after(0.0, partial(machine.stage, each.version, PULL_S))
            else:
                actions.append(each)
        yield from said(actions)

    def _context_of(self, of: RequestId) -> int:
        response = self._leader.responses.get(of)
        return self._scenario.lengths.prompt + (0 if response is None else response.count)

    def _fetch(self, machine: Machine, load_s: float) -> None:
        """Have its relay have the newest version."""
        self._agenda.after(load_s, partial(self._relayed, machine.name, self._fleet.version))

    def _relayed(self, name: str, version: int) -> None:
        self._relays[name] = max(version, self._relays.get(name, 0))
        self._look_later(0.0)
