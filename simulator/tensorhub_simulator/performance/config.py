"""A cluster and what happens on it, as a YAML file says it. Pure.

Every field has its unit in its name; `docs/simulate.md` shows a whole file. Whatever is wrong with one is told in one
sentence (`ClusterError`), before anything is simulated.
"""

from typing import Any, Literal

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_simulator.performance import strict_yaml
from tensorhub_simulator.performance.model.tcp import WIRE
from tensorhub_simulator.performance.wrongs import wrongs


class ClusterError(TensorHubError):
    """The description of a cluster can't be simulated. The message says what is wrong and what to do."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of a file have in common: a field too many is an error."""


class Model(_Spec, frozen=True, kw_only=True):
    """What is moved."""

    gbytes: float
    """A whole copy of the weights, in units of 10^9 bytes."""
    shards: int = 8
    """On so many GPUs a copy stands."""
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
    """One pull of one GPU is over so many streams."""
    efficiency: float = WIRE


class Replicas(_Spec, frozen=True, kw_only=True):
    """Some copies of one kind. They stand on the GPUs of their site in the order of the file."""

    site: str
    count: int
    memory_host: bool = False
    """They stand in the memory of hosts without GPUs, so nobody loses time while they are filled."""


class Control(_Spec, frozen=True, kw_only=True):
    """What the control plane takes. `calibrate` measures it on the real one."""

    log_s: float = 0.0012
    """From a command to everybody who hears its outcome, without load."""
    command_s: float = 0.00033
    """The registry and the log need so much for a command: one after the other."""
    planners: int = 1
    """So many planners share the questions. Each keeps places for readers that have asked another one."""
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
    """A replica generates so many at once, and reaches its step boundary with the last of them."""
    token_s: float = 0.02
    """So long a replica takes for the next token of all that it generates."""
    interrupted: bool = False
    """Generation may stop between any two tokens: the boundary is at most `token_s` away."""


class Spot(_Spec, frozen=True, kw_only=True):
    """Instances that come and go: one replica of a kind each."""

    kind: str
    away_share: float = 0.0
    """So many of them are away at the beginning."""
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


class Variation(_Spec, frozen=True, kw_only=True):
    """What may be otherwise."""

    what: str
    set: dict[str, Any]
    """Values by their path in this file: `links.0.rtt_ms: 100`."""


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
    """What others do instead (docs/simulate.md)."""
    star_readers_max: int | None = None
    """In a star so many readers at a time pull from one trainer copy, and the others wait for their turn. Left out, all
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
    """Of the shards so many are simulated, and stand for the others, which have equal bytes and network cards of their
    own: what is shared is divided accordingly. Left out, all are, up to 512 GPUs with weights, and one above."""
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
        raise ClusterError(f"{name} describes no cluster: {why} (docs/simulate.md has every field)") from None


def check(cluster: Cluster, name: str) -> None:
    """Raise `ClusterError` for the first thing that can't be."""
    wrong = next(wrongs(cluster), None)
    if wrong is not None:
        raise ClusterError(f"{name} describes no cluster: {wrong}")
