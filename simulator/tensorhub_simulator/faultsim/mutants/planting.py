"""Planted bugs: known ways to get it wrong, put into the production cores to show that the simulator finds them.

Each is a method or a function replaced while the bug is switched on; the cores themselves know nothing of it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import Probed
from tensorhub_agent.core.operations.drain import DrainOperation
from tensorhub_agent.core.operations.read import ReadOperation, ReadStage
from tensorhub_agent.core.operations.reclaim import MemoryReclaim
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.transfer import balancing
from tensorhub_agent.transfer.source_pool import SourcePool
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.catalog import retention
from tensorhub_common.protocol import plans
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.log.commands import Drained
from tensorhub_common.protocol.log.events import RoundJoined, VersionPublished
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.faultsim.mutants import agent, layouts, registry
from tensorhub_simulator.faultsim.mutants import agent as mutants_agent
from tensorhub_simulator.faultsim.mutants import layouts as mutants_layouts
from tensorhub_simulator.faultsim.mutants.replacement import Owner, Replacement
from tensorhub_simulator.faultsim.nodes.registry import RegistryNode
from tensorhub_simulator.faultsim.transfers.source_session import ReadSession

NEWEST: Final = "newest"


def _no_drain() -> list[Replacement]:
    """Unpublish neither waits for the readers nor breaks their leases."""

    def on_event(self: Any, event: Any, now: float) -> None:
        key = self.core.key
        if event.by is None:
            return
        if event.by == self._unpublish_by and self._drained_by is None:
            self._drained_by = self.core.append_command(Drained(model=key.model, replica=key.replica, shard=key.shard))
        elif event.by == self._drained_by:
            self.core.set_memory(MemoryState.EMPTY)
            self.drained(now)

    return [Replacement(DrainOperation.on_event, on_event)]


def _latest_per_shard() -> list[Replacement]:
    """Each shard reads what was the latest when it asked, whatever was decided for all."""
    take, answer = AgentCore.on_event, ReadOperation._on_answer
    decided, all_here = ReadOperation._decided, ReadOperation._all_here

    def on_event(self: AgentCore, event: Any, now: float) -> Any:
        if isinstance(event, VersionPublished):
            for core in self.shards.values():
                setattr(core, NEWEST, event)
        return take(self, event, now)

    def on_answer(self: Any, event: Any, now: float) -> None:
        if isinstance(event, RoundJoined) and event.by == self._round.want_by:
            self.mine = getattr(self.core, NEWEST, None)
        answer(self, event, now)

    def decide(self: Any, event: Any, now: float) -> None:
        self.claims = (event.version, event.roots[self.core.key.shard])
        if self.call.want == "latest" and self.mine is not None:
            event = msgspec.structs.replace(event, version=self.mine.version, roots=self.mine.roots)
        decided(self, event, now)

    def claim(self: Any, transfer: Any, now: float) -> None:
        transfer.version, transfer.root = self.claims
        all_here(self, transfer, now)

    return [
        Replacement(AgentCore.on_event, on_event),
        Replacement(ReadOperation._on_answer, on_answer),
        Replacement(ReadOperation._decided, decide),
        Replacement(ReadOperation._all_here, claim),
    ]


def _digest_not_checked() -> list[Replacement]:
    """A reader believes the source's list of digests, and does not look at what came."""

    def vouched(self: Verification, digests: bytes) -> bool:
        self.digests = digests
        return len(digests) == len(self.done) * PIECE_DIGEST_BYTES

    def count(self: Verification, ranges: Iterable[Range], _digests: bytes) -> list[Range]:
        self.confirmed(ranges)
        return []

    return [Replacement(Verification.vouched, vouched), Replacement(Verification.count, count)]


def _second_writer() -> list[Replacement]:
    """What a lost source had under way is asked for elsewhere before the source is closed."""
    lost = Transfer.lost

    def lose(self: Transfer, number: int, reason: str, now: float) -> None:
        lost(self, number, reason, now)
        self.closed(number, now)

    return [Replacement(Transfer.lost, lose)]


def _late_receive() -> list[Replacement]:
    """A source is said to be closed before its receives are: its pieces are asked for elsewhere too early."""

    def close(self: Any) -> None:
        if not self.closing:
            self.closing = True
            self.receives.forget()
            self.clock.after(0.0, self.reader, self._gone, self.reader_life)

    return [Replacement(ReadSession.close, close)]


def _close_waits() -> list[Replacement]:
    """A transport's close waits until its peer answers, so a source that is stopped for ever holds the call up."""

    def close(self: Any) -> None:
        away = not self.is_local and (self.is_cut or not self.source.runs)
        if away:
            self.clock.after(0.1, self.reader, self.close, self.reader_life)
        elif not self.closing:
            self.closing = True
            self.clock.after(self.reader.lag(), self.reader, self._closed, self.reader_life)

    return [Replacement(ReadSession.close, close)]


def _window_hogged() -> list[Replacement]:
    """The window is one for all sources: one that has stopped with all of it under way keeps the others waiting."""

    def fill(source: Any, sizes: Any, share_bytes: int, room_bytes: int, **_relayed: Any) -> Iterator[Any]:
        while source.queue and room_bytes > 0:
            ranges, nbytes = source.cut_batch(sizes, share_bytes, relayed=False)
            room_bytes -= nbytes
            yield ranges, nbytes

    return [Replacement(balancing.fill_window, fill)]


def _outcome_twice() -> list[Replacement]:
    """A registry that was restarted publishes what it folds without looking at what stands in the log."""
    request = RegistryNode._requests

    def learn_end(self: Any, term: int) -> None:
        if self.term == term:
            self._knows_end = True
            self._speak()

    def requests(self: Any, publication: Any, life: int, *, as_batch: bool) -> Any:
        if self.life > 1:
            publication = msgspec.structs.replace(publication, expected=None)
        return request(self, publication, life, as_batch=as_batch or self.life > 1)

    return [Replacement(RegistryNode._learn_end, learn_end), Replacement(RegistryNode._requests, requests)]


def _swap_per_shard() -> list[Replacement]:
    """A staged shard swaps when it is filled itself, and does not wait for its siblings."""

    def on_filled(self: Any, event: Any) -> None:
        digests = self._driver.digests
        self._target.stand(event.version, event.root, digests, swap=self.core.spec.staged)

    return [Replacement(ReadOperation._on_filled, on_filled)]


def _mapped_not_waited_for() -> list[Replacement]:
    """A process that maps the memory is found, and taken for gone."""
    take = MemoryReclaim.on_outcome

    def on_outcome(self: MemoryReclaim, outcome: Any, now: float) -> None:
        take(self, msgspec.structs.replace(outcome, lent=False) if isinstance(outcome, Probed) else outcome, now)

    return [Replacement(MemoryReclaim.on_outcome, on_outcome)]


def _partial_serves_all() -> list[Replacement]:
    """A half-filled replica says that it has everything as soon as it is being filled."""
    prove = LeaseTable.pieces_available

    def claim(self: LeaseTable, key: Any, pieces: Any) -> list[str]:
        coming = self.coming.get(key)
        return prove(self, key, pieces if coming is None or coming.has is None else [(0, len(coming.has))])

    return [Replacement(LeaseTable.pieces_available, claim)]


def _wait_cycle() -> list[Replacement]:
    """Half-filled replicas read from each other whatever their turns are."""

    def has_priority(_source: Any, reader: Any) -> bool:
        return reader is not None

    return [Replacement(plans.has_priority, has_priority)]


def _promise_kept() -> list[Replacement]:
    """A shard goes on promising what it waits for itself since its own source of it went."""
    return [Replacement(SourcePool.awaiting_others, lambda _self: [])]


def _promises_all() -> list[Replacement]:
    """A shard promises whatever it reads, from whomever."""

    def firm(self: SourcePool) -> list[Range]:
        given = [run for source in self.by_number.values() for place in source.places() for run in place]
        return [*self.loose, *given]

    return [Replacement(SourcePool.committed, firm), Replacement(SourcePool.awaiting_others, lambda _self: [])]


def _other_units_promised() -> list[Replacement]:
    """A shard that is filled by one program tells a reader of another one of its units, as if they were the same."""
    grant: Callable[..., Any] = LeaseTable._grant_coming

    def take(self: Any, coming: Any, ask: Any, *rest: Any) -> Any:
        if ask.program is None or coming.units is None:
            return grant(self, coming, ask, *rest)
        answer = grant(self, coming, msgspec.structs.replace(ask, program=coming.units.program), *rest)
        return msgspec.structs.replace(answer, program=ask.program) if isinstance(answer, LeaseGrant) else answer

    return [Replacement(LeaseTable._grant_coming, take)]


def _readers_kept() -> list[Replacement]:
    """A shard whose round is decided anew for the same version keeps its readers, though its turn is later by then."""
    decided = ReadOperation._decided

    def decide(self: Any, event: Any, now: float) -> None:
        key, table = self.core.key, self.core.table
        kept = table.coming.pop(key, None)
        if kept is not None and (kept.version, kept.root) != (event.version, event.roots[key.shard]):
            table.coming[key], kept = kept, None
        decided(self, event, now)
        if kept is not None:
            table.coming[key] = kept

    return [Replacement(ReadOperation._decided, decide)]


def _retention_counts_spot() -> list[Replacement]:
    """A copy on a replica that may vanish is taken for one that counts."""

    def counts(_catalog: Any, replica: Any, version: int) -> bool:
        return bool(replica.version == version)

    return [Replacement(retention.counts_as_copy, counts)]


def _retention_counts_draining() -> list[Replacement]:
    """A copy that drains is taken for one that counts."""

    def counts(_catalog: Any, replica: Any, version: int) -> bool:
        members = replica.members.values()
        whole = len(members) == replica.shards and all(shard.version == version for shard in members)
        return whole and not replica.spot

    return [Replacement(retention.counts_as_copy, counts)]


def _superseded_as_newer() -> list[Replacement]:
    """What was read of an overtaken version is taken for the beginning of the newer one, and committed as that."""
    decided = ReadOperation._decided

    def go_on(self: Any, event: Any, now: float) -> None:
        transfer = self.transfer
        if self.stage is ReadStage.FILLING and transfer is not None and transfer.version < event.version:
            transfer.version, transfer.root = event.version, event.roots[self.core.key.shard]
            self._round.attempt = event.attempt
            self._round.granted()
            return
        decided(self, event, now)

    return [Replacement(ReadOperation._decided, go_on)]


BUGS: Final[dict[str, Callable[[], list[Replacement]]]] = {
    "no-drain": _no_drain,
    "latest-per-shard": _latest_per_shard,
    "digest-not-checked": _digest_not_checked,
    "second-writer": _second_writer,
    "late-receive": _late_receive,
    "close-waits": _close_waits,
    "window-hogged": _window_hogged,
    "outcome-twice": _outcome_twice,
    "retention-counts-spot": _retention_counts_spot,
    "retention-counts-draining": _retention_counts_draining,
    "superseded-as-newer": _superseded_as_newer,
    "partial-serves-all": _partial_serves_all,
    "wait-cycle": _wait_cycle,
    "promise-kept": _promise_kept,
    "promises-all": _promises_all,
    "other-units": _other_units_promised,
    "readers-kept": _readers_kept,
    "swap-per-shard": _swap_per_shard,
    "mapped-not-waited-for": _mapped_not_waited_for,
    "values-without-a-drain": mutants_agent.values_without_a_drain,
    "values-over-a-drain": mutants_agent.values_over_a_drain,
    "lease-not-asked": mutants_agent.lease_not_asked,
    "digests-of-the-next": mutants_agent.digests_of_the_next,
    "ticket-twice": mutants_agent.ticket_twice,
    "incarnation-ignored": mutants_agent.incarnation_ignored,
    "ready-before-all": mutants_agent.ready_before_all,
    "filled-forgotten": mutants_agent.filled_forgotten,
    "patch-not-judged": mutants_agent.patch_not_judged,
    "turns-forgotten": mutants_agent.turns_forgotten,
    "change-not-switched": mutants_agent.change_not_switched,
    "unpublish-forgotten": mutants_agent.unpublish_forgotten,
    "release-forgotten": mutants_agent.release_forgotten,
    "units-as-pieces": mutants_layouts.units_as_pieces,
    "units-shown-early": mutants_layouts.units_shown_early,
    "tensor-stands-early": mutants_layouts.tensor_stands_early,
    "foreign-view": mutants_layouts.foreign_view,
    "foreign-units-taken": mutants_layouts.foreign_units_taken,
    "root-of-another": mutants_layouts.root_of_another,
    "values-before-amax": layouts.values_before_amax,
    "fold-lacks-a-part": layouts.fold_lacks_a_part,
    "table-of-another-read": layouts.table_of_another_read,
    "gives-up-early": mutants_agent.gives_up_early,
    "drains-for-ever": mutants_agent.drains_for_ever,
    "place-kept": mutants_agent.place_kept,
    "refused-kept": agent.refused_kept,
    "lane-leaves-out": agent.lane_leaves_out,
    "counts-unkept": agent.counts_unkept,
    "given-up-kept": agent.given_up_kept,
    "locks-not-taken": agent.locks_not_taken,
    **registry.BUGS,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Switch a bug on."""
    replacements = BUGS[name]() if name is not None else []
    found = [(*place, each.right, each.wrong) for each in replacements for place in each.places()]
    try:
        for owner, attribute, _, wrong in found:
            _put(owner, attribute, wrong)
        yield
    finally:
        for owner, attribute, right, _ in found:
            _put(owner, attribute, right)


def _put(owner: Owner, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
