"""All sources of one read, and the pieces that are with none of them: who brings what, and who is left. Pure.

Always true: a piece that is missing is loose or with one source; what a source has under way is loose again only once
that source is closed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent.ceding import Ceded, cede
from tensorhub_agent.folding import Folding
from tensorhub_agent.meter import Meters
from tensorhub_agent.proof import Proof
from tensorhub_agent.ranges import count_of, mark, merged, split, take_first
from tensorhub_agent.reading import OPENING_MAX, Reading, SourcePhase
from tensorhub_agent.sharing import check, feed, fill, share_out, too_slow
from tensorhub_agent.trial import NO_FASTER, Trial
from tensorhub_agent.trust import Trust
from tensorhub_common.folds import Folds
from tensorhub_common.wire.transfer import SHARES_MAX, Plan, Range, Share, SourceId

RELAYED_BYTES: Final = 8 * 1024 * 1024
"""A source is asked for its word on so much at a time, where others wait for what it brings."""

RELAYED_FAR_BYTES: Final = 1024 * 1024
"""The same for one in another site: its line is thin, and the whole site waits."""

SLOW_CLOSED_MAX: Final = 4
"""So many sources are closed for being slow in one read."""


@dataclass(slots=True)
class Todo:
    """What a read wants of its driver now."""

    plan: tuple[tuple[Range, ...], tuple[SourceId, ...]] | None = None
    open: list[tuple[int, Share]] = field(default_factory=list)
    post: list[tuple[int, int, tuple[Range, ...]]] = field(default_factory=list)
    confirm: list[int] = field(default_factory=list)
    close: list[int] = field(default_factory=list)
    fold: list[tuple[int, tuple[Range, ...], tuple[Range, ...]]] = field(default_factory=list)
    """Partials of a source that count now, and scales that follow: (source, partials, scales); comes before `post`."""
    ceded: list[Ceded] = field(default_factory=list)
    """Of what would be this reader's to bring over to its site, what a mate brings over from now on."""
    proven: list[Range] = field(default_factory=list)
    """Pieces that stand in the destination, verified: others may read them there."""


def relayed_bytes(share: Share) -> int:
    """Return on how much a source is asked for its word at a time, where others wait for what it brings."""
    return RELAYED_FAR_BYTES if share.far else RELAYED_BYTES


def everything(_: Share) -> bytearray | None:
    """Say of a source of the reader's own layout that it has every piece."""
    return None


def nothing(_: Share) -> bytearray | None:
    """Say of a source of the reader's own layout that it computes no piece of parts of blocks."""
    return None


class Readings:
    """The sources of a read whose shard has pieces of these sizes."""

    def __init__(
        self,
        nbytes: Sequence[int],
        proof: Proof,
        *,
        window_bytes: int,
        first_number: int,
        able: Callable[[Share], bytearray | None],
        by_amax: Callable[[Share], bytearray | None] = nothing,
        folds: Folds | None = None,
    ) -> None:
        """Begin with no source; `able` returns marks of the pieces that a share's source has or will have.

        `by_amax` returns marks of those that it computes of parts of blocks; `folds` says what these need.
        """
        self.by_number: dict[int, Reading] = {}
        self.folding = Folding(folds, len(nbytes))
        self.loose = self.folding.apart(proof.missing())[1]
        """What is missing, and no source is to bring."""
        self._to_open: list[Reading] = []
        """Sources that wait for their turn to be opened, and some that were given up meanwhile."""
        self.todo = Todo()
        self.trust, self.trial, self.meters = Trust(), Trial(), Meters()
        self.uncrossed: dict[SourceId, None] = {}
        """Who does not bring over to the site what would be its part."""
        self.crossers: tuple[SourceId, ...] = ()
        """Those of the site, this reader among them, over whom the first plan has shared out what crosses."""
        self.asks_for_inherited = False
        """The question that is out is for what a mate has ceded: that is this reader's part, whoever's it was."""
        self._inherited = bytearray(len(nbytes))
        """Marks of what a mate has ceded to this reader, and no source here could bring."""
        self.next_number = first_number
        """The first number that no source and no batch of this read has."""
        self._nbytes, self._window_bytes, self._able, self._by_amax = nbytes, window_bytes, able, by_amax
        self._proof = proof
        proof.optional = self.folding.partials
        self._slow_closed = 0

    # Who there is.

    def open_one(self, number: int) -> Reading | None:
        """Return the source of this number if it is open."""
        source = self.by_number.get(number)
        return source if source is not None and source.phase is SourcePhase.OPEN else None

    @property
    def quiet(self) -> bool:
        """Whether no byte can be written into the destination any more.

        What a source has flying is forgotten only when it has answered for it or is closed.
        """
        return all(not source.flying for source in self.by_number.values())

    @property
    def is_settled(self) -> bool:
        """Whether the leases are there: of a group's crossers one may come late, as long as anybody is open."""
        sources = [source for source in self.by_number.values() if source.phase is not SourcePhase.CLOSED]
        late = [source for source in sources if source.phase is SourcePhase.OPENING and source.share.crosses]
        rest = [source for source in sources if source not in late]
        return all(source.phase is SourcePhase.OPEN for source in rest) and (bool(rest) or not late)

    def left_out(self) -> tuple[SourceId, ...]:
        """Return whom a plan is to name no more, or not now."""
        return (*self.trust.left_out(), *self.trial.avoid)

    def firm(self) -> list[Range]:
        """Return what is under way, or waits its turn at a source that has it: nobody else has to get it first."""
        open_ = [source for source in self.by_number.values() if source.phase is SourcePhase.OPEN]
        flying = [run for source in open_ for ranges, _ in source.flying.values() for run in ranges]
        come = [run for source in open_ for run in source.unconfirmed]
        return [*flying, *come, *(run for source in open_ for run in source.queue)]

    def awaited(self) -> list[Range]:
        """Return what waits for others to get it."""
        return [run for source in self.by_number.values() for run in source.parked]

    def exist(self, pieces: Sequence[Range]) -> bool:
        """Tell whether these are pieces of this shard, whatever a source says."""
        return all(first >= 0 and 0 < count <= len(self._nbytes) - first for first, count in pieces)

    def check(self, done: bytearray) -> None:
        """Raise AssertionError unless each piece that is not done is in exactly one place."""
        check(done, self.loose, self.by_number.values(), self.folding.places())
        for source in self.by_number.values():
            assert source.flying_bytes == sum(nbytes for _, nbytes in source.flying.values()), source.number

    def check_fed(self) -> None:
        """Raise AssertionError when a source has nothing under way though it could."""
        for source in self.by_number.values():
            starved = source.is_ready and source.queue and not source.flying and not source.checking
            assert not starved, f"source {source.number} has pieces to bring, and is asked for none"

    # Who brings what.

    def spread(self, plan: Plan, now: float) -> bool:
        """Give the loose pieces to the plan's sources; what the plan left out stays loose. False: it gave none."""
        before = count_of(self.loose)
        self.crossers = self.crossers or plan.crossers
        given, self.loose = self.folding.spread(plan, self.loose, len(self._nbytes))
        for share, ranges in given:
            for stream in range(share.streams):
                part = take_first(ranges, -(-count_of(ranges) // (share.streams - stream)))
                can = part and not self.trust.has_failed(share.source)
                source = self._source_of(share, stream, now) if can else None
                if source is None:
                    self.loose.extend(part)
                else:
                    source.give(part)
        self._follow()
        return not before or count_of(self.loose) < before

    def _source_of(self, share: Share, stream: int, now: float) -> Reading | None:
        """Return the live source that is a share's stream, or open it; None where more can't be open."""
        live = [source for source in self.by_number.values() if source.is_live]
        wanted = (share.source, share.transport, share.crosses, stream)
        for source in live:
            known = source.share
            if (known.source, known.transport, known.crosses, source.stream) == wanted:
                return source
        if len(live) >= SHARES_MAX:
            return min((source for source in live if source.able is None), key=lambda each: each.waiting, default=None)
        source = Reading(self.next_number, share, SourcePhase.OPENING, now, able=self._able(share), stream=stream)
        source.partials, source.unknown = self.folding.partials, self.folding.unknown
        source.by_amax = self._by_amax(share)
        source.pace.is_trusted = self.trust.has_forgiven(share.source)
        source.meter = self.meters.of(share)
        self.next_number += 1
        self.by_number[source.number] = source
        source.is_asked = False
        self._to_open.append(source)
        return source

    def open(self, now: float) -> None:
        """Open sources whose turn it is."""
        if not self._to_open:
            return
        opening = [each for each in self.by_number.values() if each.phase is SourcePhase.OPENING and each.is_asked]
        # One that crosses may be late for reasons of its own, so nobody waits behind it.
        room = OPENING_MAX - sum(1 for each in opening if not each.share.crosses)
        waiting, self._to_open = self._to_open, []
        for source in waiting:
            if source.phase is not SourcePhase.OPENING:
                continue
            if room <= 0 and not source.share.crosses:
                self._to_open.append(source)
                continue
            source.is_asked, source.since, source.fed = True, now, now
            self.todo.open.append((source.number, source.share))
            room -= not source.share.crosses

    def share_out(self, *, is_told: bool) -> bool:
        """Give what is loose to those that there are; tells whether they take all of it.

        `is_told`: a planner has said that nobody else has it; without its word nobody says who has it computed already.
        """
        others = [source for source in self.by_number.values() if source.is_live]
        if others:
            share_out(self.loose, others)
        if others and self.loose and not is_told:
            self.loose += self.folding.wake(self.loose)
            self._follow()
            share_out(self.loose, others)
        return bool(others) and not self.loose

    # Folds.

    def folded(self, number: int, partials: Sequence[Range]) -> None:
        """Count partials of a source, and the scales that follow; ask for what has waited for them."""
        scales, is_known = self.folding.folded(partials)
        self._fold(number, partials, scales)
        for source in self.by_number.values() if is_known else ():
            source.freed()

    def _follow(self) -> None:
        """Leave scales that nobody brings to their folds; some of these may be known."""
        self.loose, known = self.folding.follow(self.loose)
        if known:
            self._fold(0, (), known)

    def _fold(self, number: int, partials: Sequence[Range], scales: Sequence[Range]) -> None:
        self.todo.fold.append((number, tuple(partials), tuple(scales)))
        self._proof.confirmed([*partials, *scales])
        self.todo.proven.extend(scales)

    def wake(self) -> None:
        """Want the partials without which sources can't be asked for what was given to them."""
        for source in self.by_number.values():
            if source.fresh_gated:
                self.loose += self.folding.wake(source.fresh_gated)
                source.fresh_gated.clear()

    def give_up_folds(self) -> None:
        """Let partials sleep that nobody has, so that the next plan may do without them."""
        partials, others = self.folding.apart(self.loose)
        if partials:
            scales, values = self.folding.sleep(partials)
            back = [run for source in self.by_number.values() for run in source.give_back(values)]
            self.loose = merged([*others, *scales, *back])

    def doubted(self, source: Reading, given_up: Sequence[Range]) -> None:
        """Have others bring over what a source does not: it is good for what it has."""
        if given_up:
            self.uncrossed[source.share.source] = None
            self.loose.extend(given_up)

    def inherit(self, source: Reading, pieces: Sequence[Range]) -> None:
        """Bring over what a mate has ceded to this reader, from where it can be had, or once that is planned."""
        mine = source.retracts(pieces)
        share_out(mine, [each for each in self.by_number.values() if each.share.far and each.is_live])
        mark(self._inherited, mine)
        self.loose.extend(mine)

    def await_heir(self, source: Reading, pieces: Sequence[Range], heir: SourceId) -> None:
        """Wait at the heir for what a mate has ceded to it."""
        given_up = source.retracts(pieces)
        crossing = (each for each in self.by_number.values() if each.is_live and each.share.crosses)
        waits_at = next((each for each in crossing if each.share.source == heir), None)
        if waits_at is not None:
            waits_at.give(given_up)
        else:
            # The mate itself finds out that the heir is gone, or brings what it gets from there.
            self.loose.extend(given_up)

    def cede(self, began: float, now: float) -> None:
        """Hand over to mates what would take a slow far source too long."""
        self.todo.ceded += cede(list(self.by_number.values()), self._nbytes, began, now)

    def to_be_planned(self) -> tuple[Range, ...]:
        """Return for what a plan is asked next: what was inherited by itself, for it is divided otherwise."""
        self.loose = merged(self.loose)
        mine = split(self._inherited, self.loose)[0]
        self.asks_for_inherited = bool(mine)
        return tuple(mine) or self.folding.choice(self.loose)

    def lose_agent(self, agent: str, incarnation: int) -> None:
        """Take note that the log has lost an agent: who is silent there is not waited for much longer."""
        for source in self.by_number.values():
            if source.share.source.agent == agent and source.share.source.incarnation <= incarnation:
                source.is_lost = True

    def pump(self, now: float, *, is_asking: bool, is_relayed: bool) -> None:
        """Ask every source for as much as its part of the window allows, and idle ones for what others have waiting.

        `is_asking`: a question for a plan is out; `is_relayed`: others wait for what comes here.
        """
        sources = list(self.by_number.values())
        in_vain = self.trial.look(sources, self.loose, self._nbytes, now, asks=is_asking)
        if in_vain is not None:
            in_vain.lost = NO_FASTER
            self.close(in_vain)
        feed(sources, self.loose)
        if not any(source.queue or source.unconfirmed for source in sources):
            return
        busy = sum(1 for source in sources if source.phase is SourcePhase.OPEN and (source.queue or source.flying))
        share_bytes = self._window_bytes // max(busy, 1)
        room_bytes = self._window_bytes - sum(source.flying_bytes for source in sources)
        for source in sources:
            if not source.is_ready:
                continue
            for ranges, nbytes in fill(source, self._nbytes, share_bytes, room_bytes, relayed=is_relayed):
                source.asked(self.next_number, ranges, nbytes, now)
                self.todo.post.append((source.number, self.next_number, ranges))
                self.next_number += 1
                room_bytes -= nbytes
            if source.unconfirmed and not source.checking:
                self._ask_for_word(source, now, is_relayed=is_relayed)

    def _ask_for_word(self, source: Reading, now: float, *, is_relayed: bool) -> None:
        """Ask whether the lease held, when all has come; where others wait for it, on the way too."""
        if not source.queue and not source.flying:
            source.confirming, source.since = True, now
            self.todo.confirm.append(source.number)
        elif source.owed or (is_relayed and source.unconfirmed_bytes >= relayed_bytes(source.share)):
            source.check_early()
            self.todo.confirm.append(source.number)

    # Who is left.

    def began(self, now: float) -> None:
        """Expect of all sources from now on that they bring something."""
        for source in self.by_number.values():
            source.since = source.fed = now

    def paused(self, late_s: float, now: float) -> None:
        """Take a pause of this process out of what its sources are silent for."""
        for source in self.by_number.values():
            source.since, source.fed = min(source.since + late_s, now), min(source.fed + late_s, now)
        self.meters.paused(late_s, now)

    def doubt(self, source: Reading) -> None:
        """Leave a source out whose bytes were wrong, once it has said whether that is its fault."""
        if source.phase is SourcePhase.OPEN and not source.doubted:
            source.doubted = source.confirming = True
            self.trust.fail(source.share.source)
            self.todo.confirm.append(source.number)

    def leave(self, source: Reading, reason: str) -> None:
        """Close a source that may be good for something later."""
        if source.phase is SourcePhase.OPENING:
            self.trust.fail(source.share.source)
        elif not source.doubted:
            self.trust.suspect(source.share.source)
        source.lost = reason
        self.close(source)

    def leave_slow(self, now: float) -> None:
        """Close a source whose pieces an idle one brings much sooner; one at a time."""
        sources = list(self.by_number.values())
        if self._slow_closed >= SLOW_CLOSED_MAX or self.loose:
            return
        if any(source.slow and source.phase is SourcePhase.CLOSING for source in sources):
            return
        slow = too_slow(sources, now)
        if slow is not None:
            self._slow_closed += 1
            slow.slow = True
            self.leave(slow, "it was slow, and another source had nothing left to bring")

    def close(self, source: Reading) -> None:
        """Want a source closed; what waits at it others may bring at once."""
        source.phase = SourcePhase.CLOSING if source.is_asked else SourcePhase.CLOSED
        source.confirming = False
        self.loose.extend(source.let_all_go())
        if source.is_asked:
            self.todo.close.append(source.number)

    def close_all(self) -> None:
        """Want every source closed that is not yet."""
        for source in self.by_number.values():
            if source.phase in (SourcePhase.OPENING, SourcePhase.OPEN):
                self.close(source)

    def closed(self, source: Reading, now: float) -> None:
        """Nothing more can come from the source: what it had under way others may bring."""
        source.phase = SourcePhase.CLOSED
        if source.flying:
            source.meter.ends(now)
        self.loose.extend(source.give_up())
