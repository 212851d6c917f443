"""The log folded at the moment it is written: what a user could ask a registry that is never behind."""

from typing import cast

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import Catalog, Model
from tensorhub_common.protocol.log.codec import decode_command
from tensorhub_common.protocol.log.events import AnyEvent, VersionPublished
from tensorhub_simulator.faultsim.env import Env
from tensorhub_simulator.faultsim.models.build import NEW, built
from tensorhub_simulator.faultsim.models.job_log import Entry
from tensorhub_simulator.faultsim.observations import CommandFolded, EventStored


class CatalogView:
    """Takes every entry as it is stored."""

    def __init__(self, env: Env, level: int) -> None:
        """Begin with an empty log."""
        self._env = env
        self.catalog = Catalog(env.name, level=level)
        self.published_at: dict[tuple[str, int], int] = {}
        """The command by which a version came to be."""
        self.told: dict[int, int] = {}
        """The entry of the last event of a command's outcome."""

    def entry(self, entry: Entry) -> None:
        """Take the entry that was just stored."""
        event = entry.event
        if event is not None:
            if event.i == event.k:
                self.told[event.cmd] = entry.seq
            self._env.observe(EventStored(entry.seq, event))
            return
        tokens = entry.subject.split(".")
        process = tokens[5] if len(tokens) > 5 else None  # noqa: PLR2004 (tensorhub.v1.<job>.cmd.<verb>.<process>)
        command = decode_command(tokens[4], process, entry.data, self.catalog.level)
        assert entry.seq > self.catalog.seq
        with built(NEW, self.catalog):
            events = cast("tuple[AnyEvent, ...]", apply(self.catalog, entry.seq, entry.time, command))
        check_invariants(self.catalog)
        for each in events:
            if isinstance(each, VersionPublished):
                self.published_at[each.model, each.version] = each.cmd
        self._env.observe(CommandFolded(entry.seq, entry.msg_id, command, events, self.catalog))

    def model(self, name: str) -> Model | None:
        """Return a model by its name."""
        return self.catalog.models.get(name)

    def holders(self, model: str) -> dict[str, int | None]:
        """Return what each replica holds by the log."""
        record = self.model(model)
        return {} if record is None else {name: replica.version for name, replica in record.replicas.items()}
