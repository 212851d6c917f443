"""What others do instead, on the same cluster with the same chance, at the best that is plausible.

docs/design/simulate.md has the results.

- *global stage*: every worker stops when its policy says so (at its step boundary, or at the publication) and waits for
  the slowest; then a broadcast over a group that stands ready fills all of them at the rate of the slowest card or
  line, and all go on.
- *star*: each reader pulls from the trainer copy with the fewest readers, with nothing before it but opening the
  connection. No reader verifies, no call waits for a log, and the trainer never has to wait for its readers.
- *far star*: the same across sites; each pull is over as many TCP streams as one of ours.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.engine.agenda import Action, Agenda
from tensorhub_simulator.performance.config import Cluster
from tensorhub_simulator.performance.model import generation, spot
from tensorhub_simulator.performance.model.network import Connection, Link, Network
from tensorhub_simulator.performance.model.topology import ClusterTopology, GpuPlace, build
from tensorhub_simulator.performance.results import Result, Update

BARRIER_HOP_S: Final = 0.0002
"""A step of a barrier, or of a tree: a message between two hosts and the kernel that waits for it."""

STREAMS: Final = PlanLimits().wan_streams
"""A pull from another site is over this many streams, times those of the line: as many as a shard of ours has."""

Who = tuple[str, int]
"""A replica: its kind and its number."""


def run(cluster: Cluster) -> Result:
    """Run the baseline that the file names."""
    return global_stage(cluster) if cluster.baseline == "global-stage" else Star(cluster).run()


def readers_of(cluster: Cluster, fabric: ClusterTopology) -> list[Who]:
    """Return who is to be filled: a host whose memory would be a seed has no part in what others do."""
    kinds = cluster.replicas
    return [who for who in fabric.seats if who[0] != cluster.trainer and not kinds[who[0]].memory_host]


def global_stage(cluster: Cluster) -> Result:
    """Fill all replicas by broadcasts which all of them join."""
    fabric = build(cluster)
    result = Result(updates=[], published_s=[], link_bytes={})
    replicas = readers_of(cluster, fabric)
    stage_s = _stage_s(cluster, fabric, replicas)
    now_s = 0.0
    for version in range(1, cluster.versions + 1):
        result.published_s.append(now_s)
        stops = [now_s + generation.stops_after_s(cluster, kind, n, version) for kind, n in replicas]
        end_s = max(stops) + stage_s
        for (kind, n), stop_s in zip(replicas, stops, strict=True):
            result.updates.append(
                Update(kind=kind, replica=n, version=version, asked_s=stop_s, started_s=max(stops), ready_s=end_s)
            )
        result.trainer_stall_s += end_s - now_s
        result.seconds = end_s
        now_s = end_s + cluster.every_s
    copied = cluster.model.gbytes * 1e9 * cluster.versions
    result.link_bytes = {f"{kind} in": copied * cluster.replicas[kind].count for kind in dict(replicas)}
    for _, link in _lines(cluster, fabric, replicas):
        result.link_bytes[link.tier] = copied
    return result


def _stage_s(cluster: Cluster, fabric: ClusterTopology, replicas: list[Who]) -> float:
    """Return how long a stage takes once all are there: a barrier, and a broadcast as fast as its slowest part."""
    seats = [seat for who in (*replicas, (cluster.trainer, 0)) for seat in fabric.seats[who]]
    hops = math.ceil(math.log2(len(replicas) + cluster.replicas[cluster.trainer].count))
    shard = cluster.model.gbytes * 1e9 / cluster.model.shards
    lines = _lines(cluster, fabric, replicas)
    takes = [shard / min(seat.out.bytes_s, seat.into.bytes_s) for seat in seats]
    takes += [shard * fabric.rails / link.bytes_s for _, link in lines]
    # Each site is a round trip away for the barrier, and half of one for the bytes.
    away_s = max((1.5 * rtt_s for rtt_s, _ in lines), default=0.0)
    return 2 * hops * BARRIER_HOP_S + max(takes) + away_s


class Star:
    """Every reader pulls from a trainer's copy."""

    def __init__(self, cluster: Cluster) -> None:
        """Lay the cluster out."""
        self.cluster = cluster
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.fabric: ClusterTopology = build(cluster)
        self.result = Result(updates=[], published_s=[], link_bytes={})
        self._latest = 0
        self._shard = max(round(cluster.model.gbytes * 1e9 / cluster.model.shards), 1)
        self._pulls: dict[Who, _Pull] = {}
        self._held: dict[Who, int] = {}
        self._load = dict.fromkeys(range(cluster.replicas[cluster.trainer].count), 0)
        self._queue: deque[Who] = deque()
        self._readers = readers_of(cluster, self.fabric)
        self._away: set[Who] = set()
        self._lives: Counter[Who] = Counter()

    def run(self) -> Result:
        """Publish all versions, and go on until everybody has the last one."""
        cluster = self.cluster
        away, moves = spot.moves(cluster, spot.horizon_s(cluster))
        kind = cluster.spot.kind if cluster.spot is not None else ""
        self._away = {(kind, number) for number in away}
        for version in range(1, cluster.versions + 1):
            self.agenda.at((version - 1) * cluster.every_s, lambda version=version: self._publish(version))  # type: ignore[misc]
        for move in moves:
            self.agenda.at(move.at_s, lambda move=move: self._move((kind, move.replica), move.what))  # type: ignore[misc]
        while self.agenda.step():
            whole = (self._held.get(each) == self._latest for each in self._readers if each not in self._away)
            ended = self.agenda.now >= spot.last_event_s(cluster)
            if ended and self._latest == cluster.versions and not self._pulls and all(whole):
                break
        self.result.seconds, self.result.steps = self.agenda.now, self.agenda.steps
        self.result.count_links(self.fabric)
        return self.result

    def _publish(self, version: int) -> None:
        self._latest = version
        self.result.published_s.append(self.agenda.now)
        for who in self._readers:
            if who not in self._away and who not in self._pulls:
                self._on_version(who)

    def _on_version(self, who: Who) -> None:
        """A reader hears of the latest version, and pulls it when its policy says so."""
        life = self._lives[who]
        stops_s = generation.stops_after_s(self.cluster, *who, self._latest)
        self.agenda.after(stops_s, lambda: self._want(who, life))

    def _want(self, who: Who, life: int) -> None:
        if life != self._lives[who] or who in self._pulls or self._held.get(who) == self._latest:
            return
        update = Update(kind=who[0], replica=who[1], version=self._latest, asked_s=self.agenda.now)
        self.result.updates.append(update)
        self._pulls[who] = _Pull(update)
        self._queue.append(who)
        self._serve()

    def _serve(self) -> None:
        """Let readers pull in the order in which they came, each from the trainer copy with the fewest."""
        most = self.cluster.star_readers_max or len(self._readers)
        while self._queue:
            trainer = min(self._load, key=lambda one: (self._load[one], one))
            if self._load[trainer] >= most:
                return
            self._load[trainer] += 1
            self._pull(self._queue.popleft(), trainer)

    def _pull(self, who: Who, trainer: int) -> None:
        pull = self._pulls[who]
        pull.trainer, pull.update.started_s = trainer, self.agenda.now
        sources = self.fabric.seats[self.cluster.trainer, trainer]
        left = [len(sources)]

        def came() -> None:
            left[0] -= 1
            if not left[0] and self._pulls.get(who) is pull:
                self._end(who, pull)

        for source, reader in zip(sources, self.fabric.seats[who], strict=True):
            pull.connections.append(self._open(source, reader, came))

    def _open(self, source: GpuPlace, reader: GpuPlace, came: Action) -> Connection:
        connection = self.fabric.connect(source, reader, STREAMS)
        opens_s = 4 * self.fabric.delay_s(source, reader) + self.cluster.control.open_s
        self.agenda.after(opens_s, lambda: self.network.send(connection, self._shard, came))
        return connection

    def _end(self, who: Who, pull: "_Pull") -> None:
        pull.update.ready_s = self.agenda.now
        self._held[who] = pull.update.version
        self._leave(who)
        if pull.update.version != self._latest:
            self._on_version(who)

    def _leave(self, who: Who) -> None:
        """Forget a pull, whose part of the trainer is free again."""
        pull = self._pulls.pop(who, None)
        if pull is None:
            return
        for connection in pull.connections:
            self.network.close(connection)
        if pull.trainer is None:
            self._queue.remove(who)
        else:
            self._load[pull.trainer] -= 1
            self._serve()

    def _move(self, who: Who, what: str) -> None:
        """An instance goes, with what it held, or comes, and pulls at once."""
        if (what == "goes") == (who in self._away):
            return
        self._lives[who] += 1
        if what == "goes":
            self._away.add(who)
            self._leave(who)
            self._held.pop(who, None)
        else:
            self._away.discard(who)
            if self._latest:
                self._want(who, self._lives[who])


@dataclass(slots=True, eq=False)
class _Pull:
    """One reader that pulls, or waits for its turn."""

    update: Update
    trainer: int | None = None
    """The trainer copy that it pulls from; None while it waits."""
    connections: list[Connection] = field(default_factory=list)


def _lines(cluster: Cluster, fabric: ClusterTopology, replicas: list[Who]) -> list[tuple[float, Link]]:
    """Return round trip and line from the trainer's site to each other one where somebody is to be filled."""
    home = cluster.replicas[cluster.trainer].site
    sites = dict.fromkeys(cluster.replicas[kind].site for kind, _ in replicas)
    ways = [fabric.lines[home, site] for site in sites if site != home]
    return [(line.rtt_ms / 1e3, link) for line, link in ways]
