"""The policies of a leader: an error in one of them costs no request its place."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any, cast, get_args

import pytest

from tensorhub_common.config import settings
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    ArrivalTerm,
    Attach,
    GroupSubmitted,
    Lead,
    Payload,
    PolicyName,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import PublishedVersions, Report, RunnerHeartbeat
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import EntryFolded, HeartbeatCame, Place, ReportCame, VersionsSeen, Want
from tensorhub_rollout.decisions.decisions import VERSIONS_LOOK_S, Decisions, Engines, PolicyLimits
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.plateau import StepModel

REQUEST = RequestId(3, 0)
PAYLOAD = Payload("b" * 64, 1)
WANTED = Want("runner-0", "newest")


def is_placed(said: Iterable[object]) -> bool:
    """Tell whether the request is placed on the instance."""
    return any(isinstance(each, Place) and (each.request, each.runner) == (REQUEST, "runner-0") for each in said)


class Unknown(StepModel, frozen=True):
    """Steps that nothing can be asked about."""

    def seconds(self, batch: int, context_tokens: float) -> float:
        raise ArithmeticError(f"no model for {batch} requests of {context_tokens} tokens")


def leader_of(policy: PolicyName) -> Leader:
    """Return a leader with one instance and one request that waits."""
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n", policy))
    group = GroupSubmitted("p", "a" * 64, 1, 1, 4)
    fold(state, 3, Submit(SdkSender(2, 1), (group,), PAYLOAD))
    leader = Leader(state, "log", LeaderLimits(gather_s=0.0), 0.0)
    leader.handle(VersionsSeen("policy", PublishedVersions(1, (1,))), 0.0)
    leader.handle(HeartbeatCame("runner-0", RunnerHeartbeat("log", 1, 0, "policy", 8, 1, keeps_versions=True)), 0.0)
    leader.handle(ReportCame("runner-0", Report("log", 1, ())), 0.0)
    leader.handle(Tick(), 0.1)
    return leader


def unmeasured(leader: Leader) -> Engines:
    raise ArithmeticError(f"nothing fits the steps of {len(leader.instances)} instance(s)")


def of_no_model(leader: Leader) -> Engines:
    return Engines({runner: Unknown(1.0, 0.0, 0.0) for runner in leader.instances})


def test_versions_are_chosen_now_and_then_and_at_once_where_an_instance_or_a_version_has_changed() -> None:
    leader, decisions = leader_of("arrival"), Decisions(PolicyLimits(), lambda what, _: pytest.fail(what))

    def is_wanted(now: float) -> bool:
        return WANTED in [*decisions.look(leader, "policy", now)]

    # The leader is not told of it, so that it is wanted whenever versions are chosen.
    soon_s = VERSIONS_LOOK_S / 10
    assert [is_wanted(1.0 + soon_s * at) for at in range(12)] == [True] + 9 * [False] + [True, False]
    beat = RunnerHeartbeat("log", 1, 0, "policy", 9, 1, keeps_versions=True)
    leader.handle(HeartbeatCame("runner-0", beat), 1.12)
    assert [is_wanted(1.12 + soon_s * at) for at in range(2)] == [True, False]
    leader.handle(VersionsSeen("policy", PublishedVersions(2, (1, 2))), 1.14)
    assert [is_wanted(1.14 + soon_s * at) for at in range(2)] == [True, False]
    group = GroupSubmitted("q", "c" * 64, 1, 1, 4, version=1)
    leader.handle(EntryFolded(fold(leader.state, 4, Submit(SdkSender(2, 2), (group,), PAYLOAD)).outcome), 1.16)
    assert Want("runner-0", 1) in [*decisions.look(leader, "policy", 1.16)], "a request is for that alone"
    assert not is_wanted(1.17)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_policy_places_what_waits(policy: PolicyName) -> None:
    faults: list[str] = []
    decisions = Decisions(PolicyLimits(), lambda what, _: faults.append(what))
    wanted, place = decisions.look(leader_of(policy), "policy", 0.1)
    assert wanted == WANTED
    assert isinstance(place, Place)
    assert (place.request, place.runner) == (REQUEST, "runner-0")
    assert place.reason, "a policy says why"
    assert not faults


def test_rlboosts_policy_places_for_a_trainer_of_a_release_that_has_others() -> None:
    faults: list[str] = []
    decisions = Decisions(PolicyLimits(), lambda what, _: faults.append(what))
    assert is_placed(decisions.look(leader_of(cast("Any", "later")), "policy", 0.1))
    assert not faults


def test_rlboosts_policy_places_where_another_one_fails_and_it_is_said_once() -> None:
    faults: list[str] = []
    decisions = Decisions(PolicyLimits(), lambda what, _: faults.append(what), of_no_model)
    leader = leader_of("streamrl")
    for now in (0.1, 5.0):
        assert is_placed(decisions.look(leader, "policy", now))
    assert faults == ["placing by policy 'streamrl', which 'rlboost' replaces from now on,"]


def test_requests_are_placed_though_engines_can_not_be_measured() -> None:
    faults: list[str] = []
    decisions = Decisions(PolicyLimits(), lambda what, _: faults.append(what), unmeasured)
    assert is_placed(decisions.look(leader_of("arrival"), "policy", 0.1))
    assert faults == ["measuring engines"]


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_where_rlboosts_policy_fails_too_it_is_asked_again_and_all_else_goes_on(policy: PolicyName) -> None:
    faults: list[str] = []
    limits = PolicyLimits(placing=cast("Any", None))
    decisions = Decisions(limits, lambda what, _: faults.append(what))
    leader = leader_of(policy)
    for now in (0.1, 0.2):
        assert [*decisions.look(leader, "policy", now)] == [WANTED]
    assert faults.count("placing by policy 'rlboost'") == 2
    assert len(faults) == (2 if policy == "rlboost" else 3)


def test_a_scale_that_can_not_be_chosen_is_none_and_is_told() -> None:
    faults: list[str] = []
    decisions = Decisions(PolicyLimits(scale=cast("Any", None)), lambda what, _: faults.append(what))
    assert decisions.scale(leader_of("arrival"), 2.0) is None
    assert faults == ["choosing a scale"]


def terms_on(limits: PolicyLimits) -> dict[ArrivalTerm, bool]:
    return {
        "activation": limits.rolling.is_on,
        "admission": limits.placing.arrival.admits_by_arrival,
        "migration": limits.placing.arrival.migrates,
        "retention": limits.retention.is_on,
        "seeding": limits.ends_seeding,
    }


@pytest.mark.parametrize("off", [(), *combinations(get_args(ArrivalTerm), 1), *combinations(get_args(ArrivalTerm), 2)])
def test_each_term_is_switched_off_by_itself_and_is_told_to_operators(off: tuple[ArrivalTerm, ...]) -> None:
    limits = PolicyLimits().without(off)
    assert terms_on(limits) == {term: term not in off for term in get_args(ArrivalTerm)}
    assert limits.scale == PolicyLimits().scale
    assert all(f"`{term}`" in settings.VARIABLES["TENSORHUB_ROLLOUT_TERMS_OFF"].meaning for term in off)
