"""A half-filled shard sends only what it has verified, and of units what their source has confirmed."""

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_common.layout.layout import PieceTable
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.byte_ranges import PieceBytes, bytes_folded, bytes_here
from tensorhub_simulator.faultsim.observations import PieceSent


def check_served(sent: PieceSent) -> None:
    """Raise `Violation` if a half-filled source gives what it has not verified, under a lease that holds."""
    core, key = sent.source, sent.key
    coming = core.leases.coming.get(key) if core is not None else None
    if core is None or coming is None or sent.lease not in coming.leases:
        return
    operation = core.shards[key].operation
    stands = _bytes_proven(sent.table, operation) if isinstance(operation, ReadOperation) else ()
    if not set(sent.where) <= set(stands):
        raise Violation("served as verified", f"piece {sent.piece} of {key} is read before it stands there")


def _bytes_proven(table: PieceTable, read: ReadOperation) -> set[int]:
    """Return which bytes of a shard that is being filled stand there, as far as its own read has found out."""
    transfer, program = read.transfer, read.program
    if transfer is None:
        return set()
    numbers = [number for number, done in enumerate(transfer.verification.done) if done]
    if program is None:
        pieces = PieceBytes(table)
        return {at for number in numbers for at in pieces.here(number)}
    folded = {at for number in numbers if number < program.values for at in bytes_folded(program, number)}
    givers = [(layout, program.given_by(layout)) for layout in program.program.sources]
    giver = {
        unit: layout for layout, ranges in givers for first, count in ranges for unit in range(first, first + count)
    }
    plain = (number for number in numbers if number >= program.values)
    return folded | {at for number in plain for at in bytes_here(program, giver[number], number)}
