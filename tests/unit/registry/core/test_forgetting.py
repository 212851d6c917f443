"""What a leader has forgotten or ended: lost agents and holds, not before the fold would take it; deleted jobs."""

from tensorhub_common.catalog.state import LOST_KEPT_S, SPOT_KEPT_S, AgentRecord, Catalog, Model, Replica, VersionHold
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_registry.core import hold_ending
from tensorhub_registry.core.agent_forgetting import AGAIN_S, FORGOTTEN_MAX, MARGIN_S, AgentForgetting, LostIncarnation
from tensorhub_registry.core.hold_ending import HoldEnding, OverdueHold
from tensorhub_registry.jobs.deletion import TOMBSTONE_S, TOMBSTONES_MAX, expired_tombstones

NOW = 1_000_000_000.0


def catalog(*, spot: bool, level: Level = NEWEST_LEVEL, agents: int = 1) -> Catalog:
    """Return agents of one spot replica, or another one, that are lost since now; and one that lives."""
    found = Catalog("run-7", level=level)
    found.models["m"] = Model("m")
    found.models["m"].replicas["r"] = Replica("r", agents, spot)
    for number in range(agents):
        agent = found.agents[f"lost-{number}"] = AgentRecord(f"lost-{number}", 3, "h", "s", AgentState.LOST)
        agent.lost_at = NOW
        agent.shards["m", "r", number] = None
    found.agents["live"] = AgentRecord("live", 3, "h", "s", AgentState.LIVE)
    return found


def test_an_agent_is_due_a_little_after_the_fold_would_take_it_and_again_only_after_a_while() -> None:
    for spot, kept_s in ((False, LOST_KEPT_S), (True, SPOT_KEPT_S)):
        forgetting, known, due = AgentForgetting(), catalog(spot=spot), NOW + kept_s + MARGIN_S
        found = [forgetting.due(known, now) for now in (due - 1, due, due + AGAIN_S - 1, due + AGAIN_S)]
        assert found == [[], [LostIncarnation("lost-0", 3)]] * 2


def test_of_many_some_are_forgotten_at_a_time_and_none_below_the_level() -> None:
    forgetting, known, due = AgentForgetting(), catalog(spot=True, agents=FORGOTTEN_MAX + 1), NOW + 2 * SPOT_KEPT_S
    assert len(forgetting.due(known, due)) == FORGOTTEN_MAX
    assert len(forgetting.due(known, due + 1)) == 1
    assert AgentForgetting().due(catalog(spot=True, level=Level.WAKING_ONCE), NOW + 10 * LOST_KEPT_S) == []


def test_a_hold_is_ended_a_little_after_the_fold_would_take_it_and_again_only_after_a_while() -> None:
    known, ending, due = catalog(spot=False), HoldEnding(), NOW + hold_ending.MARGIN_S
    known.models["m"].holds["rollouts"] = VersionHold(1, 1, (7,), NOW)
    known.models["m"].holds["later"] = VersionHold(1, 1, (7,), NOW + 1000)
    known.tended["m"] = None
    again = due + hold_ending.AGAIN_S
    found = [ending.due(known, now) for now in (due - 1, due, again - 1, again)]
    assert found == [[], [OverdueHold("m", "rollouts")]] * 2


def test_the_last_deleted_jobs_are_remembered_and_none_for_ever() -> None:
    """One more than may be: the one that was deleted first goes. A clock that is behind keeps one."""
    tombstones = [(NOW - number, f"job-{number}") for number in range(TOMBSTONES_MAX + 1)]
    assert expired_tombstones(tombstones[:-1], NOW) == []
    assert expired_tombstones(tombstones, NOW) == [f"job-{TOMBSTONES_MAX}"]
    assert expired_tombstones([(NOW - TOMBSTONE_S, "a"), (NOW - TOMBSTONE_S - 1, "b"), (NOW + 60, "c")], NOW) == ["b"]
