"""Exactly one whole group of events per command, whatever becomes of the registries that publish them.

Two registries read one modelled log and both believe that they lead. They are killed between any two steps; what they
had sent may still arrive after their death, or never; acknowledgements get lost; commands come in between. Each makes
snapshots at any entry; the log is trimmed behind one, and who comes up begins with one of those that still reach.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples_of import examples
from tests.unit.registry.modelled_log import JOB, ModelledLog, decided

from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_common.protocol.log.commands import (
    Command,
    Drained,
    Expire,
    Filled,
    GiveUp,
    Granted,
    Join,
    Publish,
    Ready,
    Register,
    Release,
    Sender,
    Unpublish,
    Want,
)
from tensorhub_registry.core.job_fold import (
    JobFold,
    OutcomeStored,
    Outgoing,
    PublicationRefused,
    PublicationStored,
    PublicationUnknown,
)

AGENTS = ("a", "b")
ROOT = "a" * 32
UNPUBLISHED_MAX = 4
UNSEEN_MAX = 3
STEPS_MAX = 10_000


def commands() -> st.SearchStrategy[Command]:
    """Return commands of a small world, in which many make sense and many don't."""
    by = st.builds(Sender, st.sampled_from(AGENTS), st.integers(1, 2), st.integers(1, 12))
    shard = {
        "by": by,
        "model": st.just("m"),
        "replica": st.sampled_from(("r", "s")),
        "shard": st.integers(0, 1),
    }
    rounds = st.integers(1, 30)
    return st.one_of(
        st.builds(Join, by=by, host=st.just("h"), site=st.just("s")),
        st.builds(Register, **shard, shards=st.just(1), layout=st.just("b" * 64), nbytes=st.just(8)),
        st.builds(Ready, **shard, version=st.none(), root=st.just(ROOT)),
        st.builds(Unpublish, **shard),
        st.builds(Drained, **shard),
        st.builds(Want, **shard, want=st.sampled_from(("latest", "newer"))),
        st.builds(Granted, **shard, round=rounds, attempt=st.integers(1, 2)),
        st.builds(Filled, **shard, round=rounds, version=st.integers(1, 3), root=st.just(ROOT)),
        st.builds(GiveUp, **shard, round=rounds, error=st.just("RoundTimeout"), message=st.just("late")),
        st.builds(Release, **shard),
        st.builds(Publish, model=st.just("m"), replica=st.sampled_from(("r", "s"))),
        st.builds(
            Expire,
            by=st.builds(Sender, st.just("_registry"), st.integers(1, 3), st.integers(1, 9)),
            agent=st.sampled_from(AGENTS),
            incarnation=st.integers(1, 2),
            term=st.integers(1, 3),
        ),
    )


@dataclass
class Message:
    """A publication on its way to the server, and then the answer on its way back."""

    expected: int
    events: tuple[Outgoing, ...]
    behind: bytes | None = None
    """It is stored only right behind this one."""
    answer: int | None = None
    was_processed: bool = False


@dataclass
class Registry:
    """One that publishes in the manner of `Job`: in one piece, or as a chain of events one behind the other."""

    fold: JobFold = field(default_factory=lambda: JobFold(JOB, unpublished_max=UNPUBLISHED_MAX, unseen_max=UNSEEN_MAX))
    sent: list[Message] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, body: bytes | None) -> "Registry":
        """Start from this snapshot, or without one from the log's beginning."""
        if body is None:
            return cls()
        fold = JobFold.restored(decode(JOB, body))
        fold.unpublished_max, fold.unseen_max = UNPUBLISHED_MAX, UNSEEN_MAX
        fold._unseen = deque(maxlen=UNSEEN_MAX)
        return cls(fold)

    def take(self, effects: list[object]) -> None:
        self.stood += [effect.events[0].cmd for effect in effects if isinstance(effect, OutcomeStored)]

    def read(self, log: ModelledLog, count: int) -> None:
        for entry in list(log.after(self.fold.seq))[:count]:
            if self.fold.is_full and ".cmd." in entry.subject:
                return
            self.take([*self.fold.handle(entry, 0.0)])

    def look_at_end(self, log: ModelledLog) -> None:
        last = log.last_event(self.fold.seq)
        if last is not None:
            self.take([*self.fold.handle(last, 0.0)])

    def send(self, count_max: int, *, ahead: bool) -> list[Message]:
        publication = self.fold.to_publish(count_max)
        if publication is None:
            return []
        events = publication.events
        if ahead:
            behind = [
                Message(publication.ahead + number, (event,), before.body)
                for number, (before, event) in enumerate(pairwise(events))
            ]
            self.sent = [Message(publication.expected, events[:1]), *behind]
        else:
            self.sent = [Message(publication.expected, events)]
        return list(self.sent)

    def hear(self) -> None:
        """Take the answers to what was sent."""
        stored = list(takewhile(lambda message: message.answer is not None, self.sent))
        self.sent = []
        if not stored or stored[-1].answer is None:
            self.take([*self.fold.handle(PublicationRefused(), 0.0)])
        else:
            count = sum(len(message.events) for message in stored)
            self.take([*self.fold.handle(PublicationStored(count, stored[-1].answer), 0.0)])


def events_in(snapshot: Snapshot) -> tuple[object, ...]:
    """Return what a snapshot says of outcomes, without what the commands' headers asked for."""
    told = snapshot.told
    return (told.last_event_seq, told.last_event, told.begun, [due.event for due in told.due])


class Crashes(RuleBasedStateMachine):
    """Random commands, and two registries that die and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ModelledLog()
        self.registries = [Registry(), Registry()]
        self.network: list[Message] = []
        self.snapshots: dict[int, bytes] = {}

    which = st.integers(0, 1)

    @initialize()
    def begin(self) -> None:
        for agent in AGENTS:
            self.log.say(Join(by=Sender(agent, 1, 1), host="h", site="s"))

    @rule(command=commands(), times=st.integers(1, 3))
    def command(self, command: Command, times: int) -> None:
        for _ in range(times):
            self.log.say(command)

    @rule(data=st.binary(max_size=20))
    def garbage(self, data: bytes) -> None:
        self.log.append(f"tensorhub.v1.{JOB}.cmd.want.a", data)

    @rule(data=st.sampled_from((b"", b'{"stream":"TENSORHUB_run-7","seq":4}', b"{}", b"\xff")))
    def relayed(self, data: bytes) -> None:
        """Somebody has JetStream answer on an event's subject."""
        self.log.relay(data)

    @rule(which=which, count=st.integers(1, 8))
    def read(self, which: int, count: int) -> None:
        self.registries[which].read(self.log, count)

    @rule(which=which)
    def look_at_end(self, which: int) -> None:
        self.registries[which].look_at_end(self.log)

    @rule(which=which, count_max=st.integers(1, 5), ahead=st.booleans())
    def send(self, which: int, count_max: int, ahead: bool) -> None:  # noqa: FBT001 (hypothesis gives it so)
        self.network += self.registries[which].send(count_max, ahead=ahead)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 5))
    def arrive(self, which: int) -> None:
        """Some message arrives; a later one may overtake an earlier, which is worse than a connection ever is."""
        message = self.network.pop(which % len(self.network))
        message.was_processed = True
        message.answer = self.log.publish(message.expected, message.events, message.behind)

    @precondition(lambda self: self.network)
    @rule()
    def vanish(self) -> None:
        self.network.pop(0)

    @rule(which=which)
    def hear(self, which: int) -> None:
        registry = self.registries[which]
        if registry.sent and all(message.was_processed for message in registry.sent):
            registry.hear()

    @rule(which=which)
    def give_up_waiting(self, which: int) -> None:
        """No answer came: whether what was sent will still arrive is unknown."""
        registry = self.registries[which]
        if registry.sent:
            registry.sent = []
            registry.fold.handle(PublicationUnknown(), 0.0)

    @rule(which=which, count_max=st.integers(1, 5), ahead=st.booleans(), between=commands() | st.none())
    def turn(self, which: int, count_max: int, ahead: bool, between: Command | None) -> None:  # noqa: FBT001 (as above)
        """What happens most: all is read, sent, stored and answered at once, perhaps with a command in between."""
        registry = self.registries[which]
        registry.read(self.log, STEPS_MAX)
        messages = registry.send(count_max, ahead=ahead)
        if between is not None:
            self.log.say(between)
        for message in messages:
            message.was_processed = True
            message.answer = self.log.publish(message.expected, message.events, message.behind)
        if messages:
            registry.hear()

    @rule(which=which)
    def snapshot(self, which: int) -> None:
        """It follows from the log alone: whoever folds as far makes the same."""
        fold = self.registries[which].fold
        snapshot = fold.snapshot()
        if snapshot is None:
            return
        body = encode(snapshot)
        self.snapshots[snapshot.seq] = body
        other = JobFold(JOB)
        for entry in self.log.entries[: snapshot.seq]:
            other.handle(entry, 0.0)
        same = other.snapshot()
        assert same is not None
        assert (same.catalog, events_in(same)) == (decode(JOB, body).catalog, events_in(snapshot))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 9))
    def trim(self, which: int) -> None:
        """Behind a snapshot, but never behind the last event."""
        seq = list(self.snapshots)[which % len(self.snapshots)]
        self.log.trim(min(seq + 1, self.log.last_event_seq))
        self.snapshots = {seq: body for seq, body in self.snapshots.items() if seq + 1 >= self.log.first}
        for behind in (0, 1):
            if self.registries[behind].fold.seq + 1 < self.log.first:
                self.die(behind, 0)

    @rule(which=which, start=st.integers(0, 9))
    def die(self, which: int, start: int) -> None:
        bodies: list[bytes | None] = [None] if self.log.first == 1 else []
        bodies += self.snapshots.values()
        self.registries[which] = Registry.begin(bodies[start % len(bodies)])

    @invariant()
    def each_command_has_at_most_its_group(self) -> None:
        """What stands in the log is, in order, a beginning of what a fold of the commands alone decides."""
        stands, all_decided = self.log.events(), decided(self.log.entries)
        assert stands == all_decided[: len(stands)]
        for registry in self.registries:
            registry.fold.check()
            assert registry.stood == sorted(set(registry.stood)), "a group was said to stand twice"

    def teardown(self) -> None:
        """Once the faults end, a registry that comes up brings every group to its end."""
        while self.network:
            self.arrive(0)
        last = Registry.begin(list(self.snapshots.values())[-1] if self.log.first > 1 else None)
        begun = last.fold.snapshot()
        assert begun is not None
        before = 0 if begun.told.last_event is None else begun.told.last_event[0] - (1 if begun.told.begun else 0)
        for _ in range(STEPS_MAX):
            last.read(self.log, 10**6)
            if last.fold.is_full:
                last.look_at_end(self.log)
            self.network = last.send(1, ahead=False)
            if not self.network and last.fold.seq == len(self.log.entries):
                break
            for _message in list(self.network):
                self.arrive(0)
            if last.sent:
                last.hear()
        assert self.log.events() == decided(self.log.entries)
        said = [entry.seq for entry in self.log.entries if ".cmd." in entry.subject]
        assert last.stood == [seq for seq in said if seq > before]
        last.fold.check()


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=examples(0.6), stateful_step_count=60)
