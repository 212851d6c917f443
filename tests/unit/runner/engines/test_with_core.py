"""An engine that is driven by the runner's core: what it begins and stops, and what reaches the leader."""

import numpy as np
import torch
from tests.kit.tiny_engines import Desk, engine_of, fill, ids, tiny

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    Assign,
    AssignRequest,
    FrameResult,
    HeartbeatResult,
    PublishedVersions,
    Sampling,
    VersionRule,
)
from tensorhub_runner.core.runner import Runner, RunnerLimits
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AssignCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    RunnerInput,
    SendFrame,
    Stop,
    WeightsChanging,
    WeightsLoaded,
)
from tensorhub_runner.engines.engine import Engine

PROMPT = [3, 1, 4, 1, 5]
SAMPLING = Sampling(9, 26)


class Driven:
    """A runner and its engine. Each step takes a second, so that each sends its frame."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.engine, self.now = engine, 0.0
        self.core = Runner(name, "policy", 1, RunnerLimits(), self.now)
        self.core.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(0))), self.now)
        self.tokens, self.logprobs, self.reasons = list[int](), list[float](), list[str]()

    def handle(self, event: RunnerInput) -> None:
        self.now += 1.0
        for effect in self.core.handle(event, self.now):
            match effect:
                case Begin():
                    self.engine.begin(effect.attempt, effect.prompt, effect.tokens, effect.sampling)
                case Stop():
                    self.engine.stop(effect.attempt)
                case SendFrame():
                    self.tokens += np.frombuffer(effect.frame.tokens, "<i4").tolist()
                    self.logprobs += np.frombuffer(effect.frame.logprobs, "<f4").tolist()
                    self.reasons += [each.reason for each in effect.frame.finished]
                    self.core.handle(FrameAnswered(FrameResult(self.core.log, 1, effect.frame.number)), self.now)
                case _:
                    pass
        self.core.check()

    def assign(
        self, attempt: Attempt, rule: VersionRule, tokens: list[int], logprobs: list[float], index: int = 0
    ) -> None:
        prefix = np.array(logprobs, "<f4").tobytes()
        assign = Assign(RequestId(1, index), attempt, ids(PROMPT), SAMPLING, rule, len(tokens), 0, ids(tokens), prefix)
        self.handle(AssignCame(AssignRequest("log", 1, 1, PublishedVersions(1, (1,)), (assign,))))

    def step(self) -> None:
        self.handle(EngineStepped(self.engine.step()))


def test_an_attempt_that_a_leader_moves_goes_on_where_it_was() -> None:
    model = tiny("llama")
    (right,) = Desk(engine_of(model)).generate((PROMPT, SAMPLING))
    here, there = Driven("runner-0", engine_of(model)), Driven("runner-1", engine_of(model))
    for each in (here, there):
        each.handle(WeightsLoaded(1, "root-1"))
    here.assign(Attempt(1, 1), VersionRule(), [], [])
    for _ in range(4):
        here.step()
    here.handle(AbortCame(AbortRequest("log", 1, 1, stop=(Attempt(1, 1),))))
    assert not here.engine.has_work
    there.assign(Attempt(1, 2), VersionRule(), here.tokens, here.logprobs)
    while there.engine.has_work:
        there.step()
    assert here.tokens + there.tokens == right.tokens
    assert here.logprobs + there.logprobs == right.logprobs
    assert (here.reasons, there.reasons) == ([], ["length"])


def test_an_attempt_that_keeps_its_cache_goes_on_over_a_load() -> None:
    model = tiny("llama")
    driven = Driven("runner-0", engine_of(model))
    driven.handle(WeightsLoaded(1, "root-1"))
    driven.assign(Attempt(1, 1), VersionRule(staleness=1, on_update="keep"), [], [])
    for _ in range(4):
        driven.step()
    driven.handle(WeightsChanging())
    with torch.no_grad():
        fill(model, 2)
    driven.engine.weights_changed()
    driven.handle(WeightsLoaded(2, "root-2"))
    while driven.engine.has_work:
        driven.step()
    assert (len(driven.tokens), driven.reasons) == (SAMPLING.tokens_max, ["length"])
    assert [run.kv for run in driven.core.held[Attempt(1, 1)].runs] == ["fresh", "kept"]


def test_of_an_attempt_that_kept_its_cache_and_lost_it_the_run_says_from_where_on_it_was_computed_again() -> None:
    """Two prompts of 5 tokens and responses of 9 don't fit into 18 places: the later one gives its own up."""
    model = tiny("llama")
    driven = Driven("runner-0", engine_of(model, cache_tokens_max=18))
    driven.handle(WeightsLoaded(1, "root-1"))
    attempts = [Attempt(1, 1), Attempt(1, 2)]
    for index, attempt in enumerate(attempts):
        driven.assign(attempt, VersionRule(staleness=1, on_update="keep"), [], [], index)
    for _ in range(4):
        driven.step()
    driven.handle(WeightsChanging())
    with torch.no_grad():
        fill(model, 2)
    driven.engine.weights_changed()
    driven.handle(WeightsLoaded(2, "root-2"))
    while driven.engine.has_work:
        driven.step()
    first, second = (driven.core.held[attempt] for attempt in attempts)
    assert [run.kv for run in first.runs] == ["fresh", "kept"]
    assert [run.kv for run in second.runs] == ["fresh", "kept", "recomputed"]
    assert [run.version for run in second.runs] == [1, 2, 2]
