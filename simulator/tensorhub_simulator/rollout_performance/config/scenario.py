"""A job of rollouts and its machines, as a YAML file says it. Pure.

A mistake is told in one sentence (`ScenarioError`) before anything is simulated.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Literal, get_args

import msgspec
import yaml
from msgspec.structs import replace

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.rollout.messages import OnUpdate
from tensorhub_simulator.performance import strict_yaml
from tensorhub_simulator.performance.variation import Variation, put
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.spot_trace import SpotChange, TraceError, recorded, scaled
from tensorhub_simulator.rollout_performance.config.weights import FarSite, Weights, wrong_with

System = Literal[
    "reserved",
    "disaggregated",
    "recompute",
    "rlboost",
    "streamrl",
    "arrival",
    "siblings",
    "oracle",
    "waitall",
    "rollpacker",
    "seer",
    "rounds",
    "graded",
    "polyrl",
    "laminar",
]
"""What drives the rollouts. `reserved`: the trainer's own engines alone, which make all responses before it trains;
where they only train, the whole fleet does both in turn. `disaggregated`: the trainer's GPUs only train, and begin once
others have made all responses of a step. `recompute`: RLBoost's policy, and what a lost machine had made is lost with
it. `rlboost`, `streamrl`, `arrival`: a policy of the rollout manager. `siblings`: all are placed at once, balanced in
time by what earlier responses to a prompt let expect. `oracle`: the same, by true lengths. `waitall`: all machines make
a step's responses, placed in turns, and then train it. `rollpacker`: the same machines in rounds of short and of long
responses (`rounds`). `seer`: one response of each group first, then the longest, by what siblings tell. `rounds`:
`arrival`, and a trainer that takes rounds. `graded`: the same, and rounds have prompts of about equal lengths once all
have come (`lengths.prompts`). `polyrl`: what the code released for RLBoost does. `laminar`: each instance takes new
weights by itself once its batch has ended, and what is left of batches is packed onto few (`laminar`)."""

SYSTEMS_FIRST: Final[tuple[System, ...]] = get_args(System)[:8]
"""What a scenario is run with that names no systems."""

Term = Literal["activation", "admission", "migration", "retention", "seeding"]
"""Of the policy `arrival`, as a manager's setting names it: what reads settings is not pure."""

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


class ScenarioError(TensorHubError):
    """A scenario can't be simulated as it is described."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long prompts and responses are, in tokens: log-normal, between prompts and within each."""

    prompt: int
    median: float
    between: float
    """The standard deviation of the logarithm between prompts."""
    within: float
    """And between responses to one prompt."""
    longest: int
    prompts: int | None = None
    """After this many the same prompts come again, in the same order: their earlier responses tell how long the next
    ones are. None: each comes once."""
    grows: float = 1.0
    """A step's median is that of the step before, multiplied by this: what is trained thinks for longer."""


class Rounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """RollPacker's rounds: more is asked for than is trained, and what is not made first waits for a long round."""

    prompts: float = 1.25
    """A short round has so many prompts for each that is trained."""
    responses: float = 1.25
    """And each of them so many responses for each that is trained. With more than 1 short responses are favoured."""


class Repack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Laminar's batches, and how tight it packs what is left of them."""

    parts: float = 2.0
    """An instance's batch, in equal parts of all responses that may be open: of so many as there are instances."""
    requests: int | None = None
    """Limit of the requests of an instance that gets those of others. None: as many as its engine computes while it
    reads its weights once."""


class Trainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer on the reserved machines; it trains while other machines generate."""

    steps: int
    groups: int
    group_size: int
    micro_batch: int
    """Responses that it begins to train with at least, while more are to come."""
    token_s: float
    """Training takes so long for each token."""
    publish_s: float
    """From the last token that is trained to the next version."""
    engines: int
    """How many instances its own GPUs are, or would be, while it doesn't train."""
    seeds: bool = True
    """Whether they generate then, as RLBoost's do. StreamRL's only train."""
    steps_ahead: int = 0
    """So many steps' prompts are submitted beside those of the step that is trained: 1 is one step off."""
    streams: bool = False
    """Whether prompts come without steps: it trains whatever has ended, as many responses as a step has for each
    version, and submits as many groups as it has used. `steps_ahead` steps' groups are open beside one."""
    on_update: OnUpdate = "continue"
    """What becomes of a response when its engine changes the version."""
    rounds: Rounds = Rounds()
    """With the systems that have them."""
    repack: Repack = Repack()
    """With `laminar`."""
    seed_first_s: float = 150.0
    seed_gain: float = 3.0


class Spot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines that come and go."""

    boot_s: float
    """Until an engine runs, without weights."""
    load_s: float | None = None
    """Until it has a version, whatever else moves; None: what `weights` say."""
    notice_s: float = 0.0
    """So long before it goes a machine is told; 0: not at all."""
    changes: tuple[tuple[float, int], ...] = ()
    """From when on how many there are: seconds and instances, the first at 0. Which go is drawn by lot."""
    trace: str | None = None
    """In place of it a recorded trace: one of ours by its name, or a file beside the scenario's. At its end the
    machines stay."""
    instances: int = 0
    """With a trace: so many at most (`spot_trace.scaled`)."""
    trace_from_s: float = 0.0
    """It begins at this second of the trace."""
    delta_from: int | None = None
    """With a trainer of its own GPUs: begin with so many of those that there are, and take one more or one less by
    StreamRL's rule (`sizing.fleet_size`). None: take all that the trainer keeps up with."""
    recorded: tuple[SpotChange, ...] = ()
    """What the trace has, once it is read; no scenario says it."""

    @property
    def most(self) -> int:
        """How many there are at most."""
        return self.instances or max((count for _, count in self.changes), default=0)

    @property
    def first(self) -> int:
        """How many there are at the beginning."""
        return len(self.recorded[0].comes) if self.recorded else self.changes[0][1]


class Messages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often machines tell what, and how often policies look, in seconds. A large fleet does both more seldom."""

    frames_s: float | None = None
    """First tokens, ends, and the last tokens of what was stopped; None: as often as in production in a fleet of this
    size."""
    progress_s: float = 1.0
    """Tokens of responses that go on."""
    heartbeat_s: float = 1.0
    look_s: float = 0.1


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Money for an hour of what one instance takes."""

    reserved: float
    spot: float


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job."""

    name: str
    seed: int
    engine: EngineCosts
    lengths: Lengths
    trainer: Trainer
    spot: Spot
    price: Price
    weights: Weights | None = None
    """In place of `spot.load_s`: what moves, and over what."""
    far: FarSite | None = None
    """Instances at another site, to which `weights` move as well."""
    messages: Messages = Messages()
    terms_off: tuple[Term, ...] = ()
    """What the policy `arrival` leaves off."""
    pause_s: float = 0.1
    """An engine stands still so long to go over to a version that it has beside its own."""
    about: str = ""
    systems: tuple[System, ...] = SYSTEMS_FIRST
    """What it is run with, unless others are asked for. Factors are over the first."""
    vary: tuple[Variation, ...] = ()
    """What may be otherwise: values by their path in this file, such as `spot.notice_s: 30`."""


def with_trace(scenario: Scenario, text: str) -> Scenario:
    """Return a scenario with what its trace says. Raises `ScenarioError`."""
    spot = scenario.spot
    try:
        found = scaled(recorded(text), spot.instances, spot.trace_from_s)
    except TraceError as why:
        raise ScenarioError(f"{scenario.name}: spot.trace {spot.trace!r} is no trace: {why}") from None
    return replace(scenario, spot=replace(spot, recorded=found))


def decode(text: bytes, name: str) -> Scenario:
    """Return the scenario of a file; its trace is still to be read. Raises `ScenarioError`."""
    try:
        tree = strict_yaml.load(text)
    except (yaml.YAMLError, ValueError) as why:
        raise ScenarioError(f"{name} is no scenario of rollouts: {' '.join(str(why).split())}") from None
    found = _converted(tree, name)
    for each in found.vary:
        varied(found, each)
    return found


def varied(scenario: Scenario, variation: Variation) -> Scenario:
    """Return a scenario as it is otherwise; its trace is still to be read. Raises `ScenarioError`."""
    tree = msgspec.to_builtins(replace(scenario, spot=replace(scenario.spot, recorded=()), vary=()))
    name = f"{scenario.name} with {variation.what!r}"
    try:
        put(tree, variation.set)
    except LookupError as path:
        raise ScenarioError(f"{name}: nothing stands at {str(path)!r}: name a field as in the file") from None
    return _converted(tree, name)


def _converted(tree: object, name: str) -> Scenario:
    try:
        found = msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as why:
        raise ScenarioError(f"{name} is no scenario of rollouts: {why}") from None
    wrong = next(wrongs(found), None)
    if wrong is not None:
        raise ScenarioError(f"{name}: {wrong}")
    return found


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
    if spot.delta_from is not None and (trainer.seeds or not 1 <= spot.delta_from <= spot.most):
        yield (
            f"spot.delta_from is {spot.delta_from}, and must be from 1 to the {spot.most} that there are, with "
            "trainer.seeds: false"
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
