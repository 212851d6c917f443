"""Partitions: bytes alone, messages alone, or both, between two hosts or around one process; healed later."""

from random import Random
from typing import Final

from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.faults.injector import Fault, Injector
from tensorhub_simulator.faultsim.models.host import AgentHost

CUT_S: Final = (0.3, 2.0, 6.0)


def between(faults: Injector, rng: Random, one: AgentHost, other: AgentHost) -> None:
    """Let no bytes pass between two agents; both reach NATS."""
    cut_s = _cut(faults, rng, f"no bytes pass between {one.name} and {other.name}")
    faults.job.network.cut(one, other, cut_s)


def cut_bytes(faults: Injector, rng: Random) -> None:
    """Let no bytes pass between one host and all others; all of them reach NATS."""
    host = _any_host(faults, rng)
    _cut_bytes(faults, host, _cut(faults, rng, f"no bytes leave or reach {host}"))


def cut_messages(faults: Injector, rng: Random) -> None:
    """Let one host or one process not reach NATS; bytes pass."""
    nodes: list[list[Node]] = [[registry] for registry in faults.processes.registries]
    nodes += [[faults.processes.planner], *(_agents(faults, host) for host in _hosts(faults))]
    chosen = rng.choice(nodes)
    cut_s = _cut(faults, rng, f"{[node.name for node in chosen]} do not reach NATS")
    for node in chosen:
        faults.job.network.cut_off(node, cut_s)


def cut_host(faults: Injector, rng: Random) -> None:
    """Cut one host off from everything."""
    host = _any_host(faults, rng)
    cut_s = _cut(faults, rng, f"{host} is cut off")
    _cut_bytes(faults, host, cut_s)
    for node in _agents(faults, host):
        faults.job.network.cut_off(node, cut_s)


def _cut_bytes(faults: Injector, host: str, cut_s: float) -> None:
    agents = faults.processes.agents.values()
    for one in (agent for agent in agents if agent.host == host):
        for other in (agent for agent in agents if agent.host != host):
            faults.job.network.cut(one, other, cut_s)


def _hosts(faults: Injector) -> list[str]:
    return sorted({agent.host for agent in faults.processes.agents.values()})


def _any_host(faults: Injector, rng: Random) -> str:
    return rng.choice(_hosts(faults))


def _agents(faults: Injector, host: str) -> list[Node]:
    return [agent for agent in faults.processes.agents.values() if agent.host == host]


def _cut(faults: Injector, rng: Random, what: str) -> float:
    faults.struck("cuts")
    cut_s = rng.choice(CUT_S)
    faults.job.log_line(f"{what} for {cut_s} s")
    return cut_s


PARTITIONS: Final = (
    Fault("cut-bytes", 0.03, cut_bytes),
    Fault("cut-messages", 0.06, cut_messages),
    Fault("cut-host", 0.03, cut_host),
)
