"""Mates of a far site in virtual time: real transfers and lease tables; between them a line, and words."""

from collections import deque
from dataclasses import dataclass, field, replace

from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.lease_messages import (
    AvailabilityUpdate,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
)
from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.site_handoff import Handoff
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import Plan, ReadPriority, Share, SourceId
from tensorhub_common.protocol.ranges import Range, Ranges, intersect_ranges, merge_ranges
from tensorhub_planner.planning.wan_fanout import divide
from tensorhub_planner.primitives.piece_sizes import PieceSizes

STEP_S = 0.05
RENEW_S = 1.0
LOST_AFTER_S = 3.0
PIECE_BYTES = 1 << 20
STALL_S = 5.0
FAR = SourceId("far", 1, "trainer", 0)


@dataclass
class Source:
    """One open source of a mate: the far one if `giver` is None, else a mate."""

    number: int
    giver: "Mate | None"
    batches: deque[tuple[int, tuple[Range, ...]]] = field(default_factory=deque)
    brought: float = 0.0
    words: deque[AvailabilityUpdate] = field(default_factory=deque)
    opened: bool = False


class Mate:
    """One replica of the site."""

    def __init__(self, site: "Site", number: int, rate_bps: float) -> None:
        self.site, self.number, self.rate_bps = site, number, rate_bps
        self.id = SourceId(f"agent-{number}", 1, f"rollout-{number}", 0)
        self.key = ShardKey("m", self.id.replica, 0)
        self.transfer = Transfer(
            version=1,
            root=root_digest(site.digests),
            nbytes=[PIECE_BYTES] * site.pieces,
            verify=True,
            limits=site.limits,
            first_number=1,
            now=0.0,
        )
        self.table = LeaseTable()
        self.table.begin_fill(self.key, 1, root_digest(site.digests), ReadPriority(1, number), site.pieces)
        self.table.set_digests(self.key, site.digests)
        self.sources: dict[int, Source] = {}
        self.crossed_bytes = 0
        self.stopped_until = 0.0
        self.is_dead = False

    @property
    def is_done(self) -> bool:
        return self.transfer.phase is TransferPhase.DONE

    def runs(self, now: float) -> bool:
        return not self.is_dead and now >= self.stopped_until

    def act(self, now: float) -> None:
        """Let time pass, and do what the transfer wants."""
        transfer, site = self.transfer, self.site
        for source in self.sources.values():
            while source.words and source.opened:
                self._hear(source, source.words.popleft(), now)
        transfer.tick(now)
        actions = transfer.take_actions()
        if actions.plan is not None:
            transfer.planned(site.plan(self, *actions.plan), now)
        if actions.proven:
            for lease in self.table.pieces_available(self.key, actions.proven):
                site.say(lease, PiecesAvailable(tuple(actions.proven)))
        self._promise(actions.ceded)
        for number, share in actions.open:
            self._open(number, share, now)
        for number, batch, ranges in actions.post:
            self.sources[number].batches.append((batch, ranges))
        for number in actions.close:
            self.sources.pop(number, None)
            transfer.closed(number, now)
        if transfer.phase is TransferPhase.LEASED:
            transfer.start(now)

    def _promise(self, ceded: list[Handoff]) -> None:
        """As `Carrier` does."""
        self.transfer.has_promised_readers = self.table.counts_on_promises(self.key)
        for each in ceded:
            for lease in self.table.cede(self.key, each.pieces):
                self.site.say(lease, PiecesHandedOff(each.pieces, each.new_owner))
        news = self.table.promise(self.key, self.transfer.pool.committed(), self.transfer.pool.awaiting_others())
        for word in () if news is None else (PromiseRetracted(news.broken), PiecesPromised(news.fresh)):
            for lease in news.leases if news is not None and word.pieces else ():
                self.site.say(lease, word)

    def _open(self, number: int, share: Share, now: float) -> None:
        giver = self.site.mate(share.source)
        source = self.sources[number] = Source(number, giver)
        if giver is None:
            source.opened = True
            self.transfer.opened(number, self.site.digests, now)
            return
        if giver.is_dead:
            self.transfer.lost(number, "it is dead", now)
            return
        name = f"{self.number}/{number}/{giver.number}"
        ask = LeaseRequest(
            job="j",
            model="m",
            source=giver.id,
            version=1,
            root=root_digest(self.site.digests),
            reader=self.id,
            turn=ReadPriority(1, self.number),
            promises=True,
        )
        assert isinstance(giver.table.grant(ask, name, name, "here", now), LeaseGrant)
        lease = giver.table.redeem(name, now)
        assert lease is not None
        self.site.hears[name] = source
        source.opened = True
        self.transfer.opened(number, self.site.digests, now, lease.pieces(), promises=True)
        self.transfer.promised(number, lease.promised())

    def _hear(self, source: Source, word: AvailabilityUpdate, now: float) -> None:
        match word:
            case PiecesAvailable():
                self.transfer.available(source.number, word.pieces, now)
            case PiecesPromised():
                self.transfer.promised(source.number, word.pieces)
            case PromiseRetracted():
                self.transfer.retracted(source.number, word.pieces, now)
            case PiecesHandedOff() if word.new_owner == self.id:
                self.transfer.inherited(source.number, word.pieces, now)
            case PiecesHandedOff():
                self.transfer.ceded(source.number, word.pieces, word.new_owner, now)

    def bring(self, now: float) -> None:
        """Let what is under way come: over the line at this mate's rate, in the site at once."""
        for source in list(self.sources.values()):
            is_far = source.giver is None
            source.brought += (self.rate_bps if is_far else 1e12) * STEP_S
            while source.batches:
                batch, ranges = source.batches[0]
                nbytes = total_count(ranges) * PIECE_BYTES
                if source.brought < nbytes or not (is_far or (source.giver and source.giver.runs(now))):
                    break
                source.brought -= nbytes
                source.batches.popleft()
                self.crossed_bytes += nbytes if is_far else 0
                self.transfer.batch_done(source.number, batch, self.site.digests_of(ranges), now)
            if not source.batches:
                source.brought = 0.0


class Site:
    """All mates of a site, behind a line that gives each of them a rate of its own."""

    def __init__(self, rates_bps: list[float], pieces: int, limits: TransferLimits = DEFAULT_LIMITS) -> None:
        self.pieces, self.limits = pieces, replace(limits, window_bytes=64 << 20, sources_lost_s=5.0)
        self._digests = [piece_digest(f"piece {n}".encode()) for n in range(pieces)]
        self.digests = b"".join(self._digests)
        self.sizes = PieceSizes([PIECE_BYTES] * pieces)
        self.hears: dict[str, Source] = {}
        self.mates = [Mate(self, number, rate) for number, rate in enumerate(rates_bps)]
        self.now = 0.0

    @property
    def crossed(self) -> float:
        """How often the whole has crossed."""
        return sum(mate.crossed_bytes for mate in self.mates) / (self.pieces * PIECE_BYTES)

    def mate(self, source: SourceId) -> Mate | None:
        return next((mate for mate in self.mates if mate.id == source), None)

    def digests_of(self, ranges: tuple[Range, ...]) -> bytes:
        return b"".join(self._digests[piece] for first, count in ranges for piece in range(first, first + count))

    def say(self, lease: str, word: AvailabilityUpdate) -> None:
        self.hears[lease].words.append(word)

    def plan(self, me: Mate, pieces: Ranges, avoid: tuple[SourceId, ...]) -> Plan:
        """As the planner divides."""
        crossers = tuple(mate.id for mate in self.mates)
        out = {*avoid, *me.transfer.pool.site_peers.not_bringing} - {me.id}
        if me.transfer.pool.site_peers.asks_for_handoff:
            out = set(crossers) - {me.id}
        parts = {
            each: intersect_ranges(part, merge_ranges(pieces))
            for each, part in divide(crossers, out, self.sizes).items()
        }
        shares = [self._share(FAR if each == me.id else each, part) for each, part in parts.items() if part]
        return Plan(version=1, shares=tuple(shares), why="", crossers=crossers)

    def _share(self, source: SourceId, pieces: Ranges) -> Share:
        return Share(
            source=source,
            transport="ucxx",
            pieces=pieces,
            nbytes=self.sizes.of(pieces),
            why="",
            far=source == FAR,
            crosses=source != FAR,
        )

    def lose(self, gone: Mate) -> None:
        """Have the log say that an agent is lost."""
        for mate in self.mates:
            mate.transfer.pool.lose_agent(gone.id.agent, gone.id.incarnation)

    def kill(self, dead: Mate) -> None:
        """Let all connections of one end."""
        dead.is_dead = True
        for mate in self.mates:
            for source in list(mate.sources.values()):
                if source.giver is dead:
                    mate.transfer.lost(source.number, "its connection ended", self.now)

    def run(self, until_s: float, *, but: tuple[Mate, ...] = ()) -> None:
        """Let time pass until all have everything, or until then."""
        while self.now < until_s and not all(mate.is_done or mate in but for mate in self.mates):
            self.now = round(self.now + STEP_S, 6)
            for mate in self.mates:
                if not mate.runs(self.now):
                    continue
                mate.bring(self.now)
                mate.act(self.now)
                mate.transfer.check()
            if round(self.now / STEP_S) % round(RENEW_S / STEP_S) == 0:
                for lease, source in self.hears.items():
                    giver = source.giver
                    if giver is not None and giver.runs(self.now) and lease in giver.table._leases:
                        source.words.append(PiecesAvailable())
