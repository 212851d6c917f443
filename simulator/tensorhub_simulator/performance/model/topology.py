"""The links of a cluster, and the way of bytes from one GPU to another. Pure.

Each GPU has its part of its host's network cards, out and in. Hosts whose bytes go through their memory share that, and
two sites share the line between them. Inside a site there is no other bound: the fabric is taken for non-blocking.

Of the `shards` GPUs of a copy `rails` are modelled (`spec.Cluster.rails`); of what all would share they get their part.
"""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from tensorhub_simulator.performance.config import Cluster, ClusterError, Site
from tensorhub_simulator.performance.config import Link as Line
from tensorhub_simulator.performance.model.network import UNBOUND, Connection, Link, stream_bytes_s

GBIT: Final = 1_000_000_000 // 8
GBYTE: Final = 1_000_000_000
RAILS_RANKS_MAX: Final = 512
"""Up to this many GPUs with weights all are modelled, unless the file says otherwise."""
LOCAL_BYTES_S: Final = 100 * GBYTE
"""Between two GPUs of one host: a good part of NVLink."""


@dataclass(slots=True, eq=False)
class GpuPlace:
    """Where one shard of a replica stands."""

    kind: str
    replica: int
    shard: int
    site: str
    host: str
    out: Link
    into: Link
    local: Link
    memory: Link | None

    @property
    def agent(self) -> str:
        """The name of its agent."""
        return f"{self.kind}-{self.replica}.{self.shard}"


@dataclass(slots=True)
class ClusterTopology:
    """All seats and lines."""

    cluster: Cluster
    rails: int
    seats: dict[tuple[str, int], tuple[GpuPlace, ...]] = field(default_factory=dict)
    """By kind and number of the replica: the modelled ones of its shards."""
    lines: dict[tuple[str, str], tuple[Line, Link]] = field(default_factory=dict)

    @property
    def part(self) -> float:
        """So much of the cluster is modelled."""
        return self.rails / self.cluster.model.shards

    @property
    def links(self) -> list[Link]:
        """Every link, once."""
        found: dict[Link, None] = {link: None for _, link in self.lines.values()}
        for seats in self.seats.values():
            for seat in seats:
                found |= dict.fromkeys((seat.out, seat.into, seat.local))
                if seat.memory is not None:
                    found[seat.memory] = None
        return list(found)

    def delay_s(self, one: GpuPlace, other: GpuPlace) -> float:
        """Return how long a short message takes."""
        if one.site == other.site:
            return self.cluster.sites[one.site].rtt_us / 2e6
        return self.lines[one.site, other.site][0].rtt_ms / 2e3

    def control_delay_s(self, seat: GpuPlace) -> float:
        """Return how far a seat is from the control plane, which stands where the trainer is."""
        home = self.cluster.replicas[self.cluster.trainer].site
        if seat.site == home:
            return self.cluster.sites[home].rtt_us / 2e6
        return self.lines[home, seat.site][0].rtt_ms / 2e3

    def connect(self, source: GpuPlace, reader: GpuPlace, streams: int = 1) -> Connection:
        """Return a connection by which a reader reads from a source; to another site, `streams` times its streams."""
        if source.host == reader.host:
            return Connection((reader.local,))
        memory = tuple(link for link in (source.memory, reader.memory) if link is not None)
        if source.site == reader.site:
            return Connection((source.out, *memory, reader.into))
        line, link = self.lines[source.site, reader.site]
        ceiling = (
            streams * line.streams * stream_bytes_s(int(line.window_mib * (1 << 20)), line.rtt_ms / 1e3, line.loss)
        )
        return Connection((source.out, *memory, link, reader.into), ceiling=min(ceiling, UNBOUND))


def build(cluster: Cluster) -> ClusterTopology:
    """Lay out a cluster. Raises `ClusterError` where two sites that need a line have none."""
    shards = cluster.model.shards
    ranks = shards * sum(kind.count for kind in cluster.replicas.values())
    rails = cluster.rails or (shards if ranks <= RAILS_RANKS_MAX else 1)
    fabric = ClusterTopology(cluster, min(rails, shards))
    for line in cluster.links:
        for one, other in (line.between, line.between[::-1]):
            nbytes = max(int(line.gbit_s * GBIT * line.efficiency * fabric.part), 1)
            fabric.lines[one, other] = (line, Link(f"{one} to {other}", nbytes, tier=f"{one} to {other}"))
    for name in cluster.sites:
        _seat_all(fabric, name)
    for one, other in combinations(dict.fromkeys(kind.site for kind in cluster.replicas.values()), 2):
        if (one, other) not in fabric.lines:
            raise ClusterError(
                f"no link between sites {one!r} and {other!r}, whose replicas may read from each other: "
                "name it under 'links'"
            )
    return fabric


def _seat_all(fabric: ClusterTopology, site: str) -> None:
    """Give the replicas of one site their GPUs, one after the other."""
    cluster, made = fabric.cluster, fabric.cluster.sites[site]
    shards, taken = cluster.model.shards, 0
    memories: dict[str, Link] = {}
    for name, kind in cluster.replicas.items():
        if kind.site != site:
            continue
        if kind.memory_host:
            # Hosts of their own: memory without GPUs beside them.
            taken = -(-taken // made.gpus_per_host) * made.gpus_per_host
        for number in range(kind.count):
            seats = []
            for shard in range(fabric.rails):
                host = f"{site}-{(taken + shard) // made.gpus_per_host}"
                seats.append(_seat(fabric, name, number, shard, host, made, memories))
            fabric.seats[name, number] = tuple(seats)
            taken += shards


def _seat(
    fabric: ClusterTopology, kind: str, number: int, shard: int, host: str, made: Site, memories: dict[str, Link]
) -> GpuPlace:
    site = fabric.cluster.replicas[kind].site
    card = max(int(made.nic_gbit_s * GBIT * made.efficiency * made.nics_per_host / made.gpus_per_host), 1)
    name = f"{kind}-{number}.{shard}"
    memory = None
    if made.memory_gbyte_s is not None:
        # Where not all shards are modelled, they get their part of their host's memory.
        here = min(fabric.cluster.model.shards, made.gpus_per_host)
        part = min(fabric.rails / here, 1.0)
        whole = max(int(made.memory_gbyte_s * GBYTE * part), 1)
        memory = memories.setdefault(host, Link(f"memory of {host}", whole, tier=f"memory in {site}"))
    return GpuPlace(
        kind=kind,
        replica=number,
        shard=shard,
        site=site,
        host=host,
        out=Link(f"out of {name}", card, tier=f"{kind} out"),
        into=Link(f"into {name}", card, tier=f"{kind} in"),
        local=Link(f"inside, to {name}", LOCAL_BYTES_S, tier=f"inside hosts of {site}"),
        memory=memory,
    )
