"""A cluster and what happens on it, as a YAML file says it. Pure.

Every field has its unit in its name. `docs/design/simulate.md` shows a whole file.

A mistake in a description is told in one sentence (`ClusterError`), before anything is simulated. `wrongs` finds the
mistakes in a cluster's description of which each field has its type.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_simulator.performance import strict_yaml
from tensorhub_simulator.performance.model.network import WIRE
from tensorhub_simulator.performance.variation import Variation

RANKS_MAX: Final = 65_536
"""A cluster has at most this many GPUs with weights: more take hours."""

NUMBER_MAX: Final = 1e12
"""No number is larger: nothing that is built has this many of anything, in the units of a file."""

VERSIONS_MAX: Final = 10_000
RESPONSES_MAX: Final = 65_536
"""More versions, or responses at once, would be drawn for hours."""

PIECES_MAX: Final = 4_096
"""A shard is cut into at most this many pieces: they are as large as that needs."""

PIECES_READ: Final = 50_000
"""All replicas together read at most this many pieces of a version: in larger clusters pieces are larger. A chain's
hops are longer then, so ours is slower than it would be."""

PIECES_MIN: Final = 48
"""But a shard has at least this many pieces."""

SECONDS_MAX: Final = 1e6
"""A run has so much virtual time at most, eleven days: agents beat twice a second, whatever else happens."""

WAIT_S_MAX: Final = 60.0
"""No round trip and no work of the control plane takes longer."""

MOVES_MAX: Final = 1_000_000
"""Spot instances come and go this many times at most."""

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
        yield "there is a trainer alone: add replicas that read"
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


class ClusterError(TensorHubError):
    """The description of a cluster can't be simulated. The message says what is wrong and what to do."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of a file have in common: a field too many is an error."""


class Model(_Spec, frozen=True, kw_only=True):
    """What is moved."""

    gbytes: float
    """A whole copy of the weights, in units of 10^9 bytes."""
    shards: int = 8
    """On this many GPUs a copy stands."""
    piece_mib: float = 4.0
    """The unit of transfer. The hub's own are at most 4 MiB; larger ones are simulated sooner."""
    piece_bytes: tuple[int, ...] | None = None
    """The pieces of each shard one by one, in place of equal ones."""


class Site(_Spec, frozen=True, kw_only=True):
    """A datacenter whose hosts are of one kind. Between its hosts nothing but their own network cards is a bound."""

    gpus_per_host: int = 8
    nics_per_host: int = 8
    nic_gbit_s: float = 200.0
    efficiency: float = 0.88
    """So much of a card's rate is payload at best: RDMA is measured at 0.88, TCP has 0.956 on an Ethernet wire."""
    rtt_us: float = 20.0
    memory_gbyte_s: float | None = None
    """What a host's memory takes and gives together, where bytes go through it; not where cards write into GPUs."""


class Link(_Spec, frozen=True, kw_only=True):
    """The way between two sites, in each direction."""

    between: tuple[str, str]
    gbit_s: float
    rtt_ms: float
    loss: float = 0.0
    window_mib: float = 16.0
    """The window of one TCP stream."""
    streams: int = 1
    """One pull of one GPU is over this many streams."""
    efficiency: float = WIRE


class Replicas(_Spec, frozen=True, kw_only=True):
    """Some copies of one kind. They stand on the GPUs of their site in the order of the file."""

    site: str
    count: int
    memory_host: bool = False
    """They stand in the memory of hosts without GPUs, so no GPU loses time while they are filled."""


class Control(_Spec, frozen=True, kw_only=True):
    """What the control plane takes. `calibrate` measures it on the real one."""

    log_s: float = 0.0012
    """From a command to everybody who hears its outcome, without load."""
    command_s: float = 0.00033
    """The registry and the log need so much for a command: one after the other."""
    planners: int = 1
    """This many planners share the questions. Each keeps places for readers that have asked another one."""
    plan_s: float = 0.0001
    """A planner needs so much for a plan,"""
    plan_holder_s: float = 0.000006
    """... and so much more for each holder that it chooses from."""
    open_s: float = 0.003
    """To ask for a lease and to open the transport takes so much beside two round trips."""
    batch_s: float = 0.0005
    """What stands in a reader's memory and is hashed counts, and is told of, so much later."""
    digest_gbyte_s: float = 40.0
    """How fast a reader takes digests of what came: four threads of a processor, or a GPU."""
    jitter: float = 0.0
    """Each of these times is longer by up to this part of itself, by lot."""


class Generation(_Spec, frozen=True, kw_only=True):
    """What rollouts do between updates: a batch of responses at a time, of lengths that are far from equal."""

    tokens_median: float = 2_000.0
    skew: float = 10.0
    """The 99th percentile of the lengths, in medians. They are log-normal."""
    tokens_max: float = 32_768.0
    responses: int = 32
    """A replica generates this many at once, and reaches its step boundary with the last of them."""
    token_s: float = 0.02
    """So long a replica takes for the next token of all that it generates."""
    interrupted: bool = False
    """Generation may stop between any two tokens: the boundary is at most `token_s` away."""


class Spot(_Spec, frozen=True, kw_only=True):
    """Instances that come and go: one replica of a kind each."""

    kind: str
    away_share: float = 0.0
    """This many of them are away at the beginning."""
    events: tuple[tuple[float, Literal["comes", "goes"], int], ...] = ()
    """(second, what, number of the replica): a recorded trace."""
    stays_s: float | None = None
    """Without a trace: an instance stays so long on average, and is away for"""
    away_s: float | None = None
    """... so long; both exponentially distributed."""


class Grow(_Spec, frozen=True, kw_only=True):
    """How the cluster grows."""

    kind: str
    """Replicas of this kind make up the rest of"""
    gpus: tuple[int, ...]
    """... each of these numbers of GPUs."""


class Cluster(_Spec, frozen=True, kw_only=True):
    """The whole file."""

    name: str
    about: str = ""
    model: Model
    sites: dict[str, Site]
    links: tuple[Link, ...] = ()
    replicas: dict[str, Replicas]
    trainer: str = "trainer"
    """The kind of replicas that publish; all of them hold each version."""
    baseline: Literal["global-stage", "star", "far-star"]
    """What others do instead (docs/design/simulate.md)."""
    star_readers_max: int | None = None
    """In a star this many readers at a time pull from one trainer copy; the others wait for their turn. Left out, all
    pull at once."""
    update: Literal["at-once", "at-boundary", "behind-a-seed"] = "at-once"
    """When rollouts fetch: when a version is published, when they reach a boundary after that, or once a copy stands
    in their own site."""
    versions: int = 1
    every_s: float = 0.0
    """From one publication to the next."""
    generation: Generation = Generation()
    spot: Spot | None = None
    control: Control = Control()
    grow: Grow | None = None
    vary: tuple[Variation, ...] = ()
    rails: int | None = None
    """This many of the shards are simulated, and stand for the others, which have equal bytes and network cards of
    their own: what is shared is divided accordingly. Left out, all are, up to 512 GPUs with weights, and one above."""
    seed: int = 1


def decode(text: str | bytes, name: str) -> Cluster:
    """Read a file's text. Raises `ClusterError` that names the file, the field and what is wrong."""
    try:
        tree = strict_yaml.load(text)
    except Exception as why:  # noqa: BLE001 (the YAML library has errors of its own, of many kinds)
        raise ClusterError(f"{name} is no YAML: {' '.join(str(why).split())}") from None
    cluster = converted(tree, name)
    check(cluster, name)
    return cluster


def converted(tree: object, name: str) -> Cluster:
    """Return the cluster that a tree of plain values describes."""
    try:
        return msgspec.convert(tree, Cluster)
    except msgspec.ValidationError as why:
        raise ClusterError(f"{name} describes no cluster: {why} (docs/design/simulate.md has every field)") from None


def check(cluster: Cluster, name: str) -> None:
    """Raise `ClusterError` for the first thing that can't be."""
    wrong = next(wrongs(cluster), None)
    if wrong is not None:
        raise ClusterError(f"{name} describes no cluster: {wrong}")
