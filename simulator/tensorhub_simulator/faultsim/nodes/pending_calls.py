"""Workers' calls under way, and what must hold when one ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tensorhub_agent.core.effects import AnyCall, CallPublish, CallRead, CallUnpublish, CompleteCall, FailCall
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Sender
from tensorhub_simulator.faultsim.models.segments import Segment, Violation

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.world import World

SLACK_S: Final = 2 * OUTCOME_S_MAX + 2.0
"""After its bound a call gives up, once more where the log took the round up anew, and waits for sources to close."""

Make = Callable[[int, float], AnyCall]
Reply = Callable[[CompleteCall | FailCall | None], None]
"""Takes the call's end; None when the agent died."""


@dataclass(slots=True)
class OpenCall:
    """A call that has not ended."""

    node: "AgentNode"
    key: ShardKey
    call: AnyCall
    reply: Reply
    slept_s: float
    stood: Segment | None = None
    """Where the shard stood when the call began."""
    want_by: Sender | None = None


@dataclass(slots=True)
class Calls:
    """All calls under way."""

    world: "World"
    reads: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    reads_raised: dict[str, int] = field(default_factory=dict)
    """The same of reads alone."""
    _sent: dict[int, tuple["AgentNode", Reply]] = field(default_factory=dict)
    """Calls that have not reached their agent yet."""
    _open: dict[int, OpenCall] = field(default_factory=dict)
    _answers: dict[tuple[ShardKey, int], set[int | None]] = field(default_factory=dict)

    def send(self, node: "AgentNode", key: ShardKey, make: Make, reply: Reply) -> int:
        """Send a call to an agent; `make` makes it when it arrives."""
        number, clock = self.world.number(), self.world.clock
        self._sent[number] = (node, reply)

        def arrive() -> None:
            sent = self._sent.pop(number, None)
            if sent is not None:
                call = make(number, node.now)
                shelved = node.shelf.get(key)
                stood = shelved.segment if shelved is not None else None
                self._open[number] = OpenCall(node, key, call, sent[1], node.state.slept_s, stood)
                node.begin(key, call)

        clock.after(node.lag(), node, arrive)
        return number

    def wanted(self, node: "AgentNode", key: ShardKey, by: Sender) -> None:
        """Note by which command a read joined its round.

        What an agent wants to say while it joins is said once it has; by then the log may have dropped the shard.
        """
        core = node.core.shards.get(key)
        number = core.operation.call.call if core is not None and core.operation is not None else 0
        if number in self._open:
            self._open[number].want_by = by

    def is_open(self, number: int) -> bool:
        """Tell whether the call is under way."""
        return number in self._open

    def ended(self, node: "AgentNode", end: CompleteCall | FailCall) -> None:
        """Check a call's end, and let its worker go on at once."""
        open_call = self._open.pop(end.call, None)
        if open_call is None:
            raise Violation("one answer per call", f"call {end.call} ends twice: {end}")
        shelved = node.shelf.get(open_call.key)
        core = node.core.shards.get(open_call.key)
        waited = core is not None and core.operation is not None
        if shelved is not None and shelved.target.writers and not waited:
            raise Violation("one writer", f"{open_call.key}: a call ends while something can be written: {end}")
        if isinstance(end, FailCall):
            if isinstance(open_call.call, CallRead) and shelved is not None and shelved.segment is not open_call.stood:
                raise Violation("swap with all", f"{open_call.key} has swapped in a read that failed: {end}")
            self.raised[end.error] = self.raised.get(end.error, 0) + 1
            if isinstance(open_call.call, CallRead):
                self.reads_raised[end.error] = self.reads_raised.get(end.error, 0) + 1
            self.world.note(
                f"{node.name} {type(open_call.call).__name__} of {_told(open_call.key)}: {end.error}: {end.message}"
            )
        else:
            self.world.note(f"{node.name} {type(open_call.call).__name__} of {_told(open_call.key)} -> {end.version}")
            self._check_answer(open_call, end)
        open_call.reply(end)

    def _check_answer(self, open_call: OpenCall, end: CompleteCall) -> None:
        node, key = open_call.node, open_call.key
        if isinstance(open_call.call, CallRead):
            self._check_read(open_call, end)
        elif isinstance(open_call.call, CallPublish):
            self._check_publish(open_call, end)
        elif isinstance(open_call.call, CallUnpublish):
            core = node.core.shards.get(key)
            if core is None and node.core.deleted is None:
                raise Violation("mutability", f"unpublish of {key} returned, and the shard is gone")
            if core is not None and core.held.memory is not MemoryState.EMPTY:
                raise Violation("mutability", f"unpublish of {key} returned while its memory is {core.held.memory}")
            counted = [
                name
                for name, link in self.world.links.items()
                if link.source is node and link.source_key == key and node.core.table.holds(name)
            ]
            if counted or node.core.table.reading(key):
                raise Violation("no counted lease", f"unpublish of {key} returned while {counted} can still be counted")

    def _check_publish(self, open_call: OpenCall, end: CompleteCall) -> None:
        key, shelved = open_call.key, open_call.node.shelf[open_call.key]
        place = root_key(shelved.place.shards, key.shard, shelved.place.layout)
        if end.version is None or not self.world.truth.is_true(key.model, end.version, place, shelved.segment):
            raise Violation("exact version", f"a publish of {key} returned {end.version}, and the log has other bytes")

    def _check_read(self, open_call: OpenCall, end: CompleteCall) -> None:
        world, node, key = self.world, open_call.node, open_call.key
        if end.version is not None:
            self.reads += 1
            shelved = node.shelf[key]
            place = root_key(shelved.place.shards, key.shard, shelved.place.layout)
            if not world.truth.is_true(key.model, end.version, place, shelved.segment):
                raise Violation(
                    "exact version", f"a read of {key} returned {end.version}, and its memory holds other bytes"
                )
        if open_call.want_by is None or open_call.want_by not in world.truth.round_of:
            raise Violation("one answer per round", f"a read of {key} returned {end.version} and was in no round")
        number = world.truth.round_of[open_call.want_by]
        said = world.truth.rules.answers.get(number, "nothing")
        if end.version is None and end.report is not None and end.report.failure:
            # The round failed, and the shard holds what it held: an update says so by None.
            if said != "nothing":
                raise Violation("the log's answer", f"an update of {key} gave up, and the log ended it with {said}")
            # That is no answer of the round, which may be taken up anew and end with a version.
            return
        if said != end.version:
            raise Violation("the log's answer", f"a read of {key} returned {end.version}; the log ended it with {said}")
        answers = self._answers.setdefault((ShardKey(key.model, key.replica, 0), number), set())
        answers.add(end.version)
        if len(answers) > 1:
            raise Violation("one answer per round", f"round {number} of {key.replica} answered {answers}")

    def agent_died(self, node: "AgentNode") -> None:
        """Tell the workers of a dead agent."""
        for number in [number for number, each in self._open.items() if each.node is node]:
            self._open.pop(number).reply(None)
        for number in [number for number, sent in self._sent.items() if sent[0] is node]:
            self._sent.pop(number)[1](None)

    def forget(self, number: int) -> None:
        """The call of a worker that was gone before its agent read it."""
        self._open.pop(number, None)

    def check(self) -> None:
        """Raise when a call has outlived its bound."""
        for number, each in self._open.items():
            if each.node.state.paused:
                continue
            late = each.node.now - each.call.deadline - (each.node.state.slept_s - each.slept_s)
            if late > SLACK_S:
                raise Violation("bounded calls", f"call {number} of {each.key} is {late:.1f} s over: {each.call}")


def _told(key: ShardKey) -> str:
    return f"{key.replica}/{key.shard}"
