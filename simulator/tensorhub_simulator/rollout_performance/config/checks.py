"""What is wrong with a scenario, in sentences, and the limits of its numbers. Pure."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, Spot
from tensorhub_simulator.rollout_performance.config.weights import wrong_with

STEPS_MAX: Final = 1000
STEPS_AHEAD_MAX: Final = 4
REQUESTS_MAX: Final = 65_536
INSTANCES_MAX: Final = 4096
SLOTS_MAX: Final = 4096
TOKENS_MAX: Final = 1_000_000
NUMBER_MAX: Final = 1e12
ROUNDS_MAX: Final = 8.0
PARTS_MIN: Final = 0.01
GROWS_MIN: Final = 0.5
GROWS_MAX: Final = 2.0
SECONDS_MAX: Final = 1e7
"""A job that is not over after so much virtual time hangs."""
MESSAGES_LEAST_S: Final = 0.01
MESSAGES_MOST_S: Final = 60.0


def wrongs(scenario: Scenario) -> Iterator[str]:
    """Yield what is wrong, in sentences."""
    trainer, lengths, spot, engine = scenario.trainer, scenario.lengths, scenario.spot, scenario.engine
    messages, frames_s = scenario.messages, scenario.messages.frames_s
    repacked = trainer.repack.requests
    for what, number, least, most in (
        ("trainer.steps", trainer.steps, 1, STEPS_MAX),
        ("trainer.groups", trainer.groups, 1, REQUESTS_MAX),
        ("trainer.group_size", trainer.group_size, 1, REQUESTS_MAX),
        ("trainer.groups times trainer.group_size", trainer.groups * trainer.group_size, 1, REQUESTS_MAX),
        ("trainer.micro_batch", trainer.micro_batch, 1, trainer.groups * trainer.group_size),
        ("trainer.engines", trainer.engines, 1, INSTANCES_MAX),
        ("trainer.steps_ahead", trainer.steps_ahead, 0, 0 if trainer.seeds else STEPS_AHEAD_MAX),
        ("trainer.token_s", trainer.token_s, 0.0, NUMBER_MAX),
        ("trainer.publish_s", trainer.publish_s, 0.0, NUMBER_MAX),
        ("trainer.seed_first_s", trainer.seed_first_s, 0.0, NUMBER_MAX),
        ("trainer.rounds.prompts", trainer.rounds.prompts, 1.0, ROUNDS_MAX),
        ("trainer.rounds.responses", trainer.rounds.responses, 1.0, ROUNDS_MAX),
        ("trainer.repack.parts", trainer.repack.parts, PARTS_MIN, ROUNDS_MAX),
        ("trainer.repack.requests", 1 if repacked is None else repacked, 1, SLOTS_MAX),
        ("trainer.seed_gain", trainer.seed_gain, 1e-3, NUMBER_MAX),
        ("lengths.prompt", lengths.prompt, 1, TOKENS_MAX),
        ("lengths.prompts", trainer.groups if lengths.prompts is None else lengths.prompts, trainer.groups, NUMBER_MAX),
        ("lengths.longest", lengths.longest, 1, TOKENS_MAX),
        ("lengths.median", lengths.median, 1, lengths.longest),
        ("lengths.between", lengths.between, 0.0, 10.0),
        ("lengths.within", lengths.within, 0.0, 10.0),
        ("lengths.grows", lengths.grows, GROWS_MIN, GROWS_MAX),
        ("spot.boot_s", spot.boot_s, 0.0, NUMBER_MAX),
        ("spot.load_s", spot.load_s or 0.0, 0.0, NUMBER_MAX),
        ("spot.notice_s", spot.notice_s, 0.0, NUMBER_MAX),
        ("price.reserved", scenario.price.reserved, 0.0, NUMBER_MAX),
        ("price.spot", scenario.price.spot, 0.0, NUMBER_MAX),
        ("pause_s", scenario.pause_s, 0.0, NUMBER_MAX),
        ("messages.frames_s", MESSAGES_LEAST_S if frames_s is None else frames_s, MESSAGES_LEAST_S, MESSAGES_MOST_S),
        ("messages.progress_s", messages.progress_s, MESSAGES_LEAST_S, MESSAGES_MOST_S),
        ("messages.heartbeat_s", messages.heartbeat_s, MESSAGES_LEAST_S, MESSAGES_MOST_S),
        ("messages.look_s", messages.look_s, MESSAGES_LEAST_S, MESSAGES_MOST_S),
    ):
        if not least <= number <= most:
            yield f"{what} is {number:g}, and must be from {least:g} to {most:g}"
    if trainer.streams and trainer.seeds:
        yield "trainer.streams goes with a trainer that does not seed: set trainer.seeds to false"
    needed = lengths.prompt + lengths.longest
    yield from _wrongs_of_engine("engine", engine, needed)
    yield from _wrongs_of_length(scenario)
    if (spot.load_s is None) == (scenario.weights is None):
        yield "spot.load_s and weights exclude each other: say how long a version takes, or what moves"
    yield from _wrongs_of_far(scenario, needed)
    if scenario.weights is not None:
        wrong = wrong_with(scenario.weights, spot.most + trainer.engines, scenario.far)
        if wrong is not None:
            yield f"weights: {wrong}"
    names = [each.what for each in scenario.vary]
    if "" in names or len({*names}) < len(names):
        yield "each of vary needs a `what` of its own, by which it is told"
    yield from _wrongs_of_spot(spot)
    if not scenario.systems:
        yield "systems is empty: name at least one, or leave it out"
    is_other = trainer.seeds or trainer.streams
    if spot.delta_from is not None and (is_other or not 1 <= spot.delta_from <= spot.most):
        yield (
            f"spot.delta_from is {spot.delta_from}, and must be from 1 to the {spot.most} that there are, with "
            "trainer.seeds: false and trainer.streams: false"
        )


def _wrongs_of_length(scenario: Scenario) -> Iterator[str]:
    """A job that takes too long, even where each response is one token."""
    trainer, engine = scenario.trainer, scenario.engine
    trained_s = trainer.groups * trainer.group_size * trainer.token_s + trainer.publish_s
    generated_s = scenario.lengths.prompt / engine.prefill_tokens_per_s + engine.fixed_s + engine.each_s
    least_s = trainer.steps * (trained_s + (0.0 if trainer.streams else generated_s))
    if least_s > SECONDS_MAX:
        yield (
            f"the job takes {least_s:.3g} s at least, and {SECONDS_MAX:.3g} s are simulated at most: take fewer steps, "
            "or less for trainer.token_s, trainer.publish_s and what an engine takes"
        )


def _wrongs_of_engine(path: str, engine: EngineCosts, needed: int) -> Iterator[str]:
    for what, number, least, most in (
        ("slots", engine.slots, 1, SLOTS_MAX),
        ("fixed_s", engine.fixed_s, 1e-9, NUMBER_MAX),
        ("each_s", engine.each_s, 0.0, NUMBER_MAX),
        ("attention_s", engine.attention_s, 0.0, NUMBER_MAX),
        ("prefill_tokens_per_s", engine.prefill_tokens_per_s, 1e-3, NUMBER_MAX),
    ):
        if not least <= number <= most:
            yield f"{path}.{what} is {number:g}, and must be from {least:g} to {most:g}"
    if engine.kv_tokens is not None and not needed <= engine.kv_tokens <= NUMBER_MAX:
        yield f"{path}.kv_tokens is {engine.kv_tokens}, and the longest response needs {needed} with its prompt"


def _wrongs_of_far(scenario: Scenario, needed: int) -> Iterator[str]:
    far = scenario.far
    if far is None:
        return
    if scenario.weights is None:
        yield "far needs weights: they are what the line between the sites carries"
    if not 1 <= far.instances <= INSTANCES_MAX:
        yield f"far.instances is {far.instances}, and must be from 1 to {INSTANCES_MAX}"
    if not 0 <= far.price <= NUMBER_MAX:
        yield f"far.price is {far.price:g}, and must be from 0 to {NUMBER_MAX:g}"
    if far.engine is not None:
        yield from _wrongs_of_engine("far.engine", far.engine, needed)


def _wrongs_of_spot(spot: Spot) -> Iterator[str]:
    if spot.recorded:
        yield "spot.recorded comes from spot.trace, and stands in no file"
    if spot.trace is not None:
        if spot.changes:
            yield "spot.changes and spot.trace exclude each other"
        if spot.delta_from is not None:
            yield "spot.delta_from goes with spot.changes: of a trace no machine comes again that was let go"
        if not 1 <= spot.instances <= INSTANCES_MAX:
            yield f"spot.instances is {spot.instances}, and must be from 1 to {INSTANCES_MAX} with a trace"
        if not 0 <= spot.trace_from_s <= NUMBER_MAX:
            yield f"spot.trace_from_s is {spot.trace_from_s:g}, and must be from 0 to {NUMBER_MAX:g}"
        return
    if spot.instances:
        yield "spot.instances goes with spot.trace: say how many there are in spot.changes"
    yield from _wrongs_of_times([at for at, _ in spot.changes])
    if any(not 0 <= count <= INSTANCES_MAX for _, count in spot.changes):
        yield f"spot.changes must have from 0 to {INSTANCES_MAX} instances"


def _wrongs_of_times(times: list[float]) -> Iterator[str]:
    if not times or times[0] != 0:
        yield "spot.changes must begin with what there is at 0 seconds, such as [0, 4]"
    if not all(0 <= at <= NUMBER_MAX for at in times):
        yield f"the times of spot.changes must be from 0 to {NUMBER_MAX:g} seconds"
    if any(later <= earlier for earlier, later in pairwise(times)):
        yield "the times of spot.changes must rise"
