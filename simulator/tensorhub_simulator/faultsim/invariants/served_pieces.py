"""An oracle: a half-filled shard sends only what it has verified, and of units what their source has confirmed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_simulator.faultsim.models.byte_ranges import PieceBytes, bytes_folded, bytes_here
from tensorhub_simulator.faultsim.models.segments import Violation

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.transfers.source_session import ReadSession


def check_served(link: "ReadSession", piece: int, where: Sequence[int]) -> None:
    """Raise `Violation` if a half-filled source gives what it has not verified, under a lease that holds."""
    source, key = link.source, link.source_key
    coming = source.core.leases.coming.get(key) if link.source_lives else None
    if coming is None or link.lease not in coming.leases:
        return
    operation = source.core.shards[key].operation
    stands = _bytes_proven(source, key, operation) if isinstance(operation, ReadOperation) else ()
    if not set(where) <= set(stands):
        raise Violation("served as verified", f"piece {piece} of {key} is read before it stands there")


def _bytes_proven(agent: "AgentNode", key: ShardKey, read: ReadOperation) -> set[int]:
    """Return which bytes of a shard that is being filled stand there, as far as its own read has found out."""
    transfer, program = read.transfer, read.program
    if transfer is None:
        return set()
    numbers = [number for number, done in enumerate(transfer.verification.done) if done]
    if program is None:
        pieces = PieceBytes(agent.shelf[key].target.table)
        return {at for number in numbers for at in pieces.here(number)}
    folded = {at for number in numbers if number < program.values for at in bytes_folded(program, number)}
    givers = [(layout, program.given_by(layout)) for layout in program.program.sources]
    giver = {
        unit: layout for layout, ranges in givers for first, count in ranges for unit in range(first, first + count)
    }
    plain = (number for number in numbers if number >= program.values)
    return folded | {at for number in plain for at in bytes_here(program, giver[number], number)}
