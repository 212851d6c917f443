"""What the policies of a leader want: versions of instances and of the hub, places, how many instances. Pure.

An error in a policy is a bug of ours, and costs no job its rollouts. It is handed on, and the look goes on without what
that policy wanted. A policy of placement is not asked again by this leader: RLBoost's, which needs to know the least,
takes its place. All others are asked again at the next look.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from tensorhub_common.protocol.rollout.entries import ArrivalTerm, RequestId
from tensorhub_common.protocol.rollout.questions import SeedingAnswer, SeedingQuestion
from tensorhub_rollout.answers.sdk import answer_seeding
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.leader_events import EndSeeding, Place, Want, Withdraw
from tensorhub_rollout.decisions.fleet_size import FleetSize
from tensorhub_rollout.decisions.seeding_watch import SeedingWatch
from tensorhub_rollout.decisions.version_holds import HoldWord, VersionHolds
from tensorhub_rollout.log.state import ANY_SITE
from tensorhub_rollout.policy.activation import ActivationLimits, Turns, decide
from tensorhub_rollout.policy.arrival import Held
from tensorhub_rollout.policy.placing import ARRIVAL, FALLBACK_POLICY, Placing, PlacingLimits, known_policy
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.retention import RetentionLimits
from tensorhub_rollout.policy.rolling import RollingLimits, RollingState, stay
from tensorhub_rollout.policy.scale import ScaleLimits, ScaleWish
from tensorhub_rollout.policy.view import Action, FleetView, InstanceView, MoveAction, PlaceAction, WantAction

ENGINES_LOOK_S: Final = 1.0
"""How often what was measured of engines is looked up."""
VERSIONS_LOOK_S: Final = 0.1
"""How often versions of instances are chosen, where neither the instances nor the versions have changed."""

OnFault = Callable[[str, Exception], None]
"""Takes what failed, in words, and its error."""
T = TypeVar("T")


class Engines(msgspec.Struct, frozen=True):
    """What was measured of engines, by runner: how long a step takes, and the batch size of its plateau."""

    steps: Mapping[str, StepModel] = {}
    plateaus: Mapping[str, int] = {}


class PolicyLimits(msgspec.Struct, frozen=True):
    """The settings of all policies."""

    scale: ScaleLimits = ScaleLimits()
    activation: ActivationLimits = ActivationLimits()
    placing: PlacingLimits = PlacingLimits()
    rolling: RollingLimits = RollingLimits()
    retention: RetentionLimits = RetentionLimits()
    ends_seeding: bool = True
    """Whether the policy `arrival` says when a trainer's engines have generated enough; else they do for T_seed."""

    def without(self, terms: Collection[ArrivalTerm]) -> "PolicyLimits":
        """Return the same with these terms off; the others stay as they are.

        They are those of the policy `arrival`, but for `retention`: versions are held whatever policy places.
        """
        arrival = self.placing.arrival
        arrival = replace(
            arrival,
            admits_by_arrival=arrival.admits_by_arrival and "admission" not in terms,
            migrates=arrival.migrates and "migration" not in terms,
        )
        return replace(
            self,
            placing=replace(self.placing, arrival=arrival),
            rolling=replace(self.rolling, is_on=self.rolling.is_on and "activation" not in terms),
            retention=replace(self.retention, is_on=self.retention.is_on and "retention" not in terms),
            ends_seeding=self.ends_seeding and "seeding" not in terms,
        )


class _Chosen(NamedTuple):
    """When versions of instances were chosen last, and what for."""

    instances: tuple[InstanceView, ...]
    """The same object as long as none has changed."""
    decides: tuple[object, ...]
    at: float


class Decisions:
    """The policies of one leader, with what they remember. `look` at each model, and at the `scale`, now and then."""

    def __init__(
        self, limits: PolicyLimits, on_fault: OnFault, measure: Callable[[Leader], Engines] | None = None
    ) -> None:
        """Know nothing yet. `measure` says what is known of engines; None: what they have told of their steps."""
        self._limits, self._on_fault, self._measure = limits, on_fault, measure or measured
        self._engines, self._measured_at = Engines(), float("-inf")
        self._turns: dict[str, Turns] = {}
        """By model."""
        self._chosen: dict[str, _Chosen] = {}
        """By model."""
        self._placing: dict[str, Placing] = {}
        """By model."""
        self._seeding: dict[str, SeedingWatch] = {}
        """By model."""
        self._rolling: dict[str, RollingState] = {}
        """By model."""
        self._size = FleetSize(limits.scale)
        self._holds = VersionHolds(limits.retention)
        self._set_aside: set[str] = set()
        """Names of policies that have failed."""

    def look(self, leader: Leader, model: str, now: float) -> Iterator[Want | Place | Withdraw | EndSeeding]:
        """Yield what is wanted of a model's instances and requests, to be told to the leader in this order."""
        if now - self._measured_at >= ENGINES_LOOK_S:
            self._measured_at = now
            self._engines = self._tried("measuring engines", partial(self._measure, leader), self._engines)
        view = leader.view(model)
        if self._are_versions_due(leader, model, view, now):
            for want in self._wanted(leader, model, view, now):
                yield Want(want.runner, want.version)
        for action in self._placed(leader, model, view, now):
            if isinstance(action, PlaceAction):
                yield Place(action.request, action.runner, action.reason)
            else:
                target = action.target if isinstance(action, MoveAction) else None
                yield Withdraw(action.request, target, action.reason)
        if self._watches_seeding(leader, model):
            enough = partial(self._is_enough, model, view, now)
            if self._tried("ending a seeding", enough, None) is not None:
                yield from (EndSeeding(each.runner) for each in view.instances if each.is_local)

    def _are_versions_due(self, leader: Leader, model: str, view: FleetView, now: float) -> bool:
        """Tell whether to choose versions of instances now: at once where what decides has changed."""
        demand, policy = frozenset(view.demand), leader.state.policy_of(model)
        decides = view.newest, view.available, view.kept, view.drops_cache, demand, policy
        chosen = self._chosen.get(model)
        is_same = chosen is not None and chosen.instances is view.instances and chosen.decides == decides
        if chosen is not None and is_same and now - chosen.at < VERSIONS_LOOK_S:
            return False
        self._chosen[model] = _Chosen(view.instances, decides, now)
        return True

    def _wanted(self, leader: Leader, model: str, view: FleetView, now: float) -> tuple[WantAction, ...]:
        """Return which versions instances are to have from now on, where that changes."""
        turns = self._turns.get(model, Turns())
        none_stays: dict[str, int] = {}
        stays = self._tried("rolling activation", partial(self._stays, leader, model, view, now), none_stays)
        activate = partial(decide, view, turns, self._limits.activation, now, stays)
        unchanged: tuple[tuple[WantAction, ...], Turns] = ((), turns)
        wanted, self._turns[model] = self._tried("choosing versions", activate, unchanged)
        return wanted

    def _stays(self, leader: Leader, model: str, view: FleetView, now: float) -> dict[str, int]:
        """Return which version each instance keeps for now that would else follow the newest one."""
        if leader.state.policy_of(model) != ARRIVAL or not view.drops_cache:
            return {}
        contexts = self._placing_of(model).arrival.contexts()
        state = self._rolling.get(model, RollingState())
        found, self._rolling[model] = stay(view, contexts, state, self._limits.rolling, now)
        return found

    def held(self, leader: Leader, of: RequestId) -> Held | None:
        """Return what a waiting request was held for at the last look; None: it was not, or its policy holds none."""
        model = leader.requests[of].model
        if leader.state.policy_of(model) != ARRIVAL or ARRIVAL in self._set_aside:
            return None
        placing = self._placing.get(model)
        return None if placing is None else placing.arrival.held.get(of)

    def hold(self, leader: Leader, model: str, now: float) -> HoldWord | None:
        """Return what is to be said of the versions that the hub is to hold; None: what stands is right."""
        return self._tried("holding versions", partial(self._holds.look, leader, model, now), None)

    def hold_story(self, leader: Leader, model: str, version: int) -> str | None:
        """Say in words how safe a version is that requests are for alone; None: versions are not held."""
        return self._holds.story(leader, model, version)

    def scale(self, leader: Leader, now: float) -> ScaleWish | None:
        """Return how many instances are wished for; None: no others than stand in the log, or it is not yet time."""
        known = leader.state.wished.get(ANY_SITE)
        return self._tried(
            "choosing a scale", partial(self._size.look, leader, self._engines.plateaus, known, now), None
        )

    def seeding(
        self, leader: Leader, question: SeedingQuestion, root_of: Callable[[str, int], str], now: float
    ) -> SeedingAnswer:
        """Say how long a trainer is to seed, and learn from its last step. `root_of` a model and version."""
        consumers = leader.state.consumers.items()
        asking = ((name, each.model) for name, each in consumers if each.attachment == question.attachment)
        consumer, model = next(asking, ("", None))
        is_watched = model is not None and self._watches_seeding(leader, model)
        answer = answer_seeding(leader.state, question, leader.models, root_of, is_watched=is_watched)
        state = answer.state
        if model is None or state is None or state.version < 0:
            return answer
        self._size.learnt(model, consumer, state.remote_max, now)
        watch = self._seeding.setdefault(model, SeedingWatch())
        if question.state is None or state.version > question.state.version:
            step = leader.models[model].meter.last
            is_steady = step is not None and step.is_steady
            watch.learnt(state.train_s, 0.0 if step is None else step.last_token_at, is_steady=is_steady)
        return replace(answer, is_watched=self._watches_seeding(leader, model))

    def _watches_seeding(self, leader: Leader, model: str) -> bool:
        """Tell whether a trainer is told when its engines have generated enough."""
        watch = self._seeding.get(model)
        is_on = self._limits.ends_seeding and leader.state.policy_of(model) == ARRIVAL
        return is_on and watch is not None and watch.can_tell

    def _is_enough(self, model: str, view: FleetView, now: float) -> str | None:
        steps = [self._engines.steps[each.runner] for each in view.instances if each.runner in self._engines.steps]
        if not steps:
            return None
        middle = sorted(steps, key=lambda each: each.seconds(1, 0.0))[len(steps) // 2]
        loads = self._placing_of(model).arrival.loads()
        return self._seeding[model].is_enough(view, loads, middle, now)

    def _placing_of(self, model: str) -> Placing:
        if model not in self._placing:
            self._placing[model] = Placing(self._limits.placing)
        return self._placing[model]

    def _placed(self, leader: Leader, model: str, view: FleetView, now: float) -> tuple[Action, ...]:
        facts = Facts(self._engines.steps, partial(leader.facts_of, now=now))
        asked = known_policy(leader.state.policy_of(model))
        for policy in dict.fromkeys((asked, FALLBACK_POLICY)):
            if policy in self._set_aside:
                continue
            try:
                actions = self._placing_of(model).look(policy, view, facts, self._engines.plateaus, now)
            except Exception as why:  # noqa: BLE001 (whatever it is, requests are placed all the same)
                self._failed(policy, why)
            else:
                return actions
        return ()

    def _failed(self, policy: str, why: Exception) -> None:
        if policy == FALLBACK_POLICY:
            self._on_fault(f"placing by policy {policy!r}", why)
        else:
            self._set_aside.add(policy)
            self._on_fault(f"placing by policy {policy!r}, which {FALLBACK_POLICY!r} replaces from now on,", why)

    def _tried(self, what: str, do: Callable[[], T], otherwise: T) -> T:
        try:
            return do()
        except Exception as why:  # noqa: BLE001 (one policy's error is no reason to do without the others)
            self._on_fault(what, why)
            return otherwise


def measured(leader: Leader) -> Engines:
    """Return what engines have told of their steps: a plateau is the one at the context that they had."""
    steps: dict[str, StepModel] = {}
    plateaus: dict[str, int] = {}
    for runner, instance in leader.instances.items():
        model = instance.step_model
        if model is not None:
            steps[runner] = model
            plateaus[runner] = model.plateau(instance.measured.context_tokens, instance.slots)
    return Engines(steps, plateaus)
