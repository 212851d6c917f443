"""What must hold of retention, worked out from the shards alone and not by the code that it judges.

A retained version that stands whole on a replica which may not vanish goes on doing so, whatever anybody orders. Only a
crash takes the last copy, or a publication that was given up without the log's word, and then an event says so.
"""

from collections.abc import Sequence

from tensorhub_common.catalog.state import Catalog, Model
from tensorhub_common.catalog.transitions import AgentState, ShardState
from tensorhub_common.protocol.log.commands import Command, Expire, Join, Unpublish, Unreadable
from tensorhub_common.protocol.log.events import Event, VersionExposed
from tensorhub_common.protocol.queries import VersionState
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.observations import CommandFolded

Copy = tuple[str, int]


class RetentionRule:
    """Which retained versions stand safe."""

    def __init__(self) -> None:
        """Begin with none."""
        self._safe: set[Copy] = set()

    def on_command(self, folded: CommandFolded) -> None:
        """Judge a command. Raises `Violation`."""
        self.see(folded.catalog, folded.command, folded.events)

    def see(self, catalog: Catalog, command: Command | Unreadable, events: Sequence[Event]) -> None:
        """Compare with what was safe before the command. Raises `Violation`."""
        if not catalog.tended and not self._safe:
            return
        kept = {(model.name, number) for model in catalog.models.values() for number in _kept(model)}
        now = {(name, number) for name, number in kept if _is_whole(catalog, catalog.models[name], number)}
        lost = (self._safe - now) & kept
        told = {(event.model, event.version) for event in events if isinstance(event, VersionExposed)}
        self._safe = now
        void = isinstance(command, Unpublish) and command.void
        if lost and not void and not isinstance(command, Expire | Join):
            raise Violation("retention", f"{command} took the last copy of {sorted(lost)}, which is retained")
        if lost != told:
            raise Violation("retention", f"a crash took the last copy of {sorted(lost)}, and the log told of {told}")


def _kept(model: Model) -> set[int]:
    standing = sorted(number for number, each in model.versions.items() if each.state is not VersionState.RETIRED)
    last = standing[max(len(standing) - model.retain, 0) :]
    return set(last) | {number for number in model.pins if number in model.versions}


def _is_whole(catalog: Catalog, model: Model, number: int) -> bool:
    """Tell whether a replica that counts has all of a version, ready, on agents that live."""
    return any(
        not replica.spot
        and not replica.mapped
        and len(replica.members) == replica.shards
        and all(
            shard.state is ShardState.READY
            and shard.version == number
            and catalog.agents[shard.agent].state is AgentState.LIVE
            for shard in replica.members.values()
        )
        for replica in model.replicas.values()
    )
