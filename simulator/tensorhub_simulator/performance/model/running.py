"""Runs a world to its end, and says what came of it."""

from collections.abc import Callable
from typing import Final

from tensorhub_simulator.performance.config import ClusterError
from tensorhub_simulator.performance.model import spot
from tensorhub_simulator.performance.model.cluster import World
from tensorhub_simulator.performance.results import Result
from tensorhub_simulator.performance.wrongs import SECONDS_MAX

STEPS_MAX: Final = 100_000_000
"""A run that needs more is given up."""

TELL_STEPS: Final = 4_096


def run(world: World, tell: Callable[[int, int], None] | None = None) -> Result:
    """Publish all versions, and go on until every replica that is there has the last one."""
    cluster, result = world.cluster, world.result
    expected = cluster.versions * len(world.others)
    _plan_moves(world)
    world.publish(1, 0.0)
    world.beat()
    while world.agenda.steps < STEPS_MAX:
        if world.agenda.steps % TELL_STEPS == 0:
            result.stuck = world.stuck()
            if result.stuck:
                break
            if tell is not None:
                tell(sum(1 for each in result.updates if each.ready_s is not None), expected)
        if not world.agenda.step() or world.is_done():
            break
        if world.agenda.now > SECONDS_MAX:
            raise ClusterError(f"the run has no end within {SECONDS_MAX:g} s of its own time: let things happen sooner")
    else:
        raise ClusterError(f"the run took more than {STEPS_MAX} steps: simulate fewer GPUs or larger pieces")
    result.seconds, result.steps = world.agenda.now, world.agenda.steps
    result.questions = world.planning.questions
    result.count_links(world.fabric)
    return result


def _plan_moves(world: World) -> None:
    """Let instances come and go when they do."""
    cluster = world.cluster
    if cluster.spot is None:
        return
    away, moves = spot.moves(cluster, spot.horizon_s(cluster))
    kinds = {each.number: each for each in world.others if each.kind == cluster.spot.kind}
    for number in away:
        kinds[number].vanish()
    for move in moves:
        act = world.comes if move.what == "comes" else world.goes
        world.agenda.at(move.at_s, lambda act=act, move=move: act(kinds[move.replica]))  # type: ignore[misc]
