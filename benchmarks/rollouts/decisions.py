"""How long a leader's policies take to decide: `python -m benchmarks.rollouts.decisions [--docs] [--json FILE]`.

The leader and the fold are those of production, and are told what runners and trainers would say; no process, no NATS.
Between two looks a number of changes comes: half of them are responses that end, half are new requests, and what waited
for its first token has it. Measured is what a look costs: the view of the fleet, the choice of versions, and where
requests go. It is told to the leader afterwards, which is not of the look.

A fleet is divided anew each second by `streamrl`, so the slowest look stands beside the median. Figures are the
processor's time of one thread. Python's garbage collector is off during a look: what a collection costs is not caused
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
    slots: int = 64
    looks: int = 200
    looks_before: int = 40
    """What is not measured."""


CASES: Final = (Case(64, 10_000, 20), Case(64, 10_000, 100), Case(4096, 1_000_000, 10_000, looks=60, looks_before=8))
"""500,000 tokens a second end 500 responses of 1,000 tokens, which is 10 between two looks, and as many come."""


class Measured(msgspec.Struct, frozen=True):
    """The looks of one policy. Times in ms."""

    policy: str
    case: Case
    view_p50_ms: float
    """Of this, what the view costs."""
    look_p50_ms: float
    look_p99_ms: float
    look_max_ms: float
    placed: float
    """Requests a look."""


class ModelledJob:
    """A leader with a fleet that is full of requests, and what changes of it."""

    def __init__(self, case: Case, policy: PolicyName) -> None:
        """Submit all, and place as much as fits."""
        self.case, self.now, self._random = case, 1.0, Random(1)
        self._seq, self._n = 2, 0
        state = RolloutState("job")
        folding.fold(state, 1, Lead(1, "manager"))
        folding.fold(state, 2, Attach("main", MODEL, 0, "nonce", policy))
        limits = LeaderLimits(silence_s=1e9, stall_s=1e9, gather_s=0.0, resend_s=1e9, checkpoint_s=1e9)
        self.leader = Leader(state, LOG, limits, 0.0)
        self._tokens: dict[RequestId, int] = {}
        """How long each open response will be."""
        self.leader.handle(VersionsSeen(MODEL, PublishedVersions(1, (1,)), frozenset({1})), 0.0)
        steps = tuple(EngineStep(batch, 1000.0, 0.01 + 0.0005 * batch) for batch in (1, 8, 16, 32, 64) * 2)
        for number in range(case.instances):
            runner = f"runner-{number}"
            beat = RunnerHeartbeat(LOG, 1, 0, MODEL, case.slots, 1, measured=steps, keeps_versions=True)
            self.leader.handle(HeartbeatCame(runner, beat), 0.0)
            self.leader.handle(ReportCame(runner, Report(LOG, 1, ())), 0.0)
        self.leader.handle(Tick(), self.now)
        self._submit(case.requests)
        first = iter([*self.leader.waiting.of_model(MODEL)])
        for runner in [*self.leader.instances]:
            for _, of in zip(range(case.slots), first, strict=False):
                self.leader.handle(Place(of, runner), self.now)
        self._generate()

    def change(self) -> None:
        """Let as much change as between two looks."""
        self.now += LOOK_S
        self._generate()
        half = self.case.changes // 2
        executing = [of for each in self.leader.instances.values() for of in each.executing]
        self._end(self._random.sample(executing, min(half, len(executing))))
        self._submit(self.case.requests - len(self.leader.requests))

    def _append(self, entry: Submit | End) -> None:
        self._seq += 1
        outcome = folding.fold(self.leader.state, self._seq, entry).outcome
        self.leader.handle(EntryFolded(outcome), self.now)
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
            free = self.case.slots - len(instance.executing)
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


def measure(case: Case, policy: PolicyName) -> Measured:
    """Look at a fleet again and again."""
    with patch.object(folding, "OPEN_REQUESTS_MAX", max(folding.OPEN_REQUESTS_MAX, 2 * case.requests)):
        job = ModelledJob(case, policy)
        decisions = Decisions(PolicyLimits(), _raise)
        # A leader that begins learns what is there in its first looks.
        for _ in range(case.looks_before):
            job.change()
            for wanted in [*decisions.look(job.leader, MODEL, job.now)]:
                job.leader.handle(wanted, job.now)
        gc.collect()
        gc.freeze()
        gc.disable()
        views, looks, placed = [], [], 0
        for _ in range(case.looks):
            job.change()
            began = time.thread_time()
            job.leader.view(MODEL)
            views.append(time.thread_time() - began)
            began = time.thread_time()
            actions = [*decisions.look(job.leader, MODEL, job.now)]
            # Its own view found nothing changed since the one before.
            looks.append(time.thread_time() - began + views[-1])
            placed += len(actions)
            for action in actions:
                job.leader.handle(action, job.now)
        gc.enable()
        gc.unfreeze()
    ordered = sorted(looks)
    times = statistics.median(views), statistics.median(looks), ordered[int(0.99 * len(ordered))], ordered[-1]
    view_p50, p50, p99, most = (round(1000 * each, 3) for each in times)
    return Measured(policy, case, view_p50, p50, p99, most, round(placed / len(looks), 1))


def _raise(what: str, why: Exception) -> None:
    raise RuntimeError(what) from why


def text(found: Sequence[Measured]) -> str:
    """Return the table."""
    head = ["policy", "instances", "open", "changes", "placed", "view p50, ms", "look p50, ms", "p99", "max"]
    return table(head, [[*_row(each)] for each in found])


def _row(each: Measured) -> Iterator[str]:
    yield each.policy
    yield from (f"{number:,}" for number in (each.case.instances, each.case.requests, each.case.changes))
    yield f"{each.placed:g}"
    yield from (f"{ms:.2f}" for ms in (each.view_p50_ms, each.look_p50_ms, each.look_p99_ms, each.look_max_ms))


def main() -> None:
    """Measure each policy in each case, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts.decisions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--policies", default="arrival,rlboost,streamrl", help="some of arrival,rlboost,streamrl")
    parser.add_argument("--small", action="store_true", help="the smaller fleet alone, in half a minute")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    options = parser.parse_args()
    cases = CASES[:2] if options.small else CASES
    found = [measure(case, policy) for case in cases for policy in options.policies.split(",")]
    sys.stdout.write(text(found) + "\n")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if options.docs:
        write("decisions", text(found), DOCS)


if __name__ == "__main__":
    main()
