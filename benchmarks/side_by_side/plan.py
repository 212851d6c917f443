"""What is compared with what: the parts of a run, and who stands in each of them beside us."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet import Fleet
from benchmarks.side_by_side import environments, goals
from benchmarks.side_by_side.arena import Arena
from benchmarks.side_by_side.contender import Contender, PeerProgram, settled
from benchmarks.side_by_side.ours import Ours
from benchmarks.side_by_side.perftest import Perftest


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that races with us. `environment` names what it has to be asked for by; None: it needs none."""

    title: str
    program: str
    how: str = ""
    environment: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a run. `until`: by this share of the whole time no more rounds begin."""

    transport: str
    digests: bool
    until: float
    perftest: bool = False
    small: bool = False
    peers: tuple[Peer, ...] = ()


RAY_QUIET: Final = (("RAY_AUTH_MODE", "disabled"), ("RAY_USAGE_STATS_ENABLED", "0"))
_NIXL_QUIET: Final = ("NIXL_LOG_LEVEL", "WARN")

PARTS: Final = (
    PartSpec("local", digests=True, until=0.2, small=True),
    PartSpec(
        "local",
        digests=False,
        until=0.35,
        peers=(
            Peer("Ray, put + get + copy", "ray", "copy", "ray", RAY_QUIET),
            Peer(goals.VIEWS, "ray", "view", "ray", RAY_QUIET),
            Peer("NIXL, UCX's choice", "nixl", environment="nixl", variables=(_NIXL_QUIET,)),
        ),
    ),
    PartSpec("ucxx", digests=True, until=0.55, perftest=True, small=True),
    PartSpec(
        "ucxx",
        digests=False,
        until=0.95,
        perftest=True,
        peers=(
            Peer("sockets, send", "sockets", "send"),
            Peer("sockets, sendfile", "sockets", "sendfile"),
            Peer("gloo, send/recv", "gloo", "send"),
            Peer("gloo, broadcast", "gloo", "broadcast"),
            Peer("NIXL, TCP", "nixl", environment="nixl", variables=(_NIXL_QUIET, ("UCX_TLS", "tcp"))),
            Peer("Mooncake, TCP", "mooncake", environment="mooncake"),
            Peer("Monarch, TCP", "monarch", environment="monarch"),
        ),
    ),
)


def contenders(
    spec: PartSpec,
    fleet: Fleet,
    arena: Arena,
    mib: int,
    made: Mapping[str, environments.Environment],
    environment: Mapping[str, str],
) -> list[Contender]:
    """Return everybody in this part for whom there is an environment, ourselves first."""
    title = f"TensorHub, {spec.transport}"
    ours = Ours(title, fleet, mib, transport=spec.transport, digests=spec.digests, environment=environment)
    beside: list[Contender] = [Perftest(arena.nbytes, environment)] if spec.perftest else []
    for peer in spec.peers:
        if peer.environment is None:
            beside.append(PeerProgram(peer.title, peer.program, arena, how=peer.how, environment=settled(environment)))
        elif peer.environment in made:
            own = made[peer.environment]
            variables = settled(environment, [*own.variables.items(), *peer.variables])
            beside.append(
                PeerProgram(peer.title, peer.program, arena, how=peer.how, python=own.python, environment=variables)
            )
    return [ours, *beside]
