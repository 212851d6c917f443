"""One job's catalog as this planner has it: the log's commands folded, entry by entry, up to `position`.

Commands alone decide the catalog. Events are in the same log, are what every fold computes, and count here for their
numbers only. An unreadable command is folded as `Unreadable`, exactly as the registry does.
"""

from dataclasses import dataclass, field

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import AnyCommand, Filled, Granted, Unreadable
from tensorhub_common.protocol.log.entries import LogEntry, command_in
from tensorhub_common.protocol.log.events import Event, RoundJoined, RoundStarted, ShardFilled
from tensorhub_planner.catalog_view.holders import HoldersCache


@dataclass(slots=True)
class CatalogReplica:
    """A job's catalog after every entry up to number `position`."""

    catalog: Catalog
    position: int = field(default=0)
    rolls: HoldersCache = field(default_factory=dict, compare=False, repr=False)
    """The lookups in the catalog since it changed last: all shards of a replica make the same one at once."""

    def take(self, entry: LogEntry) -> tuple[Event, ...]:
        """Fold the next entry; return its events, none where it is no command."""
        if entry.seq != self.position + 1:
            raise ValueError(f"entry {entry.seq} of job {self.catalog.job!r} can't follow on {self.position}")
        command = command_in(entry, self.catalog.level)
        events = () if command is None else apply(self.catalog, entry.seq, entry.time, command)
        self.position = entry.seq
        if command is not None and self.rolls:
            self.rolls = unchanged_holders(self.rolls, command, events)
        return events


def unchanged_holders(rolls: HoldersCache, command: AnyCommand | Unreadable, events: tuple[Event, ...]) -> HoldersCache:
    """Return the lookups that a command leaves as they are: those of ready holders, for the replica of the command.

    While a replica is read, its shards report one after another that they have leases, and that they are filled. That
    changes nothing for its other shards, which look up the holders of other replicas.
    """
    if not isinstance(command, Granted | Filled) or not all(
        isinstance(each, RoundJoined | RoundStarted | ShardFilled) for each in events
    ):
        return {}
    own = (command.model, command.replica)
    return {key: roll for key, roll in rolls.items() if (key.model, key.replica) == own and roll.is_ready}
