"""Faults of processes, disks, clocks and NATS: killed, stopped, gone, cut off from time."""

from random import Random
from typing import Final

from tensorhub_simulator.faultsim.faults.injector import LEAVE_AGENTS, Fault, Injector
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.registry import RegistryNode

STOP_S: Final = (0.1, 0.6, 2.0, 4.0)
JUMP_S: Final = (0.3, 3.0, 30.0)
WALL_CLOCK_S: Final = (-60.0, -1.0, 1.0, 3600.0)
EFFECTS_MAX: Final = 12
RETURN_ODDS: Final = 0.5


def _any_agent(faults: Injector, rng: Random) -> AgentNode:
    return rng.choice(list(faults.processes.agents.values()))


def _any_registry(faults: Injector, rng: Random) -> RegistryNode:
    return rng.choice(faults.processes.registries)


def kill_agent(faults: Injector, rng: Random) -> None:
    """SIGKILL an agent."""
    _any_agent(faults, rng).kill()


def kill_agent_between_effects(faults: Injector, rng: Random) -> None:
    """SIGKILL an agent between two effects of one decision."""
    agent, effects = _any_agent(faults, rng), rng.randint(0, EFFECTS_MAX)
    if agent.up:
        agent.dies_in = effects


def stop_agent(faults: Injector, rng: Random) -> None:
    """SIGSTOP an agent."""
    faults.stop(_any_agent(faults, rng), rng.choice(STOP_S))


def lose_disk(faults: Injector, rng: Random) -> None:
    """Set up a host anew: neither memory nor the agent's last number is left."""
    agent = _any_agent(faults, rng)
    if agent.up:
        faults.struck("losses")
        agent.kill()
        agent.lose_disk()


def leave(faults: Injector, rng: Random) -> None:
    """Let an agent go away. It may come back, much later, and its shards have moved."""
    agent, returns, away_s = _any_agent(faults, rng), rng.random() < RETURN_ODDS, 3.0 + 4.0 * rng.random()
    here = [each for each in faults.processes.agents.values() if not each.state.left]
    if not agent.up or len(here) <= LEAVE_AGENTS:
        return
    faults.job.log_line(f"{agent.name} leaves")
    agent.state.left = True
    agent.kill()

    def come_back() -> None:
        agent.state.left = False
        faults.start(agent)

    if returns:
        faults.clock.after(away_s, None, come_back)


def kill_registry(faults: Injector, rng: Random) -> None:
    """SIGKILL a registry."""
    faults.kill(_any_registry(faults, rng))


def resign_registry(faults: Injector, rng: Random) -> None:
    """End a registry in order, as in an upgrade."""
    registry, late_s = _any_registry(faults, rng), rng.random() * 1.5
    if not registry.runs:
        return
    faults.job.log_line(f"{registry.name} resigns")
    for each in registry.family:
        each.resign()
    life = registry.life
    faults.clock.after(late_s, None, lambda: faults.kill(registry) if registry.life == life else None)


def stop_registry(faults: Injector, rng: Random) -> None:
    """SIGSTOP a registry."""
    faults.stop(_any_registry(faults, rng), rng.choice(STOP_S))


def kill_planner(faults: Injector, _rng: Random) -> None:
    """SIGKILL the planner."""
    faults.kill(faults.processes.planner)


def stop_planner(faults: Injector, rng: Random) -> None:
    """SIGSTOP the planner."""
    faults.stop(faults.processes.planner, rng.choice(STOP_S))


def kill_worker(faults: Injector, rng: Random) -> None:
    """SIGKILL a worker."""
    faults.kill_worker(rng.choice(faults.processes.workers))


def stop_worker(faults: Injector, rng: Random) -> None:
    """SIGSTOP a worker."""
    faults.stop(rng.choice(faults.processes.workers), rng.choice(STOP_S))


def lose_nats(faults: Injector, rng: Random) -> None:
    """Let no process reach the log for a while."""
    away_s = rng.choice((0.2, 1.0, 4.0))
    if not faults.job.log.up:
        return
    faults.struck("outages")
    faults.job.log_line("the log can't be reached")
    for job in faults.jobs:
        job.log.up = False

    def back() -> None:
        faults.job.log_line("the log is back")
        for job in faults.jobs:
            job.log.back()

    faults.clock.after(away_s, None, back)


def stop_nats(faults: Injector, rng: Random) -> None:
    """SIGSTOP NATS. What was on its way arrives late, and is stored then."""
    faults.stop(faults.job.nats, rng.choice(STOP_S))


def jump_clock(faults: Injector, rng: Random) -> None:
    """Let one process's clock jump: the process takes the time for passed."""
    node, by_s = rng.choice(faults.processes.all()), rng.choice(JUMP_S)
    if node.runs:
        faults.struck("jumps")
        faults.job.log_line(f"the clock of {node.name} jumps {by_s} s")
        node.jump(by_s)


def set_wall_clock(faults: Injector, rng: Random) -> None:
    """Set the wall clock of NATS: entries have later, or earlier, times from now on."""
    faults.struck("jumps")
    faults.job.log.skew_s += rng.choice(WALL_CLOCK_S)


PROCESS_FAULTS: Final = (
    Fault("kill-agent", 0.06, kill_agent),
    Fault("kill-agent-between-effects", 0.06, kill_agent_between_effects),
    Fault("stop-agent", 0.06, stop_agent),
    Fault("lose-disk", 0.03, lose_disk),
    Fault("leave", 0.03, leave),
    Fault("kill-registry", 0.06, kill_registry),
    Fault("resign-registry", 0.03, resign_registry),
    Fault("stop-registry", 0.03, stop_registry),
    Fault("kill-planner", 0.03, kill_planner),
    Fault("stop-planner", 0.03, stop_planner),
    Fault("kill-worker", 0.09, kill_worker),
    Fault("stop-worker", 0.03, stop_worker),
    Fault("lose-nats", 0.03, lose_nats),
    Fault("stop-nats", 0.03, stop_nats),
    Fault("jump-clock", 0.06, jump_clock),
    Fault("set-wall-clock", 0.03, set_wall_clock),
)
