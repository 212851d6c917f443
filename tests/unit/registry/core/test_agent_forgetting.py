"""Which agents a leader says to be forgotten: none before the fold would take it, and none again and again."""

from tensorhub_common.catalog.state import LOST_KEPT_S, SPOT_KEPT_S, AgentRecord, Catalog, Model, Replica
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_registry.core.agent_forgetting import AGAIN_S, FORGOTTEN_MAX, MARGIN_S, AgentForgetting, LostIncarnation

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


def test_an_agent_is_due_a_little_after_the_fold_would_take_it() -> None:
    for spot, kept_s in ((False, LOST_KEPT_S), (True, SPOT_KEPT_S)):
        forgetting, known = AgentForgetting(), catalog(spot=spot)
        assert forgetting.due(known, NOW + kept_s + MARGIN_S - 1) == []
        assert forgetting.due(known, NOW + kept_s + MARGIN_S) == [LostIncarnation("lost-0", 3)]


def test_it_is_said_again_only_after_a_while() -> None:
    forgetting, known, due = AgentForgetting(), catalog(spot=True), NOW + SPOT_KEPT_S + MARGIN_S
    assert forgetting.due(known, due)
    assert forgetting.due(known, due + AGAIN_S - 1) == []
    assert forgetting.due(known, due + AGAIN_S) == [LostIncarnation("lost-0", 3)]


def test_of_many_some_are_forgotten_at_a_time() -> None:
    forgetting, known, due = AgentForgetting(), catalog(spot=True, agents=FORGOTTEN_MAX + 1), NOW + 2 * SPOT_KEPT_S
    assert len(forgetting.due(known, due)) == FORGOTTEN_MAX
    assert len(forgetting.due(known, due + 1)) == 1


def test_below_the_level_nothing_is_said() -> None:
    assert AgentForgetting().due(catalog(spot=True, level=Level.WAKING_ONCE), NOW + 10 * LOST_KEPT_S) == []
