"""How many instances a leader wishes for, of what is open, what has room, and what its trainers keep up with."""

import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Done,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    Scale,
    SdkEntry,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    EngineStep,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
)
from tensorhub_common.protocol.rollout.questions import SeedingQuestion, SeedingState
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    EntryFolded,
    HeartbeatCame,
    Place,
    PromptLoaded,
    ReportCame,
    RoomSeen,
    VersionsSeen,
)
from tensorhub_rollout.decisions.decisions import Decisions, Engines, PolicyLimits
from tensorhub_rollout.decisions.fleet_size import STEPS_MEASURED_MIN
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.plateau import StepModel

RUNNERS = {"runner-0": "policy", "critic-0": "critic"}
"""Each with its model."""
SLOW = "slow"
"""An instance whose steps take a second each."""
SLOTS, CRITIC_SLOTS, TOKENS_MAX = 8, 4, 100
RESPONSE_BYTES_MAX = 8 * TOKENS_MAX


class Job:
    """A leader with two models, each with a consumer of its name, and an instance of eight or of four slots."""

    def __init__(self) -> None:
        self.state, self.now, self.seq = RolloutState("job"), 0.0, 0
        self.by: dict[str, int] = {}
        """The attachment of each consumer."""
        self.plateaus: dict[str, int] = {}
        """Of instances, as measured."""
        self.n: dict[str, int] = {}
        self.seq += 1
        fold(self.state, self.seq, Lead(1, "m"))
        for model in RUNNERS.values():
            self.attach(model, model)
        self.lead()

    def attach(self, name: str, model: str) -> None:
        self.seq += 1
        fold(self.state, self.seq, Attach(name, model, 0, "n"))
        self.by[name], self.n[name] = self.seq, 0

    def lead(self) -> None:
        self.leader = Leader(self.state, "log", LeaderLimits(gather_s=0.0, silence_s=1e6), self.now)
        self.decisions = Decisions(PolicyLimits(), lambda what, why: pytest.fail(f"{what}: {why}"), self.measured)
        for runner, model in RUNNERS.items():
            self.leader.handle(VersionsSeen(model, PublishedVersions(1, (1,))), self.now)
            self.beat(runner)
            self.leader.handle(ReportCame(runner, Report("log", 1, ())), self.now)
        self.now += 1.0
        self.leader.handle(Tick(), self.now)

    def beat(
        self,
        runner: str,
        version: int = 1,
        loads_in_s: float | None = None,
        measured: tuple[EngineStep, ...] = (),
    ) -> None:
        model = RUNNERS.get(runner, "policy")
        slots = CRITIC_SLOTS if model == "critic" else SLOTS
        beat = RunnerHeartbeat("log", 1, 0, model, slots, version, loads_in_s=loads_in_s, measured=measured)
        self.leader.handle(HeartbeatCame(runner, beat), self.now)

    def say(self, entry: SdkEntry | End | Scale) -> None:
        self.seq += 1
        self.leader.handle(EntryFolded(fold(self.state, self.seq, entry).outcome), self.now)

    def by_of(self, name: str) -> SdkSender:
        self.n[name] += 1
        return SdkSender(self.by[name], self.n[name])

    def submit(self, name: str, *sizes: int) -> int:
        """Submit groups of these sizes, and return the entry."""
        groups = tuple(
            GroupSubmitted(f"{self.seq}.{at}", "a" * 64, size, 1, TOKENS_MAX) for at, size in enumerate(sizes)
        )
        self.say(Submit(self.by_of(name), groups, Payload(f"{self.seq:064x}", 1)))
        return self.seq

    def place(self, of: RequestId, runner: str) -> None:
        self.leader.handle(Place(of, runner), self.now)
        self.leader.handle(PromptLoaded(of, b"", Sampling(TOKENS_MAX, 7), VersionRule()), self.now)

    def end(self, of: RequestId, nbytes: int) -> None:
        """Have a request end with a payload of this size."""
        ended = RequestEnded(of, None, "stop", 1)
        self.say(End(1, (ended,), Payload(f"{of.submission:032x}{of.index:032x}", nbytes)))

    def keeps_up(self, name: str, instances: int) -> None:
        """Have a trainer learn with how many instances it keeps up."""
        state = SeedingState(0.0, instances, version=1)
        question = SeedingQuestion(self.by[name], 1, 0.0, 0.0, 0.0, 3.0, state)
        self.decisions.seeding(self.leader, question, lambda *_: "root", self.now)

    def measured(self, leader: Leader) -> Engines:
        steps = {runner: StepModel(1.0 if runner == SLOW else 0.01, 0.001, 0.0) for runner in leader.instances}
        return Engines(steps, self.plateaus)

    def wished(self, *, after_s: float = 1.0) -> tuple[int, str]:
        """Return what is wished for, and have it written to the log."""
        self.now += after_s
        found = self.decisions.scale(self.leader, self.now)
        if found is not None:
            self.say(Scale(self.state.term, found.instances, "", found.reason))
        known = self.state.wished[""]
        return known.instances, known.reason


@pytest.fixture
def job() -> Job:
    return Job()


def test_requests_of_each_model_need_instances_of_their_own(job: Job) -> None:
    """17 requests on instances of 8, and 5 on instances of 4."""
    job.submit("policy", 17)
    assert job.wished() == (3, "17 requests are open; an instance serves 8 at its best")
    job.submit("critic", 5)
    assert job.wished() == (
        3 + 2,
        (
            "critic: 5 requests are open; an instance serves 4 at its best; "
            "policy: 17 requests are open; an instance serves 8 at its best"
        ),
    )


def test_an_instance_counts_with_its_slots_until_enough_of_its_steps_were_measured(job: Job) -> None:
    """Its first steps may say that more than one request makes it no faster: that would be an instance for each."""
    job.plateaus = {"runner-0": 2}
    [*job.decisions.look(job.leader, "policy", job.now)]  # It looks up what is measured.
    job.submit("policy", 16)
    steps = tuple(EngineStep(1 + at % 8, 4.0, 0.01) for at in range(STEPS_MEASURED_MIN))
    job.beat("runner-0", measured=steps[:-1])
    assert job.wished()[0] == 2
    job.beat("runner-0", measured=steps[-1:])
    assert job.wished() == (8, "16 requests are open; an instance serves 2 at its best")


def test_what_has_no_room_in_payloads_needs_no_instance(job: Job) -> None:
    """Six groups of eight, and room for three: two at once, and a third whose beginning makes payloads full."""
    seq = job.submit("policy", *[SLOTS] * 6)
    assert job.wished()[0] == 6
    full = Job()
    room = int((SLOTS * 2.5 * RESPONSE_BYTES_MAX + 1) / LeaderLimits().admission_share_max)
    full.leader.handle(RoomSeen(room), full.now)
    assert full.submit("policy", *[SLOTS] * 6) == seq
    assert full.wished() == (
        3,
        "24 requests are open, and 24 wait for room in payloads; an instance serves 8 at its best",
    )
    for group in range(6):
        full.place(RequestId(seq, SLOTS * group), "runner-0")
    begun = {each.request.index // SLOTS for each in full.leader.placements.values()}
    assert begun == {0, 1, 2}, "as many have begun as were counted"
    assert full.wished()[0] == 3


def test_one_instance_stays_while_all_that_is_open_waits_for_room(job: Job) -> None:
    """What has ended fills payloads, and its trainer has not said that it is done."""
    seq = job.submit("policy", 1, 16)
    job.leader.handle(RoomSeen(1_000_000), job.now)
    job.end(RequestId(seq, 0), 800_000)
    assert job.wished() == (
        1,
        "0 requests are open, and 16 wait for room in payloads; an instance serves 8 at its best",
    )
    job.say(Done(job.by_of("policy"), (RequestId(seq, 0),)))
    assert job.wished()[0] == 2


def test_what_the_policy_holds_for_a_version_that_arrives_is_wished_for_as_if_it_ran(job: Job) -> None:
    """It takes a slot as soon as the version is there: without an instance for it, it would wait once more.

    The slow instance has the version, and would be done with a response in minutes.
    """
    seq = job.submit("policy", 20)
    job.place(RequestId(seq, 0), "runner-0")
    assert job.wished()[0] == 3
    job.leader.handle(VersionsSeen("policy", PublishedVersions(2, (1, 2))), job.now)
    job.beat("runner-0", loads_in_s=4.0)
    job.beat(SLOW, version=2)
    job.leader.handle(ReportCame(SLOW, Report("log", 1, ())), job.now)
    placed = [each.request for each in job.decisions.look(job.leader, "policy", job.now) if isinstance(each, Place)]
    assert RequestId(seq, 1) not in placed
    held = job.decisions.held(job.leader, RequestId(seq, 1))
    assert held is not None
    assert held.runner == "runner-0"
    assert held.ready_s == pytest.approx(4.0, abs=0.1)
    assert job.wished() == (3, "20 requests are open; an instance serves 8 at its best")


def test_trainers_of_two_models_that_seed_have_each_a_limit_of_its_own(job: Job) -> None:
    """Each needs five, and keeps up with three and two. Which one has said so last does not count."""
    job.submit("policy", 5 * SLOTS)
    job.submit("critic", 5 * CRITIC_SLOTS)
    assert job.wished()[0] == 10
    job.keeps_up("policy", 3)
    assert job.wished()[0] == 3 + 5, "the other has no limit"
    job.keeps_up("critic", 2)
    assert job.wished()[0] == 3 + 2
    job.keeps_up("policy", 3)
    instances, reason = job.wished()
    assert instances == 3 + 2
    assert reason == (
        "critic: the trainer keeps up with 2; 5 would have requests; "
        "policy: the trainer keeps up with 3; 5 would have requests"
    )


def test_of_two_trainers_of_one_model_the_one_that_keeps_up_with_more_is_the_limit(job: Job) -> None:
    """Each has measured the same instances. What one of them has said long ago counts no more."""
    job.attach("second", "policy")
    job.submit("policy", 5 * SLOTS)
    job.keeps_up("second", 4)
    job.keeps_up("policy", 2)
    assert job.wished()[0] == 4
    job.now += 100.0
    job.keeps_up("policy", 2)
    assert job.wished(after_s=30.0)[0] == 2


@pytest.mark.parametrize("are_limited", [False, True])
def test_a_new_leader_takes_none_away_within_a_window_but_where_each_trainer_has_a_limit(
    job: Job, *, are_limited: bool
) -> None:
    job.submit("policy", 5 * SLOTS)
    assert job.wished()[0] == 5
    for index in range(5 * SLOTS):
        job.end(RequestId(job.by["critic"] + 1, index), 1)
    job.seq += 1
    fold(job.state, job.seq, Lead(2, "m"))
    job.lead()
    assert job.wished()[0] == 5, "nothing is open, and it has just begun"
    job.keeps_up("policy", 1)
    assert job.wished()[0] == 5, "the other model's trainer has said nothing"
    if are_limited:
        job.keeps_up("critic", 1)
        assert job.wished()[0] == 0
        return
    assert job.wished(after_s=118.0)[0] == 5
    assert job.wished(after_s=2.0)[0] == 0
