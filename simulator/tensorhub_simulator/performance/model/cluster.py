"""A run: a trainer publishes, rollouts update when their policy says so, instances come and go; what took how long.

The planner's decision and the transfers are the production ones. The log, the registry, agents and networks are
modelled as times. One cluster file and one seed give one run, to the last bit.

`run` runs a `ClusterRun` to its end and returns the `Result`.
"""

import random
from collections.abc import Callable
from typing import Final

from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, root_digest
from tensorhub_common.protocol.plans import ReadPriority, Share, SourceId
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_simulator.engine.agenda import Agenda, ServerQueue
from tensorhub_simulator.performance.config import PIECES_MAX, SECONDS_MAX, Cluster, ClusterError
from tensorhub_simulator.performance.model import generation, spot
from tensorhub_simulator.performance.model.network import Network
from tensorhub_simulator.performance.model.planner import PlannerModel, limits_of
from tensorhub_simulator.performance.model.replica import Replica
from tensorhub_simulator.performance.model.shard import ShardNode
from tensorhub_simulator.performance.model.topology import GBYTE, ClusterTopology, build
from tensorhub_simulator.performance.results import Result, Update

LOST_AFTER_S: Final = 3.0
"""`TENSORHUB_LOST_AFTER_S` by default: the planner names a vanished agent for so long."""

BEAT_S: Final = 0.5
"""`TENSORHUB_BEAT_S` by default."""

STUCK_S: Final = 30.0
"""A run in which nothing has come for so long, though replicas are to be filled, has no end."""

DRAIN_S_MAX: Final = 60.0
"""A trainer waits so long for its readers before it breaks their leases."""

AGAIN_S: Final = 0.1
"""So long after it has failed a round is asked for again."""


class ClusterRun:
    """Everything in one run."""

    def __init__(self, cluster: Cluster, *, pipelining: bool = True) -> None:
        """Lay the cluster out, with the trainer alone holding anything."""
        self.cluster, self.control = cluster, cluster.control
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.fabric: ClusterTopology = build(cluster)
        self.rng = random.Random(cluster.seed)
        self.nbytes = pieces_of(cluster)
        self.digests = bytes(PIECE_DIGEST_BYTES * len(self.nbytes))
        self.root = root_digest(self.digests)
        self.digest_bytes_s = cluster.control.digest_gbyte_s * GBYTE
        self.planning = PlannerModel(
            self.agenda, self.fabric, PieceSizes(self.nbytes), self.root, limits_of(pipelining=pipelining)
        )
        self.result = Result(updates=[], published_s=[], link_bytes={})
        self._registry = ServerQueue(self.agenda)
        self._share = 1 / self.fabric.part
        self._decisions = 0
        self.ranks: dict[SourceId, ShardNode] = {}
        self.replicas: list[Replica] = []
        for (kind, number), seats in self.fabric.seats.items():
            ranks = tuple(ShardNode(self, seat) for seat in seats)
            self.ranks.update({rank.me: rank for rank in ranks})
            self.replicas.append(Replica(self, kind, number, ranks))
        self.trainers = [each for each in self.replicas if each.kind == cluster.trainer]
        self.others = [each for each in self.replicas if each.kind != cluster.trainer]
        self.latest: int | None = None
        self._seeded: dict[str, int] = {}
        self._until_s = spot.last_event_s(cluster)
        self._moved = False
        """Something has happened to a replica since it was looked whether all are done."""

    def is_done(self) -> bool:
        """Tell whether everybody who is here has the last version."""
        if self.latest != self.cluster.versions or not self._moved or self.agenda.now < self._until_s:
            return False
        self._moved = False
        return all(not each.here or each.version == self.latest for each in self.others)

    def stuck(self) -> int:
        """Return how many updates are under way while nothing has come for very long."""
        waiting = [each.update.asked_s for each in self.others if each.update is not None]
        if not waiting or self.agenda.now < max(self.network.came_at, min(waiting)) + STUCK_S:
            return 0
        return len(waiting)

    # The control plane.

    def longer(self, seconds: float) -> float:
        """Add what chance adds to a time of the control plane."""
        jitter = self.control.jitter
        return seconds * (1 + jitter * self.rng.random()) if jitter else seconds

    def say(self, rank: ShardNode, heard: Callable[[], None]) -> None:
        """A shard says a command; `heard` happens where its outcome is heard."""
        away_s = self.fabric.control_delay_s(rank.seat)
        takes_s = self.control.command_s * self._share
        hears_s = away_s + self.longer(self.control.log_s)
        self.agenda.after(
            away_s, lambda: self._registry.serve(lambda: takes_s, lambda: self.agenda.after(hears_s, heard))
        )

    def open(self, reader: ShardNode, number: int, share: Share, version: int) -> None:
        """Ask a source for a lease, and open the transport."""
        asked = self.ranks[share.source]
        takes_s = 4 * self.fabric.delay_s(reader.seat, asked.seat) + self.longer(self.control.open_s)
        self.agenda.after(takes_s, lambda: asked.grant(reader, number, version, share.nbytes))

    def beat(self) -> None:
        """Let all agents say who reads from them."""
        for rank in self.ranks.values():
            said = rank.beat() if rank.alive else None
            if said is not None:
                self.planning.hear(said)
        if not self.agenda.is_empty:
            self.agenda.after(BEAT_S, self.beat)

    def is_coming(self, rank: ShardNode, version: int) -> bool:
        """Tell whether a shard was decided to read this version, and has not begun."""
        replica = rank.replica
        assert replica is not None
        return replica.update is not None and replica.update.version == version and rank.transfer is None

    # What happens.

    def publish(self, version: int, due_s: float) -> None:
        """Let the trainer overwrite what it holds as soon as no replica reads it, and publish."""
        busy = [rank for trainer in self.trainers for rank in trainer.ranks if rank.readers]
        for trainer in self.trainers:
            for rank in trainer.ranks:
                rank.serves = False
        if busy and self.agenda.now < due_s + DRAIN_S_MAX:
            busy[0].idle = lambda: self.agenda.after(0.0, lambda: self.publish(version, due_s))
            return
        self.result.trainer_stall_s += self.agenda.now - due_s
        for trainer in self.trainers:
            for rank in trainer.ranks:
                rank.drop_readers()
        self.say(self.trainers[0].ranks[0], lambda: self._published(version))

    def _published(self, version: int) -> None:
        self.latest = version
        for trainer in self.trainers:
            trainer.hold(version)
        self.result.published_s.append(self.agenda.now)
        self._decisions += 1
        for replica in self.others:
            if not replica.here or replica.update is not None:
                continue
            self._on_version(replica)
        if version < self.cluster.versions:
            due_s = self.agenda.now + self.cluster.every_s
            self.agenda.at(due_s, lambda: self.publish(version + 1, due_s))

    def _on_version(self, replica: Replica) -> None:
        """One replica hears of a version."""
        match self.cluster.update:
            case "at-boundary" if not self._is_seed(replica):
                assert self.latest is not None
                stops_s = generation.stops_after_s(self.cluster, replica.kind, replica.number, self.latest)
                life = replica.life
                self.agenda.after(stops_s, lambda: self.want(replica, self.agenda.now, life))
            case "behind-a-seed" if self._waits_for_seed(replica):
                pass
            case _:
                self._decide(replica, self._decisions, self.agenda.now)

    def _is_seed(self, replica: Replica) -> bool:
        return self.cluster.replicas[replica.kind].memory_host

    def _waits_for_seed(self, replica: Replica) -> bool:
        """Tell whether a replica waits for a copy in its site; where no seed stands, or it has it, it reads at once."""
        site = self.cluster.replicas[replica.kind].site
        if self._seeded.get(site) == self.latest:
            return False
        seeds = (each for each in self.cluster.replicas.values() if each.memory_host)
        return not self._is_seed(replica) and any(each.site == site for each in seeds)

    def again(self, replica: Replica, asked_s: float) -> None:
        """A replica's round has failed: it asks again."""
        life = replica.life
        self.agenda.after(AGAIN_S, lambda: self.want(replica, asked_s, life))

    def want(self, replica: Replica, asked_s: float, life: int) -> None:
        """A replica asks for the latest version; all its shards do. One that has vanished since asks for nothing."""
        if life != replica.life:
            return
        joins = [len(replica.ranks)]

        def joined() -> None:
            joins[0] -= 1
            if not joins[0] and life == replica.life and replica.update is None and replica.version != self.latest:
                self._decisions += 1
                self._decide(replica, self._decisions, asked_s)

        for rank in replica.ranks:
            self.say(rank, joined)

    def _decide(self, replica: Replica, decided: int, asked_s: float) -> None:
        assert self.latest is not None
        replica.fetch(self.latest, ReadPriority(decided, self.replicas.index(replica)), asked_s)

    def ready(self, replica: Replica, update: Update) -> None:
        """A replica holds a version."""
        self._moved = True
        site = self.cluster.replicas[replica.kind].site
        if self._is_seed(replica) and self._seeded.get(site) != update.version:
            self._seeded[site] = update.version
            self._decisions += 1
            for other in self.others:
                waits = other.here and other.update is None and other.version != self.latest
                if waits and self.cluster.replicas[other.kind].site == site and not self._is_seed(other):
                    self._decide(other, self._decisions, self.agenda.now)
        if replica.here and update.version != self.latest:
            self._on_version(replica)

    def goes(self, replica: Replica) -> None:
        """An instance vanishes; the log hears of it later."""
        if not replica.here:
            return
        self._moved = True
        replica.vanish()
        life = replica.life

        def lost() -> None:
            if replica.life == life:
                for rank in replica.ranks:
                    self.planning.gone(rank.seat)

        self.agenda.after(LOST_AFTER_S, lost)

    def comes(self, replica: Replica) -> None:
        """An instance begins, and asks for the latest version."""
        if replica.here:
            return
        self._moved = True
        replica.come()
        for rank in replica.ranks:
            self.planning.gone(rank.seat)
        if self.latest is not None:
            self.want(replica, self.agenda.now, replica.life)


def pieces_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the bytes of a shard's pieces."""
    if cluster.model.piece_bytes is not None:
        return cluster.model.piece_bytes
    shard = max(round(cluster.model.gbytes * GBYTE / cluster.model.shards), 1)
    piece = max(int(cluster.model.piece_mib * (1 << 20)), 1)
    count = min(-(-shard // piece), PIECES_MAX)
    return tuple(shard * (i + 1) // count - shard * i // count for i in range(count))


STEPS_MAX: Final = 100_000_000
"""A run that needs more is given up."""

TELL_STEPS: Final = 4_096


def run(world: ClusterRun, tell: Callable[[int, int], None] | None = None) -> Result:
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


def _plan_moves(world: ClusterRun) -> None:
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
