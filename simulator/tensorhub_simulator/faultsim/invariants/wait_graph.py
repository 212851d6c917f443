"""Who waits for whose bytes: no reader of half-filled replicas may, over others, wait for itself.

A node of the graph is a *fill*: a replica, and the turn under which it reads. Decided anew, a replica begins another
fill. A shard of it that has not heard so yet goes on with the old one, which waits for nothing that the new one waits
for, and gives its readers up as soon as it hears. So no lease is left out of the graph, whatever the log says by then:
the old fill and the new one are two nodes, and a reader of the old one is no reader of the new one.

A lease that counts on promises is no edge: its reader waits for what its source promises, and a shard that promises a
piece waits for no other reader to get it. That is what is looked at of those (`check_promises`); a reader that goes on
waiting for what was retracted a moment ago waits until the word arrives.

Whose turn a fill has is taken from what its shard reads just now, not from what it says of itself: one that kept its
readers while it began anew under a later turn would go on telling the old one, and could wait for them.
"""

from collections.abc import Iterable

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.primitives.ranges import split_by_marks
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.host import Session

Fill = tuple[str, ReadPriority | None]
"""A replica with its model, and the turn under which it reads."""


def check_waiting(links: Iterable[Session]) -> None:
    """Raise `Violation` if fills wait for each other's pieces."""
    reading = [link for link in links if not link.closing]
    turns = {(link.reader.name, link.key): link.turn for link in reading}
    waits_for: dict[Fill, set[Fill]] = {}
    for link in reading:
        source, key = link.source, link.source_key
        coming = source.core.leases.coming.get(key) if link.source_lives else None
        if coming is not None and link.lease in coming.leases and not coming.leases[link.lease].is_promised:
            fill = (f"{key.model}/{key.replica}", turns.get((source.name, key), coming.turn))
            waits_for.setdefault((f"{link.key.model}/{link.key.replica}", link.turn), set()).add(fill)
    check_no_cycle(waits_for)


def check_promises(cores: Iterable[AgentCore]) -> None:
    """Raise `Violation` if a shard promises a piece, or a unit, for which it waits itself."""
    for core in cores:
        for key, coming in core.leases.coming.items():
            if not coming.is_counted_on:
                # No reader waits for it.
                continue
            operation = core.shards[key].operation
            transfer = operation.transfer if isinstance(operation, ReadOperation) else None
            for source in transfer.sources.values() if transfer is not None else ():
                both = split_by_marks(coming.promised, source.awaiting_source)[0]
                if both:
                    raise Violation("no empty promise", f"{key} promises {both}, and waits for that itself")


def check_no_cycle(waits_for: dict[Fill, set[Fill]]) -> None:
    """Raise `Violation` if somebody waits for itself."""
    left = set(waits_for)
    while left:
        ended = {fill for fill in left if not waits_for[fill] & left}
        if not ended:
            raise Violation("no wait cycle", f"{sorted(left, key=str)} wait for each other's pieces")
        left -= ended
