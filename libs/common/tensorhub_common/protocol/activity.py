"""What a process says of what it is doing: reads under way, and what is wrong."""

from typing import Final

import msgspec

READS_TOLD_MAX: Final = 256
"""An agent tells of at most this many reads under way; of the others it tells how many there are."""


SOURCES_TOLD_MAX: Final = 16
"""Limit of the sources named for one read, those that have brought most first."""


class ReadSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source of a read that is under way. `silent_s` is the time since it last brought a byte."""

    agent: str
    transport: str
    phase: str
    nbytes: int
    silent_s: float


class ActiveRead(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is being filled by an agent.

    `stage` is how far the call is: joining (no version is decided), leasing (plan and leases), granted (waits for the
    replica's other shards), draining (waits for its own readers), filling (bytes come), digesting, keeping (its
    manifest is written), filled (waits for the replica's other shards), ending.
    """

    model: str
    replica: str
    shard: int
    want: str
    version: int | None
    """What the log has decided; None before that."""
    stage: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    """The mean since the first byte was asked for; 0 before that."""
    for_s: float
    """The time since the worker called."""
    still_s: float
    """The time since the last byte came, or since filling began; 0 before that."""
    plan_s: float | None = None
    """For how long the planner has not answered this read's question; None while no question is open."""
    trace: str | None = None
    sources: tuple[ReadSource, ...] = ()


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process can't do just now, while it goes on with everything else."""

    kind: str
    """`job-set-aside`, `shards-set-aside`, `no-memory`, `no-room-for-manifests`, `no-copy` or `no-room-for-state`; a
    later release may know more."""
    why: str
    """What is wrong, and what to do."""
    since: float
    """Since when, in seconds since the epoch."""
    job: str = ""
    """The job that is concerned, where it is one."""


class Activity(msgspec.Struct, frozen=True, kw_only=True, tag="activity"):
    """What one process of the hub does just now. Registries, planners and agents answer, each for itself."""

    process: str
    role: str
    up_s: float
    """How long the process has run."""
    nats_s: float
    """How long its connection to NATS has held without a pause."""
    nats_lost: int
    """How many times the connection was lost since the process began."""
    faults: int
    """How many errors have escaped from background work since the process began; its log has them."""
    planner_silent_s: float | None = None
    """An agent's word: for how long no planner has answered any of its questions; None where the last was answered."""
    reads: tuple[ActiveRead, ...] = ()
    """An agent's reads in the job that was asked about, oldest first."""
    reads_left_out: int = 0
    troubles: tuple[Problem, ...] = ()
    """What an agent can't do just now, in whatever job."""
