"""One shard of a replica: drives a production transfer over the modelled network, and serves others from what it has.

What an agent does around a transfer is done here in a few lines: leases are granted to readers of later turns, what is
verified is told of, leases are broken before memory is used again, and a rank that has vanished says nothing.
"""

from typing import TYPE_CHECKING, Final

from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_agent.leases.table import READERS_MAX
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ranges import ranges_of_marks, total_count
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_agent.transports.ucxx.protocol.message_plan import MESSAGE_BYTES_MAX
from tensorhub_common.protocol.heartbeat import Heartbeat, ReaderLoad, ServingLoad
from tensorhub_common.protocol.plans import PlanAnswer, PlanRequest, ReadPriority, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.performance.model.planner import JOB, MODEL, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorhub_simulator.performance.model.cluster import ClusterRun
    from tensorhub_simulator.performance.model.network import Connection
    from tensorhub_simulator.performance.model.replica import Replica
    from tensorhub_simulator.performance.model.topology import GpuPlace

LIMITS: Final = TransferLimits(window_bytes=64 * 1024 * 1024)
"""The window is the default of `TENSORHUB_WINDOW_BYTES`."""

SAY_AGAIN_S: Final = 2.0
"""A beat that says the same as the last is left out for so long: planners count a word for 3 s."""

LIVES_S: Final = 1.0
"""A half-filled source answers a renewal so often, which says that it lives."""


class ShardNode:
    """A GPU with one shard of the weights."""

    def __init__(self, world: "ClusterRun", seat: "GpuPlace") -> None:
        """Hold nothing."""
        self.world, self.seat = world, seat
        self.me = source_of(seat)
        self.replica: Replica | None = None
        self.version: int | None = None
        """What stands here ready."""
        self.transfer: Transfer | None = None
        self.turn: ReadPriority | None = None
        self.alive = True
        self.serves = True
        """New readers are let in."""
        self.readers: dict[tuple[ShardNode, int], int] = {}
        """By reader and the number of its source, what it was planned to read here."""
        self.measured = LinkRates()
        self._said: tuple[float, tuple[ServingLoad, ...]] = (0.0, ())
        self.connections: dict[int, tuple[ShardNode, Connection]] = {}
        self._held: set[int] = set()
        """Sources whose transport waits for its turn."""
        self._waiting: list[tuple[ShardNode, int, int, int]] = []
        self._told: dict[int, float] = {}
        self._plan_number = 0
        self._tick_at = float("inf")
        self._hashed_at = 0.0
        """Until then digests are taken of what has come."""
        self._numbers = 0
        self.leased: Callable[[], None] | None = None
        self.filled: Callable[[], None] | None = None
        self.failed: Callable[[], None] | None = None
        self.idle: Callable[[], None] | None = None

    # Reading.

    def begin(self, version: int, turn: ReadPriority) -> None:
        """Begin to read a version."""
        world = self.world
        self.turn = turn
        self.transfer = Transfer(
            version=version,
            root=world.root,
            nbytes=world.nbytes,
            verify=True,
            limits=LIMITS,
            first_number=self._numbers,
            now=world.agenda.now,
        )
        for reader, number, wanted, nbytes in self._waiting:
            self.grant(reader, number, wanted, nbytes)
        self._waiting.clear()
        self.drive()

    def start(self) -> None:
        """Write from now on: what stood here is gone, and so are its readers."""
        if self.transfer is None:
            return
        self.drop_readers(only_older=True)
        self.version = None
        self.transfer.start(self.world.agenda.now)
        self.drive()

    def drive(self) -> None:
        """Let the transfer get on, and do what it wants."""
        transfer, now = self.transfer, self.world.agenda.now
        if transfer is None or not self.alive:
            return
        transfer.has_downstream_readers = bool(self.readers)
        transfer.tick(now)
        actions = transfer.take_actions()
        if transfer.phase in (TransferPhase.DONE, TransferPhase.FAILED) or actions.plan is not None:
            self.measured.note(transfer.pool.meters.take(now), now)
        self._numbers = max(self._numbers, transfer.pool.next_number)
        if actions.proven:
            self._show(actions.proven)
        if actions.plan is not None:
            self._ask(transfer, *actions.plan)
        for number, share in (*actions.open, *actions.hold):
            self.world.open(self, number, share, transfer.version)
        self._held |= {number for number, _ in actions.hold}
        for number in actions.enter:
            self._enter(transfer, number)
        for number, batch, ranges in actions.post:
            self._post(transfer, number, batch, ranges)
        for number in actions.close:
            self._close(transfer, number)
        self._turn_to(transfer)
        self._plan_tick()

    def _turn_to(self, transfer: Transfer) -> None:
        """Tell the replica how far its shard is."""
        if transfer.phase is TransferPhase.LEASED and self.leased is not None:
            leased, self.leased = self.leased, None
            leased()
        elif transfer.phase is TransferPhase.DONE:
            self._done(transfer)
        elif transfer.phase is TransferPhase.FAILED:
            self.transfer = None
            if self.failed is not None:
                self.failed()

    def _done(self, transfer: Transfer) -> None:
        self.version, self.transfer = transfer.version, None
        if self.filled is not None:
            filled, self.filled = self.filled, None
            filled()

    def _plan_tick(self) -> None:
        due = self.transfer.deadline() if self.transfer is not None else None
        if due is None or due >= self._tick_at:
            return
        self._tick_at = due
        self.world.agenda.at(due, lambda: self._tick(due))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return
        self._tick_at = float("inf")
        transfer = self.transfer
        if transfer is None or not self.alive:
            return
        self._look(transfer)
        self.drive()

    def _look(self, transfer: Transfer) -> None:
        """Pass on what has come of messages under way, and that half-filled sources live."""
        now = self.world.agenda.now
        for number, source in list(transfer.sources.items()):
            if source.phase is not SourcePhase.OPEN or number not in self.connections:
                continue
            upstream, connection = self.connections[number]
            if source.in_flight:
                partial = int(self.world.network.look(connection)) // MESSAGE_BYTES_MAX * MESSAGE_BYTES_MAX
                if partial > source.early_bytes:
                    transfer.progressed(number, partial - source.early_bytes, now)
            elif source.has is not None and upstream.alive and now >= self._told.get(number, 0.0) + LIVES_S:
                self._told[number] = now
                transfer.available(number, (), now)

    def _ask(self, transfer: Transfer, pieces: tuple[Range, ...], avoid: tuple[SourceId, ...]) -> None:
        self._plan_number += 1
        number = self._plan_number
        demand = PlanRequest(
            model=MODEL,
            version=transfer.version,
            replica=self.me.replica,
            shard=self.me.shard,
            agent=self.me.agent,
            root=self.world.root,
            at_seq=0,
            pieces=pieces,
            avoid=avoid,
            turn=self.turn,
            rates=self.measured.told(self.world.agenda.now),
        )

        def answered(answer: PlanAnswer) -> None:
            if self.transfer is transfer and number == self._plan_number:
                transfer.planned(answer, self.world.agenda.now)
                self.drive()

        self.world.planning.ask(self.seat, demand, answered)

    def _post(self, transfer: Transfer, number: int, batch: int, ranges: tuple[Range, ...]) -> None:
        upstream, connection = self.connections[number]
        world = self.world
        delay_s = world.fabric.delay_s(upstream.seat, self.seat)
        nbytes = sum(sum(world.nbytes[first : first + count]) for first, count in ranges)
        takes_s = nbytes / world.digest_bytes_s

        def came() -> None:
            self._hashed_at = max(self._hashed_at, world.agenda.now + delay_s) + takes_s
            world.agenda.at(self._hashed_at + world.control.batch_s, stands)

        def stands() -> None:
            if self.transfer is transfer and self.alive:
                digests = world.digests[: total_count(ranges) * PIECE_DIGEST_BYTES]
                transfer.batch_done(number, batch, digests, world.agenda.now)
                self.drive()

        def sent() -> None:
            if not connection.closed:
                assert upstream.gives(transfer.version, ranges), f"{upstream.me} sends what it does not hold"
                world.network.send(connection, nbytes, came)

        world.agenda.after(delay_s, sent)

    def _close(self, transfer: Transfer, number: int) -> None:
        held = self.connections.pop(number, None)
        world = self.world
        delay_s = 0.0
        if held is not None:
            upstream, connection = held
            world.network.close(connection)
            delay_s = 2 * world.fabric.delay_s(upstream.seat, self.seat)
            upstream.reader_gone(self, number)

        def closed() -> None:
            if self.transfer is transfer:
                transfer.closed(number, world.agenda.now)
                self.drive()

        world.agenda.after(delay_s, closed)

    # Serving.

    def grant(self, reader: "ShardNode", number: int, version: int, nbytes: int) -> None:
        """Let a reader in, or say why not."""
        if not self.alive:
            return
        transfer = self.transfer
        fills = transfer is not None and transfer.version == version
        if not fills and self.version != version and self.world.is_coming(self, version):
            self._waiting.append((reader, number, version, nbytes))
            return
        if not (fills or self.version == version) or not self.serves or len(self.readers) >= READERS_MAX:
            reader.refused(number, version, "the source does not hold it, or has no room")
            return
        self.readers[reader, number] = nbytes
        reader.let_in(self, number, version, self.standing(version))

    def standing(self, version: int) -> "Sequence[Range] | None":
        """Return which pieces of a version stand here; None: all do."""
        if self.version == version:
            return None
        transfer = self.transfer
        if transfer is None or transfer.version != version:
            return ()
        return ranges_of_marks(transfer.verification.done, 0, len(transfer.verification.done))

    def gives(self, version: int, ranges: "Sequence[Range]") -> bool:
        """Tell whether all of these pieces of a version stand here."""
        if self.version == version:
            return True
        transfer = self.transfer
        if transfer is None or transfer.version != version:
            return False
        return all(all(transfer.verification.done[first : first + count]) for first, count in ranges)

    def let_in(self, source: "ShardNode", number: int, version: int, pieces: "Sequence[Range] | None") -> None:
        """Take a granted lease with its open transport."""
        transfer = self.transfer
        if transfer is None or transfer.version != version or not self.alive:
            source.reader_gone(self, number)
            return
        self.connections[number] = (source, self.world.fabric.connect(source.seat, self.seat))
        self._told[number] = self.world.agenda.now
        if number in self._held:
            transfer.held(number, self.world.digests, self.world.agenda.now)
        else:
            transfer.opened(number, self.world.digests, self.world.agenda.now, pieces)
        self.drive()

    def _enter(self, transfer: Transfer, number: int) -> None:
        """Open the transport of a source whose lease is held."""
        source, _ = self.connections[number]
        self._held.discard(number)

        def opened() -> None:
            if self.transfer is transfer and number in self.connections:
                there = source.standing(transfer.version)
                transfer.opened(number, self.world.digests, self.world.agenda.now, there)
                self.drive()

        self.world.agenda.after(2 * self.world.fabric.delay_s(source.seat, self.seat), opened)

    def refused(self, number: int, version: int, reason: str) -> None:
        """Take a refusal, or the news that a lease is broken."""
        transfer = self.transfer
        if transfer is not None and transfer.version == version and self.alive:
            transfer.lost(number, reason, self.world.agenda.now)
            self.drive()

    def reader_gone(self, reader: "ShardNode", number: int) -> None:
        """A reader has ended."""
        self.readers.pop((reader, number), None)
        if not self.readers and self.idle is not None:
            idle, self.idle = self.idle, None
            idle()

    def beat(self) -> Heartbeat | None:
        """Return what this agent says of its readers; None where the planners know that by what it said before."""
        serving = reader_loads(
            ("local" if reader.seat.host == self.seat.host else "ucxx", reader.served_here(nbytes))
            for (reader, _), nbytes in self.readers.items()
        )
        now, (said_at, said) = self.world.agenda.now, self._said
        if said == serving and (not serving or now < said_at + SAY_AGAIN_S):
            return None
        self._said = (now, serving)
        return Heartbeat(agent=self.me.agent, incarnation=self.me.incarnation, serving=serving)

    def served_here(self, nbytes: int) -> ReaderLoad:
        """Return what a source says of this reader, which was planned to read so much there."""
        decided = 0 if self.turn is None else self.turn.decided
        return ReaderLoad(JOB, MODEL, self.me.replica, self.me.shard, decided, nbytes)

    def _show(self, pieces: "Sequence[Range]") -> None:
        """Tell readers what stands here now."""
        shown = tuple(pieces)
        for reader, number in self.readers:
            delay_s = self.world.fabric.delay_s(self.seat, reader.seat)
            self.world.agenda.after(delay_s, lambda reader=reader, number=number: reader.hear(number, shown))  # type: ignore[misc]

    def hear(self, number: int, pieces: "Sequence[Range]") -> None:
        """Take note of what a half-filled source has now."""
        if self.transfer is not None and self.alive and number in self.connections:
            self.transfer.available(number, pieces, self.world.agenda.now)
            self.drive()

    def drop_readers(self, *, only_older: bool = False) -> None:
        """Break the leases on what stands here."""
        for reader, number in list(self.readers):
            theirs = reader.transfer
            mine = self.transfer.version if self.transfer is not None else None
            if only_older and theirs is not None and theirs.version == mine:
                continue
            self.readers.pop((reader, number), None)
            if theirs is not None:
                reader.refused(number, theirs.version, "its lease was broken")

    def drop(self) -> None:
        """End what is being read here."""
        for number, (source, connection) in self.connections.items():
            self.world.network.close(connection)
            source.reader_gone(self, number)
        self.connections.clear()
        self.transfer, self.turn = None, None

    def vanish(self) -> None:
        """Be gone without a word: those that read from here have to find out."""
        self.alive = False
        self.drop()
        for reader, number in self.readers:
            held = reader.connections.get(number)
            if held is not None:
                self.world.network.close(held[1])
        self.readers.clear()
        self.version = None
        self._waiting.clear()
