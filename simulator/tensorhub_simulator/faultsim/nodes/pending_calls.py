"""Workers' calls under way: sent to an agent, open there, and ended or lost with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.core.effects import AnyCall, CompleteCall, FailCall
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import Sender
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.segments import Segment
from tensorhub_simulator.faultsim.observations import AgentDied, CallEnded

SLACK_S: Final = 2 * OUTCOME_S_MAX + 2.0
"""After its bound a call gives up, once more where the log took the round up anew, and waits for sources to close."""

Make = Callable[[int, float], AnyCall]
Reply = Callable[[CompleteCall | FailCall | None], None]
"""Takes the call's end; None when the agent died."""


@dataclass(slots=True)
class OpenCall:
    """A call that has not ended."""

    node: AgentHost
    key: ShardKey
    call: AnyCall
    reply: Reply
    slept_s: float
    stood: Segment | None = None
    """Where the shard stood when the call began."""
    want_by: Sender | None = None


class PendingCalls:
    """All calls under way in one job."""

    def __init__(self, job: Job) -> None:
        """Begin with none."""
        self.job = job
        self._sent: dict[int, tuple[AgentHost, Reply]] = {}
        """Calls that have not reached their agent yet."""
        self._open: dict[int, OpenCall] = {}
        job.subscribe(AgentDied, lambda died: self._agent_died(job.hosts[died.agent]))

    def send(self, node: AgentHost, key: ShardKey, make: Make, reply: Reply) -> int:
        """Send a call to an agent; `make` makes it when it arrives."""
        number, clock = self.job.number(), self.job.clock
        self._sent[number] = (node, reply)

        def arrive() -> None:
            sent = self._sent.pop(number, None)
            if sent is not None:
                call = make(number, node.now)
                stored = node.stored.get(key)
                stood = stored.segment if stored is not None else None
                self._open[number] = OpenCall(node, key, call, sent[1], node.state.slept_s, stood)
                node.begin(key, call)

        clock.after(node.lag(), node, arrive)
        return number

    def wanted(self, node: AgentHost, key: ShardKey, by: Sender) -> None:
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

    def ended(self, node: AgentHost, end: CompleteCall | FailCall) -> None:
        """Report a call's end, and let its worker go on at once."""
        open_call = self._open.pop(end.call, None)
        if open_call is None:
            raise Violation("one answer per call", f"call {end.call} ends twice: {end}")
        key, call, stored = open_call.key, open_call.call, node.stored.get(open_call.key)
        core = node.core.shards.get(key)
        waited = core is not None and core.operation is not None
        said = f"{end.error}: {end.message}" if isinstance(end, FailCall) else f"-> {end.version}"
        self.job.log_line(f"{node.name} {type(call).__name__} of {key.replica}/{key.shard}: {said}")
        self.job.observe(
            CallEnded(
                node.name,
                key,
                call,
                end,
                node.core,
                stored.spec if stored is not None else None,
                bytes(stored.segment.data) if stored is not None else b"",
                is_written=stored is not None and bool(stored.target.writers) and not waited,
                has_swapped=stored is not None and stored.segment is not open_call.stood,
                want_by=open_call.want_by,
            )
        )
        open_call.reply(end)

    def _agent_died(self, node: AgentHost) -> None:
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
