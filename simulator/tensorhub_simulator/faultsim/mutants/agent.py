"""Planted bugs of an agent: in what it keeps and says, in its patience, and in what it believes.

- Keeping and saying: the agent keeps what it must not keep, and leaves out what it must say.
- Patience: a read gives up though it need not, and nothing brings back a drain or a queue.
- Belief: the agent believes bytes without a lease, a foreign root, tickets, the dead, or half of a replica.
"""

from typing import Any, Final

import msgspec

from tensorhub_agent.core.operations.drain import AttachOperation, ReleaseOperation, UnpublishOperation
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.read_target import ReadTarget
from tensorhub_agent.core.operations.register import RegisterOperation
from tensorhub_agent.core.plan_queue import PlanQueue
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, digest_at
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import PlanRequests
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.catalog import availability, validation
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.state import Catalog, known_root
from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState, ShardTransition
from tensorhub_common.catalog.validation import CommandRefused
from tensorhub_common.errors import ReplicaConflict, StaleSender
from tensorhub_common.protocol.log.commands import AnyCommand, Filled, Sender
from tensorhub_simulator.faultsim.models import build
from tensorhub_simulator.faultsim.models.deltas import Delta, Deltas
from tensorhub_simulator.faultsim.mutants.replacement import Replacement
from tensorhub_simulator.faultsim.nodes.command_queue import CommandQueue
from tensorhub_simulator.faultsim.nodes.planner import PlannerNode
from tensorhub_simulator.faultsim.nodes.worker import WorkerNode
from tensorhub_simulator.faultsim.transfers.source_session import ReadSession

ROOM: Final = 2
"""This many commands of a lane wait, and the next one is left out."""


def refused_kept() -> list[Replacement]:
    """A registration that is refused forgets the shard and keeps its memory, until the agent starts again."""

    def drop(self: Any, error: str, message: str) -> None:
        self.core.fail(error, message)
        self.core.gone = True

    return [Replacement(RegisterOperation._drop, drop)]


def lane_leaves_out() -> list[Replacement]:
    """A lane that has no room drops one command, and says the next."""
    say = CommandQueue.say

    def with_gaps(self: CommandQueue, command: AnyCommand) -> None:
        assert command.by is not None
        lane = self._lanes.get(command.by.lane)
        if lane is None or len(lane.waiting) < ROOM:
            say(self, command)

    return [Replacement(CommandQueue.say, with_gaps)]


def counts_unkept() -> list[Replacement]:
    """The log is told of a fill as soon as its bytes stand, be its manifest written by then or not."""

    def filled(self: Any, root: str | None) -> None:
        self._root = root
        self._say_filled()

    return [Replacement(ReadOperation._filled, filled)]


def given_up_kept() -> list[Replacement]:
    """What the log has given up for a round without a call stays published at its agent."""

    def overwritten(_: Any, version: int) -> None:
        del version

    return [Replacement(ShardCore.overwritten_for_log, overwritten)]


def locks_not_taken() -> list[Replacement]:
    """Memory of a GPU that its worker has kept is taken for free, though a reader maps it."""
    start = RegisterOperation.start

    def begin(self: RegisterOperation, now: float) -> None:
        self.call = msgspec.structs.replace(self.call, lent=False, spare_lent=False)
        start(self, now)

    return [Replacement(RegisterOperation.start, begin)]


def gives_up_early() -> list[Replacement]:
    """A read whose sources stand still gives up though the log counts a holder."""
    refused = PlanRequests.refused

    def refuse(self: Any, refusal: Any, *rest: Any) -> bool:
        return refused(self, refusal, *rest) and not refusal.is_held

    return [Replacement(PlanRequests.refused, refuse)]


def drains_for_ever() -> list[Replacement]:
    """Memory that a reader had mapped at the bound of an update is never read into again."""
    start = ReadOperation.start

    def begin(self: Any, now: float) -> None:
        if self.core.contents.memory is MemoryState.DRAINING:
            self.core.fail(ReplicaConflict, "the memory drains: wait until that has ended")
        else:
            start(self, now)

    return [Replacement(ReadOperation.start, begin)]


def place_kept() -> list[Replacement]:
    """A question for a plan that was answered keeps its place, so that those that wait never go out."""

    def answered(self: PlanQueue, *_: Any) -> None:
        """Forget nothing."""

    def ended(self: PlanQueue, *_: Any) -> None:
        """Forget nothing."""

    return [Replacement(PlanQueue.answered, answered), Replacement(PlanQueue.ended, ended)]


def lease_not_asked() -> list[Replacement]:
    """With digests off, pieces count as soon as they have come: no reader asks whether the lease has held."""
    take = Transfer.take_actions

    def actions(self: Any) -> Any:
        while True:
            wanted = take(self)
            if self.verification.verify or not wanted.confirm:
                return wanted
            numbers, wanted.confirm = wanted.confirm, []
            self.pool.actions = wanted
            for number in numbers:
                self.confirmed(number, True, self._seen)  # noqa: FBT003 (as the machine takes it)

    return [Replacement(Transfer.take_actions, actions)]


def values_without_a_drain() -> list[Replacement]:
    """A trainer that comes back with values of its own copies them over what is published, and does not unpublish."""

    def resume(self: Any) -> None:
        self.published, self.version, self.trusts = False, None, None
        self._overwrite()
        self._loop()

    return [Replacement(WorkerNode._resume_with_values, resume)]


def values_over_a_drain() -> list[Replacement]:
    """A worker that comes back to a shard which still drains gets the memory at once."""

    def start(self: Any, now: float) -> None:  # noqa: ARG001 (as the machine takes it)
        self.core.worker_mapping_gone()
        self.core.finish()

    return [Replacement(AttachOperation.start, start)]


def digests_of_the_next() -> list[Replacement]:
    """A source grants whatever it holds, and its reader takes that list of digests for the version that it reads."""
    grant = LeaseTable.grant

    def whatever(self: LeaseTable, ask: Any, *rest: Any) -> Any:
        offered = self.offers.get(ShardKey(ask.model, ask.source.replica, ask.source.shard))
        if offered is not None:
            version = ask.version if offered.version is None else offered.version
            ask = msgspec.structs.replace(ask, version=version, root=offered.root)
        return grant(self, ask, *rest)

    def vouched(self: Verification, digests: bytes) -> bool:
        if self.digests is None and len(digests) == len(self.done) * PIECE_DIGEST_BYTES:
            self.digests = digests
        return digests == self.digests

    return [Replacement(LeaseTable.grant, whatever), Replacement(Verification.vouched, vouched)]


def ticket_twice() -> list[Replacement]:
    """A ticket goes on being good after it was shown, as long as its lease would have lived."""
    redeem = LeaseTable.redeem

    def again(self: Any, ticket: str, now: float) -> Any:
        shown = self.__dict__.setdefault("shown", {})
        lease = redeem(self, ticket, now)
        if lease is not None:
            shown[ticket] = lease
        return shown.get(ticket)

    return [Replacement(LeaseTable.redeem, again)]


def incarnation_ignored() -> list[Replacement]:
    """A process with an agent's name speaks for it, even one that died long ago."""

    def live_agent(catalog: Catalog, by: Sender | None) -> Any:
        agent = catalog.agents.get(by.process) if by is not None else None
        if agent is None or agent.state is not AgentState.LIVE:
            raise CommandRefused(StaleSender, "this agent has not joined")
        return agent

    return [Replacement(validation.live_agent, live_agent)]


def ready_before_all() -> list[Replacement]:
    """A replica is ready, and its calls return, as soon as its first shard is filled."""
    right = rounds.filled

    def filled(catalog: Catalog, command: Filled, out: Any) -> None:
        right(catalog, command, out)
        model = catalog.models[command.model]
        replica = model.replicas[command.replica]
        current = replica.round
        if current is None or current.state is not RoundState.STARTED:
            return
        for index, shard in replica.members.items():
            if index not in current.filled:
                root = known_root(model, replica, shard, command.version)
                if shard.state is ShardState.FILLING:
                    availability.move_shard(shard, ShardTransition.FILLED, command.version, root)
                else:
                    current.staged[index] = root
        rounds.complete(catalog, model, replica, current, command.version, out)

    return [Replacement(right, filled)]


def filled_forgotten() -> list[Replacement]:
    """A shard that was filled forgets that when its round fails, though the log goes on counting it as ready."""
    take = ReadTarget._take

    def forget(self: Any) -> bool:
        before = self._vacated
        taken = take(self)
        self._vacated = before
        return taken

    return [Replacement(ReadTarget._take, forget)]


def turns_forgotten() -> list[Replacement]:
    """A planner that begins with a snapshot knows no turn of a round decided before it: no replica is half-filled."""
    restore = PlannerNode._restore

    def forget(self: Any) -> None:
        restore(self)
        for model in self.fold.catalog.models.values():
            for replica in model.replicas.values():
                if replica.round is not None:
                    replica.round.decided = 0

    return [Replacement(PlannerNode._restore, forget)]


def patch_from_another_version() -> list[Replacement]:
    """A source gives the last delta that it has, from whatever version that leads; digests find out."""

    def between(self: Any, key: ShardKey, _base: str, root: str | None) -> Any:
        stood = self._stood.get(key, {})
        others = [data for other, data in stood.items() if other != root]
        return Delta(others[-1], stood[root]) if others and root in stood else None

    return [Replacement(Deltas.between, between)]


def patch_not_judged() -> list[Replacement]:
    """A source gives a delta from whatever version, and a patched piece is taken for what the source says of it."""
    found = ReadSession.found

    def believed(self: Any, pieces: list[int]) -> bytes:
        return b"".join(
            digest_at(self._digests, piece) if self._wire.is_patched(piece) else found(self, [piece])
            for piece in pieces
        )

    return [*patch_from_another_version(), Replacement(ReadSession.found, believed)]


def change_not_switched() -> list[Replacement]:
    """A new build folds with its changed transition at once, while others still run the old one."""
    return [Replacement(build.is_on, lambda number, _catalog: number >= build.NEW)]


def unpublish_forgotten() -> list[Replacement]:
    """An unpublish that the log answers after its caller has given up is forgotten: a holder that grants no lease."""
    linger = ShardCore.detach

    def forget(self: ShardCore, what: Any) -> None:
        if not isinstance(what, UnpublishOperation):
            linger(self, what)

    return [Replacement(ShardCore.detach, forget)]


def release_forgotten() -> list[Replacement]:
    """A release is given up with its caller, who was told that the shard goes as soon as the registry answers."""
    linger = ShardCore.detach

    def forget(self: ShardCore, what: Any) -> None:
        if not isinstance(what, ReleaseOperation):
            linger(self, what)

    return [Replacement(ShardCore.detach, forget)]
