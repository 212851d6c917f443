"""What can't be in a cluster's description, though each field has its type. Pure."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from tensorhub_simulator.performance.config import Cluster

RANKS_MAX: Final = 65_536
"""A cluster has at most so many GPUs with weights: more take hours."""

NUMBER_MAX: Final = 1e12
"""No number is larger: nothing that is built has so many of anything, in the units of a file."""

VERSIONS_MAX: Final = 10_000
RESPONSES_MAX: Final = 65_536
"""More versions, or responses at once, would be drawn for hours."""

PIECES_MAX: Final = 4_096
"""A shard is cut into at most so many pieces: they are as large as that needs."""

SECONDS_MAX: Final = 1e6
"""A run has so much virtual time at most, eleven days: agents beat twice a second, whatever else happens."""

WAIT_S_MAX: Final = 60.0
"""No round trip and no work of the control plane takes longer."""

MOVES_MAX: Final = 1_000_000
"""Spot instances come and go so many times at most."""

SPOT_AFTER_S: Final = 600.0
"""So long after the last publication instances come and go."""

MAY_BE_ZERO: Final = frozenset(
    {"loss", "rtt_us", "rtt_ms", "every_s", "away_share", "seed", "jitter", "log_s", "command_s", "plan_s"}
    | {"plan_holder_s", "open_s", "batch_s"}
)
"""Every other number must be more than zero."""


def wrongs(cluster: "Cluster") -> Iterator[str]:
    """Yield what is wrong, in sentences."""
    yield from _numbers(msgspec.to_builtins(cluster), "")
    yield from _places(cluster)
    yield from _links(cluster)
    yield from _sizes(cluster)
    yield from _times(cluster)
    yield from _spot(cluster)


def _numbers(tree: object, path: str) -> Iterator[str]:
    """Yield which numbers are out of their range."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name not in ("set", "events"):
                yield from _numbers(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _numbers(value, f"{path}.{number}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        least_is_zero = path.rpartition(".")[2] in MAY_BE_ZERO
        if not math.isfinite(tree) or tree < 0 or (tree == 0 and not least_is_zero):
            yield f"{path} is {tree:g}, and must be {'at least' if least_is_zero else 'more than'} 0"
        elif tree > NUMBER_MAX and path != "seed":
            yield f"{path} is {tree:g}, and at most {NUMBER_MAX:g} is simulated"


def _places(cluster: "Cluster") -> Iterator[str]:
    known = ", ".join(map(repr, cluster.sites)) or "none"
    for name, kind in cluster.replicas.items():
        if kind.site not in cluster.sites:
            yield f"replicas {name!r} stand in site {kind.site!r}, and the sites are {known}"
    for name, site in cluster.sites.items():
        if site.efficiency > 1:
            yield f"sites.{name}.efficiency is {site.efficiency:g}, and is a part of 1"
    yield from _trainer(cluster)


def _links(cluster: "Cluster") -> Iterator[str]:
    known = ", ".join(map(repr, cluster.sites)) or "none"
    for line in cluster.links:
        one, other = line.between
        for end in line.between:
            if end not in cluster.sites:
                yield f"a link ends in site {end!r}, and the sites are {known}"
        if one == other:
            yield f"a link leads from site {one!r} to itself: inside a site there are network cards alone"
        if line.loss >= 1:
            yield f"the link between {one!r} and {other!r} loses every packet: loss is a part of 1"
        if line.efficiency > 1:
            yield f"the link between {one!r} and {other!r} has efficiency {line.efficiency:g}, which is a part of 1"
    ends = Counter(frozenset(line.between) for line in cluster.links)
    for between, count in ends.items():
        if count > 1:
            names = " and ".join(map(repr, sorted(between)))
            yield f"there are {count} links between {names}: name one, with all that they carry together"


def _trainer(cluster: "Cluster") -> Iterator[str]:
    if cluster.trainer not in cluster.replicas:
        yield f"the trainer is {cluster.trainer!r}, and there are no replicas of that name"
    elif len(cluster.replicas) == 1:
        yield "there is a trainer and nobody else: add replicas that read"
    elif cluster.replicas[cluster.trainer].memory_host:
        yield "the trainer stands in the memory of a host without GPUs: it can't train there"
    elif all(kind.memory_host for name, kind in cluster.replicas.items() if name != cluster.trainer):
        yield "beside the trainer there are only replicas in the memory of hosts without GPUs: add some that generate"


def _sizes(cluster: "Cluster") -> Iterator[str]:
    ranks = cluster.model.shards * sum(kind.count for kind in cluster.replicas.values())
    if ranks > RANKS_MAX:
        yield f"{ranks} shards are more than {RANKS_MAX}: name fewer replicas"
    if cluster.grow is not None and cluster.grow.kind not in cluster.replicas:
        yield f"it grows by replicas {cluster.grow.kind!r}, and there are none of that name"
    elif cluster.grow is not None and cluster.grow.kind == cluster.trainer:
        yield f"it grows by replicas {cluster.grow.kind!r}, which are the trainer's: name those that read"
    yield from _pieces(cluster)
    if cluster.versions > VERSIONS_MAX:
        yield f"{cluster.versions} versions are more than {VERSIONS_MAX}"
    if cluster.generation.responses > RESPONSES_MAX:
        yield f"generation.responses is {cluster.generation.responses}, and at most {RESPONSES_MAX} are drawn"
    if cluster.versions > 1 and not cluster.every_s:
        yield f"{cluster.versions} versions need a time from one to the next: set every_s"
    seeds = any(kind.memory_host for kind in cluster.replicas.values())
    if cluster.update == "behind-a-seed" and not seeds:
        yield "rollouts wait for a seed, and no replicas stand in a host's memory (memory_host: true)"


def _pieces(cluster: "Cluster") -> Iterator[str]:
    pieces, shard = cluster.model.piece_bytes, cluster.model.gbytes * 1e9 / cluster.model.shards
    if pieces is None:
        return
    if len(pieces) > PIECES_MAX:
        yield f"a shard has {len(pieces)} pieces, and at most {PIECES_MAX} are simulated"
    if not math.isclose(sum(pieces), shard, rel_tol=0.01):
        yield f"model.piece_bytes come to {sum(pieces)} bytes, and a shard of model.gbytes has {shard:.0f}"


def _times(cluster: "Cluster") -> Iterator[str]:
    """Yield what would take for ever, though nothing of it is wrong by itself."""
    waits = {f"sites.{name}.rtt_us": site.rtt_us / 1e6 for name, site in cluster.sites.items()}
    waits |= {f"links.{number}.rtt_ms": line.rtt_ms / 1e3 for number, line in enumerate(cluster.links)}
    control = msgspec.to_builtins(cluster.control)
    waits |= {f"control.{name}": control[name] for name in control if name in MAY_BE_ZERO and name != "jitter"}
    for path, seconds in waits.items():
        if seconds > WAIT_S_MAX:
            yield f"{path} comes to {seconds:g} s, and at most {WAIT_S_MAX:g} are simulated"
    long = {
        "versions times every_s": cluster.versions * cluster.every_s,
        "generation.tokens_max times token_s": cluster.generation.tokens_max * cluster.generation.token_s,
        "the last of spot.events": max((at_s for at_s, _, _ in cluster.spot.events), default=0.0)
        if cluster.spot
        else 0,
    }
    for what, seconds in long.items():
        if seconds > SECONDS_MAX:
            yield f"{what} comes to {seconds:g} s, and at most {SECONDS_MAX:g} are simulated"


def _moves(cluster: "Cluster") -> Iterator[str]:
    """Yield whether more instances come and go than can be drawn."""
    spot = cluster.spot
    if spot is None or spot.stays_s is None or spot.away_s is None:
        return
    lasts_s = cluster.versions * cluster.every_s + SPOT_AFTER_S
    moves = 2 * cluster.replicas[spot.kind].count * lasts_s / (spot.stays_s + spot.away_s)
    if moves > MOVES_MAX:
        yield (
            f"spot instances would come and go some {moves:.0f} times within {lasts_s:g} s, and at most {MOVES_MAX} "
            "are simulated: let them stay or be away for longer"
        )


def _spot(cluster: "Cluster") -> Iterator[str]:
    spot = cluster.spot
    if spot is None:
        return
    if spot.kind not in cluster.replicas or spot.kind == cluster.trainer:
        yield f"spot instances are {spot.kind!r}, and there are no such replicas beside the trainer"
        return
    if cluster.baseline == "global-stage":
        yield "a global stage has no answer to spot instances, which come and go within it: compare with a star"
    if spot.away_share > 1:
        yield f"spot.away_share is {spot.away_share:g}, and is a part of 1"
    if (spot.stays_s is None) != (spot.away_s is None):
        yield "spot.stays_s and spot.away_s go together: name both, or a trace in spot.events"
    for at_s, _, number in spot.events:
        count = cluster.replicas[spot.kind].count
        if not 0 <= at_s <= NUMBER_MAX or not 0 <= number < count:
            yield (
                f"spot.events names replica {number} at second {at_s:g}: of {count} {spot.kind!r} the first is 0 and "
                f"the last {count - 1}, and time begins at 0"
            )
    yield from _moves(cluster)
