"""A job of rollouts and its machines, as a YAML file says it. Pure."""

from typing import Final, Literal, get_args

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.rollout.entries import ArrivalTerm
from tensorhub_common.protocol.rollout.messages import OnUpdate
from tensorhub_simulator.performance.variation import Variation
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.spot_trace import SpotChange
from tensorhub_simulator.rollout_performance.config.weights import FarSite, Weights

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
    """With `changes`, and a trainer of its own GPUs that has steps: begin with so many of those that there are, and
    take one more or one less by StreamRL's rule (`sizing.fleet_size`). None: take all that a trainer keeps up with."""
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
    terms_off: tuple[ArrivalTerm, ...] = ()
    """What the policy `arrival` leaves off."""
    pause_s: float = 0.1
    """An engine stands still so long to go over to a version that it has beside its own."""
    about: str = ""
    systems: tuple[System, ...] = SYSTEMS_FIRST
    """What it is run with, unless others are asked for. Factors are over the first."""
    vary: tuple[Variation, ...] = ()
    """What may be otherwise: values by their path in this file, such as `spot.notice_s: 30`."""
