"""Benchmarks of the policies of placement: what is drawn, what runs add up to, and real jobs beside simulated ones."""

from itertools import islice
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from benchmarks.demo_rl import counted_engine
from benchmarks.rollouts import calibrate, drawn_engine, policies
from benchmarks.rollouts.calibrate import SimulatedJob, scenario_of, sentence, simulated
from benchmarks.rollouts.drawn_engine import Drawn
from benchmarks.rollouts.policies import Compared, ratios, table
from benchmarks.rollouts.trained_job import Took, Workload, step_model

from tensorhub_common.protocol.rollout.entries import Attempt, PolicyName
from tensorhub_common.protocol.rollout.messages import EngineStep, Finished, Sampling
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines.engine import Engine, EngineCapacity, EngineFacts

TOKEN = bytes(4)
FACTS = EngineFacts("fake", (), "cpu", "float32", is_exact=True, decode_s=(), prefill_s=None)


class FakeEngine:
    """Makes a token of each attempt in a step, until it has as many as its sampling allows."""

    capacity = EngineCapacity(8, 1024, 4096)
    facts = FACTS

    def __init__(self) -> None:
        self.left: dict[Attempt, int] = {}

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        assert prompt
        self.left[attempt] = sampling.tokens_max - len(tokens) // 4

    def stop(self, attempt: Attempt) -> None:
        self.left.pop(attempt, None)

    def step(self) -> tuple[StepTokens, ...]:
        made = []
        for attempt in [*self.left]:
            self.left[attempt] -= 1
            is_last = not self.left[attempt]
            made.append(StepTokens(attempt, TOKEN, TOKEN, Finished(attempt, 0, "length") if is_last else None))
            if is_last:
                del self.left[attempt]
        return tuple(made)

    def weights_changed(self) -> None:
        """Have none."""

    @property
    def has_work(self) -> bool:
        return bool(self.left)


def engine(folder: Path, drawn: Drawn) -> Engine:
    (folder / drawn_engine.FILE).write_bytes(msgspec.json.encode(drawn))
    return drawn_engine.DrawnEngine(FakeEngine(), folder, "runner-0")


def test_a_response_ends_where_it_was_drawn_and_its_tokens_and_steps_are_kept(tmp_path: Path) -> None:
    made = engine(tmp_path, Drawn({11: 5, 12: 3}, StepModel(0.002, 0.0, 0.0)))
    one, other = Attempt(1, 1), Attempt(1, 2)
    made.begin(one, TOKEN * 2, b"", Sampling(100, 11))
    made.begin(other, TOKEN * 2, TOKEN, Sampling(100, 12))
    ends = {}
    for step in range(5):
        for each in made.step():
            if each.finished is not None:
                ends[each.attempt] = step, each.finished.reason
    # The other one has a token already.
    assert ends == {one: (4, "stop"), other: (1, "stop")}
    assert not made.has_work
    assert counted_engine.tokens_made(tmp_path) == 5 + 2
    kept = drawn_engine.steps_of(tmp_path)
    # The first step computes contexts, and the last one has none behind it.
    assert [(each.batch, each.context_tokens) for each in kept] == [(2, 3.5), (1, 4.0), (1, 5.0)]
    assert all(each.seconds >= 0.002 for each in kept)


def test_the_pause_of_an_engine_that_gave_all_away_is_no_step(tmp_path: Path) -> None:
    made = engine(tmp_path, Drawn({11: 9, 12: 9}, StepModel(0.001, 0.0, 0.0)))
    for number, seed in enumerate((11, 12)):
        made.begin(Attempt(1, number), TOKEN * 2, b"", Sampling(100, seed))
        for _ in range(3):
            made.step()
        # A trainer's engine that has generated for long enough: it begins again in its next step.
        made.stop(Attempt(1, number))
    # Of three steps the first computes a context, and the last one has none behind it.
    assert [each.context_tokens for each in drawn_engine.steps_of(tmp_path)] == [3.0, 3.0]


def test_a_simulated_trainer_seeds_for_as_long_as_a_real_one_in_its_first_step() -> None:
    workload = Workload(runners=2, steps=1, groups=8, kills=0, seeds=True, seed_first_s=0.5)
    steps, tokens = StepModel(0.02, 0.001, 0.0), sum(workload.lengths().values())
    real = msgspec.structs.replace(took("rlboost", 0, 20.0), engine=steps, tokens=tokens, waited_s=18.0)
    report = SimulatedJob(scenario_of(workload, real), workload, "rlboost").run()
    # All machines serve when it begins, as there. What its engine has goes to the others with the next frame.
    assert 0.5 <= report.seeded_s < 0.7


def test_lengths_and_kills_are_equal_with_each_policy_and_differ_by_seed() -> None:
    one, other = Workload(steps=2, seed=3), Workload(steps=2, seed=4)
    assert one.lengths() == Workload(steps=2, seed=3).lengths() != other.lengths()
    assert len(one.lengths()) == 2 * one.step_responses
    assert [after for after, _ in one.killed()] == [32, 64, 96]
    # After so many the same prompts come again.
    assert one.prompt(1) == one.prompt(1 + one.prompts) != one.prompt(2)


def test_what_steps_take_is_fitted_without_a_negative_part() -> None:
    steps = [EngineStep(batch, context, 0.01 + 0.002 * batch) for batch in (1, 2, 4, 8) for context in range(5, 30)]
    found = step_model(steps)
    assert found is not None
    assert (found.fixed_s, found.each_s) == pytest.approx((0.01, 0.002))
    assert found.attention_s == pytest.approx(0.0, abs=1e-9)
    falling = step_model([msgspec.structs.replace(each, seconds=0.05 - 0.002 * each.batch) for each in steps])
    assert falling is not None
    assert min(falling.each_s, falling.attention_s) >= 0.0
    assert step_model(steps[:10]) is None


def took(policy: PolicyName, seed: int, seconds: float) -> Took:
    return Took(
        policy=policy,
        seed=seed,
        seconds=seconds,
        tokens=1000,
        made=1010,
        steps=[seconds / 2, seconds / 2],
        waited_s=1.0,
        seeded_s=0.0,
        ages={0: 500, 1: 500},
        moved=2,
        computed_by_moves=30,
        computed_by_updates=40,
        kills=[],
        back_s=[],
        load_s=[0.2],
        publish_s=[0.03],
    )


def test_policies_are_compared_within_a_round() -> None:
    runs = [took("arrival", 0, 10.0), took("rlboost", 0, 20.0), took("arrival", 1, 30.0), took("rlboost", 1, 30.0)]
    found = Compared(Workload(), runs)
    # The second round was slower for both, which is no policy's merit.
    assert ratios(found, "rlboost") == [0.5, 1.0]
    row = next(line for line in table(found).splitlines() if "rlboost" in line)
    assert "0.75" in row
    assert "1.00%" in row
    assert "streamrl" not in table(found)


def test_a_job_is_simulated_as_it_was_with_its_lengths_and_kills() -> None:
    workload = Workload(runners=2, steps=2, groups=8)
    steps = StepModel(0.02, 0.001, 0.0)
    tokens = sum(workload.lengths().values())
    real = took("rlboost", 0, 20.0)
    real = msgspec.structs.replace(real, engine=steps, tokens=tokens, waited_s=18.0, kills=[3.0], back_s=[4.0])
    found = simulated(workload, real)
    # Two engines with all slots in use are the bound, and a quarter of it is there in any case.
    bound = 2 * workload.slots / steps.seconds(workload.slots, 0.0)
    assert bound / 4 < found.tokens_per_s < bound
    assert sum(found.steps) == pytest.approx(tokens / found.tokens_per_s)
    calm = simulated(msgspec.structs.replace(workload, kills=0), real)
    assert calm.tokens_per_s > found.tokens_per_s
    assert "2 real jobs" in sentence([found, calm])


def test_a_job_without_steps_has_the_lengths_of_its_stream_and_is_simulated_without_the_term() -> None:
    workload = policies.streamed(Workload(runners=2, steps=1, kills=0))
    lengths = workload.lengths()
    assert len(lengths) == workload.group_size * workload.groups * (workload.steps + workload.ahead)
    tokens = sum(islice(lengths.values(), workload.steps * workload.step_responses))
    real = msgspec.structs.replace(took("arrival", 0, 30.0), engine=workload.step, tokens=tokens, waited_s=25.0)
    real = msgspec.structs.replace(real, steps=[30.0 / workload.steps] * workload.steps)
    less = msgspec.structs.replace(real, terms_off=frozenset({"activation"}))
    assert simulated(workload, real).tokens_per_s > 1.1 * simulated(workload, less).tokens_per_s
    found = Compared(workload, [real, less])
    assert ratios(found, "arrival without activation") == [1.0]
    said = table(found)
    assert "arrival without activation" in said
    assert "1.00%" not in said, "some of what was made is not done at the end"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds is 0, and must be at least 1"),
        (["--kills", "-1"], "--kills is -1, and must be at least 0"),
        (["--from", "no-such-file"], "no-such-file has no runs"),
    ],
)
@pytest.mark.parametrize("benchmark", [policies, calibrate])
def test_a_benchmark_says_what_it_can_not_do(
    benchmark: ModuleType,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert said in f"{capsys.readouterr().err}{ended.value}"
