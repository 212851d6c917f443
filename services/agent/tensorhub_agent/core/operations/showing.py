"""What a shard that is being filled tells its readers of later turns: what stands there, and what is promised. Pure."""

from collections.abc import Sequence

from tensorhub_agent.core.effects import Show
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.primitives.lease_messages import Cede, Have, Promise, Retract
from tensorhub_agent.primitives.program_units import Completion
from tensorhub_agent.transfer.ceding import Ceded
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_common.protocol.plans import Range


class Showing:
    """The readers of one shard that is being filled."""

    def __init__(self, core: ShardCore) -> None:
        """Tell nobody yet."""
        self._core = core

    def pieces(self, pieces: tuple[Range, ...]) -> None:
        """Tell of pieces that stand there, verified."""
        core = self._core
        if pieces:
            core.out.extend(Show(lease, Have(pieces)) for lease in core.table.prove(core.key, pieces))

    def units(self, units: tuple[Range, ...], completion: Completion) -> None:
        """Tell readers of the same program of units, and all others of the pieces that are whole by them."""
        core = self._core
        self.pieces(tuple(completion.stand(units)))
        if units:
            core.out.extend(Show(lease, Have(units)) for lease in core.table.prove_units(core.key, units))

    def promise(self, transfer: Transfer, ceded_now: Sequence[Ceded]) -> None:
        """Let those who count on it know what this shard has under way, and what it waits for itself."""
        core = self._core
        transfer.is_counted_on = core.table.counts_on_promises(core.key)
        if not transfer.is_counted_on:
            return
        for ceded in ceded_now:
            leases = core.table.cede(core.key, ceded.pieces)
            core.out.extend(Show(lease, Cede(ceded.pieces, ceded.heir)) for lease in leases)
        news = core.table.promise(core.key, transfer.readings.firm(), transfer.readings.awaited())
        if news is not None:
            said = [each for each in (Retract(news.broken), Promise(news.fresh)) if each.pieces]
            core.out.extend(Show(lease, each) for lease in news.leases for each in said)
