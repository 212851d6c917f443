"""What others do instead, on the same cluster with the same chance, at the best that is plausible. docs/simulate.md.

- *global stage*: every worker stops at its step boundary and waits for the slowest; then a tree broadcast over a group
  that stands ready fills all of them at the rate of one network card, and all go on.
- *star*: each reader pulls from the trainer copy with the fewest readers, at once, with nothing before it but opening
  the connection. Nobody verifies, nobody waits for a log, and the trainer never has to wait for its readers.
- *far star*: the same across sites; each pull is of its own TCP streams.
"""

import math
from typing import Final

from tensorhub_simulator.cluster import generation, spot
from tensorhub_simulator.cluster.agenda import Action, Agenda
from tensorhub_simulator.cluster.fabric import Fabric, Seat, build
from tensorhub_simulator.cluster.network import Connection, Network
from tensorhub_simulator.cluster.result import Result, Update
from tensorhub_simulator.cluster.spec import Cluster

BARRIER_HOP_S: Final = 0.0002
"""A step of a barrier, or of a tree: a message between two hosts and the kernel that waits for it."""


def run(cluster: Cluster) -> Result:
    """Run the baseline that the file names."""
    return global_stage(cluster) if cluster.baseline == "global-stage" else Star(cluster).run()


def global_stage(cluster: Cluster) -> Result:
    """Fill all replicas by broadcasts which all of them join."""
    fabric = build(cluster)
    result = Result(updates=[], published_s=[], link_bytes={})
    replicas = [each for each in fabric.seats if each[0] != cluster.trainer]
    hops = math.ceil(math.log2(len(fabric.seats)))
    bytes_s = min(link.bytes_s for seats in fabric.seats.values() for seat in seats for link in (seat.out, seat.into))
    shard = cluster.model.gbytes * 1e9 / cluster.model.shards
    stage_s = 2 * hops * BARRIER_HOP_S + shard / bytes_s
    now_s = 0.0
    for version in range(1, cluster.versions + 1):
        result.published_s.append(now_s)
        stops = [now_s + generation.next_boundary_s(cluster, kind, n, version) for kind, n in replicas]
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
    return result


class Star:
    """Every reader pulls from a trainer's copy."""

    def __init__(self, cluster: Cluster) -> None:
        """Lay the cluster out."""
        self.cluster = cluster
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.fabric: Fabric = build(cluster)
        self.result = Result(updates=[], published_s=[], link_bytes={})
        self._latest = 0
        self._shard = max(round(cluster.model.gbytes * 1e9 / cluster.model.shards), 1)
        self._pulling: dict[tuple[str, int], tuple[Update, list[Connection]]] = {}
        self._held: dict[tuple[str, int], int] = {}
        self._load = dict.fromkeys(range(cluster.replicas[cluster.trainer].count), 0)
        self._readers = [each for each in self.fabric.seats if self._reads(each[0])]
        self._away: set[tuple[str, int]] = set()

    def _reads(self, kind: str) -> bool:
        """Tell whether replicas of a kind pull: a host whose memory would be a seed has no part in a star."""
        return kind != self.cluster.trainer and not self.cluster.replicas[kind].memory_host

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
            if ended and self._latest == cluster.versions and not self._pulling and all(whole):
                break
        self.result.seconds, self.result.steps = self.agenda.now, self.agenda.steps
        self.result.count_links(self.fabric)
        return self.result

    def _publish(self, version: int) -> None:
        self._latest = version
        self.result.published_s.append(self.agenda.now)
        for each in self._readers:
            if each not in self._away and each not in self._pulling:
                self._pull(each)

    def _move(self, each: tuple[str, int], what: str) -> None:
        if what == "goes":
            self._away.add(each)
            _, connections = self._pulling.pop(each, (None, []))
            for connection in connections:
                self.network.close(connection)
        elif each in self._away:
            self._away.discard(each)
            self._held.pop(each, None)
            if self._latest:
                self._pull(each)

    def _pull(self, each: tuple[str, int]) -> None:
        kind, number = each
        update = Update(kind=kind, replica=number, version=self._latest, asked_s=self.agenda.now)
        self.result.updates.append(update)
        trainer = min(self._load, key=lambda one: (self._load[one], one))
        self._load[trainer] += 1
        sources = self.fabric.seats[self.cluster.trainer, trainer]
        connections: list[Connection] = []
        self._pulling[each] = (update, connections)
        left = [len(sources)]

        def came() -> None:
            left[0] -= 1
            if not left[0] and self._pulling.get(each, (None,))[0] is update:
                self._load[trainer] -= 1
                self._end(each, update)

        for source, reader in zip(sources, self.fabric.seats[each], strict=True):
            connections.append(self._open(source, reader, came))

    def _open(self, source: Seat, reader: Seat, came: Action) -> Connection:
        connection = self.fabric.connect(source, reader)
        opens_s = 4 * self.fabric.delay_s(source, reader) + self.cluster.control.open_s
        self.agenda.after(opens_s, lambda: self.network.send(connection, self._shard, came))
        return connection

    def _end(self, each: tuple[str, int], update: Update) -> None:
        del self._pulling[each]
        update.started_s, update.ready_s = update.asked_s, self.agenda.now
        self._held[each] = update.version
        if update.version != self._latest:
            self._pull(each)
