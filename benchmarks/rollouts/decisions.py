"""How long a leader's policies take to decide: `python -m benchmarks.rollouts.decisions [--docs] [--json FILE]`.

The leader and the fold are those of production, and are told what runners and trainers would say; no process, no NATS.
Between two looks a number of changes comes: half of them are responses that end, half are new requests, and what waited
for its first token has it. Measured is what a look costs: the view of the fleet, the choice of versions, and where
requests go. What it decides is told to the leader afterwards, which is not of the look; nor is what the log says of a
change, which the fold and the leader take in (*told*).

Requests fill the slots of all instances first, and the others wait. All policies of a case look at the same fleet, one
after the other, and each finds it full. A fleet is divided anew each second by `streamrl`, so the slowest look stands
beside the median. The first look of a leader learns what is there, and stands by itself.

Figures are the processor's time of one thread. Python's garbage collector is off: what a collection costs is not caused
by the look that it falls into.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Final
from unittest.mock import patch

import msgspec

from benchmarks.page import table, write
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    PolicyName,
    RequestEnded,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    TOKEN_BYTES,
    EngineStep,
    Frame,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
    attempt_key,
)
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    EntryFolded,
    FrameCame,
    HeartbeatCame,
    Place,
    PromptLoaded,
    ReportCame,
    VersionsSeen,
)
from tensorhub_rollout.decisions.decisions import Decisions, PolicyLimits
from tensorhub_rollout.log import fold as folding
from tensorhub_rollout.log.outcomes import Submitted
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.view import FleetView

LOG: Final = "log"
MODEL: Final = "policy"
GROUP_SIZE: Final = 8
GROUPS_AT_ONCE: Final = 256
TOKENS_MAX: Final = 1 << 20
LOOK_S: Final = LeaderLimits().look_s
MEDIAN_TOKENS: Final = 1000.0
BETWEEN, WITHIN = 0.8, 0.5
"""Deviations of log lengths between prompts, and within them."""
DOCS: Final = Path(__file__).parents[2] / "docs" / "design" / "rollouts" / "measured.md"


class Case(msgspec.Struct, frozen=True):
    """A fleet, and how much changes between two looks."""

    instances: int
    requests: int
    """Open ones."""
    changes: int
    looks: int = 200
    looks_before: int = 40
    """What is not measured."""


SLOTS: Final = 64
"""Of each instance."""
SMALL: Final = (Case(64, 10_000, 20), Case(64, 10_000, 100))
"""500,000 tokens a second end 500 responses of 1,000 tokens, which is 10 between two looks, and as many come."""
LARGE: Final = (
    Case(4096, 20_000, 250, 100, 16),
    Case(4096, 1_000_000, 250, 60, 8),
    Case(4096, 1_000_000, 10_000, 30, 4),
)
"""4,096 such instances make 6 million tokens a second, which ends 125 responses between two looks. Forty times as many
is more than they make: instances run dry while that is measured."""


class Measured(msgspec.Struct, frozen=True):
    """The looks of one policy. Times in ms."""

    policy: str
    case: Case
    view_p50_ms: float
    """Of a look, what the view costs."""
    look_p50_ms: float
    look_p99_ms: float
    look_max_ms: float
    placed: float
    """Requests a look."""
    first_ms: float
    """The first look of all."""
    told_us: float
    """What a change costs outside of the look: its part of an entry in the fold and the leader. In microseconds."""


class ModelledJob:
    """A leader with a fleet that is full of requests, and what changes of it."""

    def __init__(self, instances: int, requests: int) -> None:
        """Submit all, and place as much as fits."""
        self.requests, self.now, self._random = requests, 1.0, Random(1)
        self._seq, self._n, self._attached = 2, 0, 0
        self.told_s = 0.0
        """How long the fold and the leader took for what the log says, in all."""
        state = RolloutState("job")
        folding.fold(state, 1, Lead(1, "manager"))
        folding.fold(state, 2, Attach("main", MODEL, 0, "nonce"))
        limits = LeaderLimits(silence_s=1e9, stall_s=1e9, gather_s=0.0, resend_s=1e9, checkpoint_s=1e9)
        self.leader = Leader(state, LOG, limits, 0.0)
        self._tokens: dict[RequestId, int] = {}
        """How long each open response will be."""
        self.leader.handle(VersionsSeen(MODEL, PublishedVersions(1, (1,)), frozenset({1})), 0.0)
        steps = tuple(EngineStep(batch, 1000.0, 0.01 + 0.0005 * batch) for batch in (1, 8, 16, 32, 64) * 2)
        for number in range(instances):
            runner = f"runner-{number}"
            beat = RunnerHeartbeat(LOG, 1, 0, MODEL, SLOTS, 1, measured=steps, keeps_versions=True)
            self.leader.handle(HeartbeatCame(runner, beat), 0.0)
            self.leader.handle(ReportCame(runner, Report(LOG, 1, ())), 0.0)
        self.leader.handle(Tick(), self.now)
        self._submit(requests)

    def begin(self, policy: PolicyName) -> None:
        """Have a policy place from now on, and fill the slots."""
        self._attached += 1
        # The trainer decides that has attached last.
        self._append(Attach(f"placed-by-{self._attached}", MODEL, 0, f"nonce-{self._attached}", policy))
        first = iter([*self.leader.waiting.of_model(MODEL)])
        for runner, instance in self.leader.instances.items():
            free = SLOTS - len(instance.pending) - len(instance.executing)
            for _, of in zip(range(free), first, strict=False):
                self.leader.handle(Place(of, runner), self.now)
        self._generate()

    def change(self, changes: int) -> None:
        """Let as much change as between two looks."""
        self.now += LOOK_S
        self._generate()
        half = changes // 2
        executing = [of for each in self.leader.instances.values() for of in each.executing]
        self._end(self._random.sample(executing, min(half, len(executing))))
        self._submit(self.requests - len(self.leader.requests))

    def _append(self, entry: Attach | Submit | End) -> None:
        self._seq += 1
        began = time.thread_time()
        outcome = folding.fold(self.leader.state, self._seq, entry).outcome
        self.leader.handle(EntryFolded(outcome), self.now)
        self.told_s += time.thread_time() - began
        if isinstance(outcome, Submitted):
            mean = 0.0
            for of in outcome.opened:
                mean = self._random.gauss(0.0, BETWEEN) if of.index % GROUP_SIZE == 0 else mean
                drawn = MEDIAN_TOKENS * math.exp(mean + self._random.gauss(0.0, WITHIN))
                self._tokens[of] = max(2, round(drawn))

    def _submit(self, requests: int) -> None:
        groups = -(-requests // GROUP_SIZE)
        for first in range(0, groups, GROUPS_AT_ONCE):
            self._n += 1
            numbers = range(first, min(first + GROUPS_AT_ONCE, groups))
            named = tuple(
                GroupSubmitted(f"{self._n}-{each}", f"{self._n:032x}{each:032x}", GROUP_SIZE, 256, TOKENS_MAX)
                for each in numbers
            )
            self._append(Submit(SdkSender(2, self._n), named, Payload(f"{self._n:064x}", 1)))

    def _end(self, requests: Iterable[RequestId]) -> None:
        ended = tuple(RequestEnded(of, self._attempt(of), "stop", self._tokens.pop(of)) for of in requests)
        if ended:
            self._append(End(1, ended, Payload(f"{self._seq:063x}e", 1)))

    def _attempt(self, of: RequestId) -> Attempt:
        placement = self.leader.requests[of].placement
        assert placement is not None
        return placement.attempt

    def _generate(self) -> None:
        """Give each request that is pending and has a slot a part of its tokens, and nothing to the others."""
        for runner, instance in self.leader.instances.items():
            free = SLOTS - len(instance.executing)
            begin = [of for _, of in zip(range(free), instance.pending, strict=False)]
            if not begin:
                continue
            for of in begin:
                self.leader.handle(PromptLoaded(of, b"", Sampling(TOKENS_MAX, 7), VersionRule()), self.now)
            keys = array("q", [attempt_key(self._attempt(of)) for of in begin]).tobytes()
            made = [self._random.randrange(1, self._tokens[of]) for of in begin]
            starts, counts = bytes(8 * len(begin)), array("q", made).tobytes()
            tokens = bytes(TOKEN_BYTES * sum(made))
            self.leader.handle(FrameCame(runner, Frame(LOG, 1, 1, keys, starts, counts, tokens, tokens)), self.now)


class MeasuredLooks:
    """The looks of one policy at a job."""

    def __init__(self, job: ModelledJob) -> None:
        """Have looked at nothing yet."""
        self._job, self._view = job, job.leader.view
        self._decisions = Decisions(PolicyLimits(), _raise)
        self.views_s: list[float] = []
        self.looks_s: list[float] = []
        self.placed = 0

    def look(self) -> None:
        """Look once, and tell the leader what is wanted."""
        job = self._job
        with patch.object(job.leader, "view", self._timed):
            began = time.thread_time()
            actions = [*self._decisions.look(job.leader, MODEL, job.now)]
            self.looks_s.append(time.thread_time() - began)
        self.placed += len(actions)
        for action in actions:
            job.leader.handle(action, job.now)

    def _timed(self, model: str) -> FleetView:
        began = time.thread_time()
        view = self._view(model)
        self.views_s.append(time.thread_time() - began)
        return view


def measure(job: ModelledJob, case: Case, policy: PolicyName) -> Measured:
    """Look at a fleet again and again."""
    job.begin(policy)
    gc.collect()
    # What is there is not gone through again by what is collected later on.
    gc.freeze()
    looks = MeasuredLooks(job)
    first_s, told_s = 0.0, job.told_s
    for number in range(case.looks_before + case.looks):
        if number == case.looks_before:
            first_s = looks.looks_s[0]
            looks.views_s, looks.looks_s, looks.placed = [], [], 0
            told_s = job.told_s
        job.change(case.changes)
        looks.look()
    ordered = sorted(looks.looks_s)
    told_us = 1e6 * (job.told_s - told_s) / (case.looks * case.changes)
    times = statistics.median(looks.views_s), statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1]
    view_p50, p50, p99, most, first = (round(1000 * each, 3) for each in (*times, first_s))
    placed = round(looks.placed / len(ordered), 1)
    return Measured(policy, case, view_p50, p50, p99, most, placed, first, round(told_us, 1))


def measure_all(cases: Sequence[Case], policies: Sequence[PolicyName]) -> Iterator[Measured]:
    """Measure policies in cases; those of equal fleets have one job."""
    gc.disable()
    for (instances, requests), alike in groupby(cases, lambda each: (each.instances, each.requests)):
        with patch.object(folding, "OPEN_REQUESTS_MAX", max(folding.OPEN_REQUESTS_MAX, 2 * requests)):
            job = ModelledJob(instances, requests)
            for case in alike:
                for policy in policies:
                    yield measure(job, case, policy)
    gc.enable()


def _raise(what: str, why: Exception) -> None:
    raise RuntimeError(what) from why


def text(found: Sequence[Measured]) -> str:
    """Return the table."""
    head = ["policy", "instances", "open", "changes", "placed", "view p50, ms", "look p50, ms", "p99", "max", "first"]
    head.append("told, µs a change")
    return table(head, [[*_row(each)] for each in found])


def _row(each: Measured) -> Iterator[str]:
    yield each.policy
    yield from (f"{number:,}" for number in (each.case.instances, each.case.requests, each.case.changes))
    yield f"{each.placed:g}"
    times_ms = each.view_p50_ms, each.look_p50_ms, each.look_p99_ms, each.look_max_ms
    yield from (f"{ms:.2f}" for ms in times_ms)
    yield f"{each.first_ms:.0f}"
    yield f"{each.told_us:.0f}"


def main() -> None:
    """Measure each policy in each case, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts.decisions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--policies", default="arrival,rlboost,streamrl", help="some of arrival,rlboost,streamrl")
    parser.add_argument("--small", action="store_true", help="the smaller fleet alone, in half a minute")
    parser.add_argument(
        "--large", action="store_true", help="the larger fleet alone, in some minutes and 6 GiB of memory"
    )
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    options = parser.parse_args()
    cases = SMALL if options.small else LARGE if options.large else (*SMALL, *LARGE)
    found = []
    for each in measure_all(cases, options.policies.split(",")):
        found.append(each)
        sys.stderr.write(" ".join(_row(each)) + "\n")
    sys.stdout.write(text(found) + "\n")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if options.docs:
        write("decisions", text(found), DOCS)


if __name__ == "__main__":
    main()
