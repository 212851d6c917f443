"""What the demo's processes say to the one that shows them, and what that one tells them: one JSON object a line.

Times are seconds since the epoch: all processes are on one machine. Digests are the processes' own (see `digests`),
and have nothing to do with those by which the hub verifies a transfer.
"""

from typing import Final

import msgspec

from tensorhub.demo.size import Size

MODEL: Final = "policy"
TRAINER: Final = "trainer"
SHARDS: Final = 2
"""Of the trainer and of each rollout."""
LINE_BYTES_MAX: Final = 1 << 20


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to play; it stands in its command line."""

    replica: str
    job: str
    agent: str
    """The socket of the agent in whose memory its shards stand."""
    size: Size
    threads: int = 1
    steps: int = 3
    """The trainer's, for each version."""
    rows: int = 8
    row_tokens: int = 64
    tokens: int = 40
    """How long a rollout speaks."""
    is_late: bool = False
    """It waits for `Begin` before it joins."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="say"):
    """The part common to all that a process says."""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """The late one is ready to join."""


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    """Both shards are registered. `version` is what the hub found in their memory."""

    parameters: int
    nbytes: int
    version: int | None


class Stepped(Message, frozen=True, kw_only=True, tag="stepped"):
    """The trainer took a step."""

    step: int
    loss: float
    seconds: float


class Unpublished(Message, frozen=True, kw_only=True, tag="unpublished"):
    """The trainer holds no version any more, and trains."""

    version: int


class Sealed(Message, frozen=True, kw_only=True, tag="sealed"):
    """What the trainer is about to publish: the truth with which every copy of this version is compared."""

    version: int
    nbytes: int
    digests: dict[str, str]


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """The version exists."""

    version: int
    at: float
    loss: float | None


class Rested(Message, frozen=True, kw_only=True, tag="rested"):
    """The trainer stops here and keeps this version published."""

    version: int


class Source(msgspec.Struct, frozen=True):
    """From which replica how many bytes came, and how."""

    replica: str
    nbytes: int
    transport: str


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """A rollout fetched a version. `wire_s`: how long bytes moved; None when they stood in its memory already."""

    version: int
    began: float
    ended: float
    nbytes: int
    wire_s: float | None
    sources: tuple[Source, ...]
    digests: dict[str, str]


class Said(Message, frozen=True, kw_only=True, tag="said"):
    """What a rollout generated with a version."""

    version: int
    text: str
    seconds: float


class Proved(Message, frozen=True, kw_only=True, tag="proved"):
    """What stands in a process's memory at the end, digested anew."""

    version: int
    nbytes: int
    digests: dict[str, str]


class Trouble(Message, frozen=True, kw_only=True, tag="trouble"):
    """The hub raised an error, and the process tries again."""

    error: str
    message: str


AnyMessage = Standby | Joined | Stepped | Unpublished | Sealed | Published | Rested | Held | Said | Proved | Trouble


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="do"):
    """The part common to all that a process is told."""


class Begin(Order, frozen=True, kw_only=True, tag="begin"):
    """To the late one: join now, with this version."""

    version: int


class Rest(Order, frozen=True, kw_only=True, tag="rest"):
    """To the trainer: stop with the version that is published, or with the next."""


class Prove(Order, frozen=True, kw_only=True, tag="prove"):
    """Digest what stands in your memory now."""


class Leave(Order, frozen=True, kw_only=True, tag="leave"):
    """Release your shards and end."""


AnyOrder = Begin | Rest | Prove | Leave
