"""What the SDK asks the leading manager of a job, as JSON on `ask.rollout.<what>`. docs/design/rollouts/messages.md."""

from typing import Annotated, Final, Literal

import msgspec

from tensorhub_common.protocol.rollout.entries import Attempt, Count, EndReason, RequestId

ASK_S: Final = 3.0
"""So long an answer may take; a question of longer is asked again."""
WAIT_S_MAX: Final = 2.0
"""So long the manager keeps `ready` for what has not ended yet."""
READY_MAX: Final = 512
"""Limit of the responses in one answer."""
READY_GROUPS_MAX: Final = 1024
"""Limit of the groups that one question is about."""
FOLLOW_PLACES_MAX: Final = 1024
"""Limit of the responses that one question follows."""
FOLLOW_BYTES_MAX: Final = 524_288
"""Limit of the tokens and log-probabilities in one answer, but for one response's first token: NATS takes 1 MiB, and
JSON writes four bytes for three."""
WHY_REQUESTS_MAX: Final = 64
"""Limit of the responses in one answer to `why`, the first of the group."""
WHY_CHARS_MAX: Final = 200
"""Limit of a reason or an error in an answer to `why`."""
WHY_BYTES_MAX: Final = 786_432
"""Limit of the responses in an answer to `why`, but for the first: NATS takes 1 MiB, and a character may have six."""
WHY_INDEX_MAX: Final = 1_000_000
"""Limit of an index in a question; no group is as large."""

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Gain = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
WaitS = Annotated[float, msgspec.Meta(ge=0.0, le=WAIT_S_MAX)]


class OutcomeQuestion(msgspec.Struct, frozen=True):
    """What became of the entry at `seq`? `attachment` and `n` are those of its sender; 0 for an `attach`."""

    seq: Count
    attachment: Count = 0
    n: Count = 0


class OutcomeAnswer(msgspec.Struct, frozen=True, tag="outcome"):
    """The entry counts, or `error` is the code of an error of TensorHub and `message` its text."""

    error: str | None = None
    message: str = ""
    epoch: int = 0
    """Of the consumer."""
    known: tuple[str, ...] = ()
    """Ids of groups of a `submit` that stood before it."""
    newest: int | None = None
    """The newest published version of the consumer's model; None: the manager knows of none."""


class ReadyQuestion(msgspec.Struct, frozen=True):
    """Which responses have ended behind request `after_request` of entry `after`, in the order of entries and requests?

    The answer is of a fold that has entry `seq`.
    """

    attachment: Count
    seq: Count
    after: Count = 0
    after_request: RequestId | None = None
    count_max: Annotated[int, msgspec.Meta(ge=1, le=READY_MAX)] = READY_MAX
    wait_s: WaitS = 0.0
    """So long the answer waits for one to end."""
    groups: Annotated[tuple[str, ...], msgspec.Meta(max_length=READY_GROUPS_MAX)] | None = None
    """`open` in the answer counts these groups alone, and what has ended of others is told all the same; None: all."""


class EndedRequest(msgspec.Struct, frozen=True, array_like=True):
    """One response that has ended and is not done. Tokens are number `index` of the payload `payload` (None: none)."""

    request: RequestId
    ended_seq: int
    group: str
    index_in_group: int
    group_size: int
    group_open: int
    """How many requests of its group are open: the group is whole once this is 0."""
    prompts: str
    """The payload of the submission, of which the prompt is number `group_index`."""
    group_index: int
    reason: EndReason
    tokens: int
    attempt: Attempt | None = None
    payload: str | None = None
    index: int = 0
    error: str | None = None
    version: int | None = None
    """The version that the group is pinned to."""


class ReadyAnswer(msgspec.Struct, frozen=True, tag="ready"):
    """Responses in the order in which they ended, and how many requests are open of what was asked about.

    `is_last`: no other has ended yet. `instances`: how many take requests of the consumer's model. `published`: the
    model's versions. `is_full`: the consumer's own responses that are not done fill the payloads, and nothing goes on
    until some are done. `error`: the attachment is over, or the question can't be answered; `message` says why.
    """

    ended: tuple[EndedRequest, ...] = ()
    open: int = 0
    is_last: bool = True
    instances: int = 0
    published: tuple[int, ...] = ()
    error: str | None = None
    message: str = ""
    is_full: bool = False


class FollowedPlace(msgspec.Struct, frozen=True, array_like=True):
    """A response of a group, and how many of its tokens the asker has."""

    group: str
    index: Count
    tokens: Count


class FollowQuestion(msgspec.Struct, frozen=True):
    """Which tokens have these responses behind those that the asker has?

    The answer is of a fold that has entry `seq`. It waits for so long, `wait_s`, until one of them has a token more.
    """

    attachment: Count
    seq: Count
    places: Annotated[tuple[FollowedPlace, ...], msgspec.Meta(max_length=FOLLOW_PLACES_MAX)]
    wait_s: WaitS = 0.0


class FollowedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of the response of place number `place` of the question, from the asker's last one on, as in frames."""

    place: int
    tokens: bytes
    logprobs: bytes


class FollowAnswer(msgspec.Struct, frozen=True, tag="follow"):
    """What is new of the responses that were asked about, as far as it has room; none: nothing yet.

    A response that has ended, or that this manager has not heard of yet, has no row. `error`: the attachment is over,
    and `message` says why.
    """

    rows: tuple[FollowedTokens, ...] = ()
    error: str | None = None
    message: str = ""


class SeedingState(msgspec.Struct, frozen=True):
    """What is learnt of seeding: how long in the next step, and how many remote instances are worth having."""

    seed_s: float
    remote_max: int
    remembered: tuple[tuple[float, float], ...] = ()
    """How long, by how many remote instances there were, the latest last."""
    version: int = -1
    """The version whose publication ended the step that was learnt from last; -1: none was."""
    train_s: float = 0.0
    """How long the trainer trained in that step; 0: not known."""


class SeedingQuestion(msgspec.Struct, frozen=True):
    """How long is the trainer's own engine to generate in the step that begins?

    `version` is what the engine has. Its publication has ended the step that is learnt from, and the answer waits a
    moment for the manager to see it. `state` is what the last answer said; None: this is the first step. Times are of
    the step that has ended, in seconds: `train_wait_s`, how long the trainer was blocked in `batches()`; `seeded_s`,
    how long it seeded.
    """

    attachment: Count
    version: Count
    train_wait_s: Seconds
    seeded_s: Seconds
    initial_s: Seconds
    gain: Gain
    state: SeedingState | None = None


class SeedingAnswer(msgspec.Struct, frozen=True, tag="seeding"):
    """What is known now, and the root of the version; `error`: the attachment is over, and `message` says why."""

    state: SeedingState | None = None
    root: str = ""
    has_others: bool = True
    """Whether remote instances are there, which go on with what is open once the trainer's engine stops."""
    is_watched: bool = False
    """Whether the manager tells the trainer's engine when it has made enough; else it stops after `seed_s`."""
    error: str | None = None
    message: str = ""


InstanceStateName = Literal["serving", "loading", "leaving"]


class InstanceStatus(msgspec.Struct, frozen=True):
    """One instance: its requests, and its tokens per second over the last seconds."""

    runner: str
    model: str
    state: InstanceStateName
    version: int | None
    slots: int
    pending: int
    executing: int
    tokens_per_s: float
    version_kept: int | None = None
    """The version that it is to have while responses are for that alone; None: it follows the newest."""


class ConsumerStatus(msgspec.Struct, frozen=True):
    """One consumer: how many of its requests are open (and of these on no instance), and how many ended, not done."""

    name: str
    model: str
    epoch: int
    open: int
    waiting: int
    ended: int
    versions_behind: tuple[int, ...] = ()
    """How many executing requests run on the newest version, on the one before, and so on."""


class RolloutStatus(msgspec.Struct, frozen=True, tag="rollouts"):
    """The rollouts of a job, as its leading manager sees them. `tokens_per_s` is of all instances."""

    job: str
    manager: str
    term: int
    seq: int
    consumers: tuple[ConsumerStatus, ...]
    instances: tuple[InstanceStatus, ...]
    tokens_per_s: float
    payload_bytes: int
    wished: int | None = None
    """How many instances beside the trainer's own are worth having, as the policy has it; None: it does not know."""
    has_gathered: bool = True
    """Whether the manager has heard all instances since it leads; else some are missing here."""


class WhyQuestion(msgspec.Struct, frozen=True):
    """Why are the responses of this group where they are, and what do they wait for? `index`: of this one alone."""

    group: str
    index: Annotated[int, msgspec.Meta(ge=0, le=WHY_INDEX_MAX)] | None = None


class AttemptWhy(msgspec.Struct, frozen=True):
    """One placement of a response on an instance, as far as the leading manager saw it. Times in seconds."""

    instance: str
    attempt: Attempt
    placed_s_ago: float
    """How long ago it was placed."""
    lasted_s: float
    """From there until it was over, or until now."""
    tokens_from: int
    """How many tokens the response had when it was placed."""
    tokens_to: int
    """How many it had when it was over, or has now."""
    first_token_s: float | None = None
    """From its placement to its first token; None: none came."""
    end: str | None = None
    """How it was over, as in the attribute `tensorhub.end` of its span; None: it is not."""
    error: str | None = None
    reason: str = ""
    """Why it was placed there; empty: not known."""
    withdrawn_why: str = ""
    """Why it was taken from there; empty: it was not."""


RequestStateName = Literal["waiting", "pending", "executing", "ended"]


class ExpectedLength(msgspec.Struct, frozen=True):
    """How long a response is expected to be, in tokens: as likely as not below `median`, and nine in ten below `p90`.

    `knowledge`: what that is from. `finished` responses of the same prompt, those that are `running`, prompts that are
    `alike` in length, or the other prompts of the `job`.
    """

    median: float
    p90: float
    knowledge: str


class RequestWhy(msgspec.Struct, frozen=True):
    """One response. `pending`: on an instance, without a token from there."""

    consumer: str
    index: int
    """In its group."""
    state: RequestStateName
    tokens: int
    waits_for: str | None = None
    """What it waits for, in words; None: for nothing but its tokens."""
    expected: ExpectedLength | None = None
    """None: it has ended."""
    attempts: tuple[AttemptWhy, ...] = ()
    """The latest, the last one last."""
    ended_by: EndReason | None = None
    """Why it ended; None: it has not, or it is done and that is not known any more."""
    error: str | None = None
    held: str | None = None
    """Of a response for one version alone: how the hub keeps that, in words; None: it holds none."""


class WhyAnswer(msgspec.Struct, frozen=True, tag="why"):
    """The responses of a group, those of each consumer that has a group of this name.

    `left_out`: how many more there are, too many for one answer; ask for them by their index. `is_done`: all of them
    are done, and nothing but their traces is left.
    """

    group: str
    requests: tuple[RequestWhy, ...] = ()
    left_out: int = 0
    is_done: bool = False
