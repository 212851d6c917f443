"""Commands: requests to change a job's catalog, as the job's log holds them.

A command says its verb in its subject and in its body. `by` names the sender so that a repeat is recognised for ever,
not only within JetStream's duplicate window: the catalog keeps, per lane, the last `n` and its outcome. Anyone with
the job's credentials may send the `OUTSIDE_VERBS` without `by`; every other command comes from the agent (or registry)
that its subject names.
"""

from typing import Final, Literal

import msgspec

PROTOCOL: Final = 1
"""Part of every handshake. A peer that speaks another number is refused with that reason."""

VERSION_MAX: Final = 2**53 - 1
"""Versions are JSON numbers, so they stay within what every JSON reader keeps exact."""

SHARDS_MAX: Final = 4096
"""Limit of a replica's shards, so that one event can name them all. SDK and catalog both check it."""

NO_ROOT: Final = "-"
"""The root of a shard that was published with digests off: it vouches for nothing, not even for equal bytes."""

VersionRequest = int | Literal["latest", "newer"]
"""What a shard wants of a round: a version by number, the newest, or one newer than it holds."""


class Sender(msgspec.Struct, frozen=True):
    """Who sent a command. Order over (incarnation, n) of one lane is the order in which its commands count."""

    lane: str
    """An agent's or registry's id, or "<agent>/<k>": the k-th of its lanes, each with one command under way at a
    time."""
    incarnation: int
    n: int

    @property
    def process(self) -> str:
        """The agent or registry that the lane belongs to."""
        return self.lane.partition("/")[0]


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", forbid_unknown_fields=True):
    """The part common to all commands."""

    by: Sender | None = None


class ShardCommand(Command, frozen=True, kw_only=True):
    """A command about one shard, sent on that shard's lane by the agent that owns it."""

    model: str
    replica: str
    shard: int


class HeldShard(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of one shard in its memory when it joins.

    A version without a root is a part of a copy that this process of the agent can't take back.
    """

    model: str
    replica: str
    shard: int
    version: int | None = None
    root: str | None = None


class Publish(Command, frozen=True, kw_only=True, tag="publish"):
    """A wish from outside: publish what the replica's shards hold. None means the last published version + 1."""

    model: str
    replica: str
    version: int | None = None


class Retain(Command, frozen=True, kw_only=True, tag="retain"):
    """Keep the model's last `last` versions: none of them loses its last counting copy by an orderly act."""

    model: str
    last: int


class Pin(Command, frozen=True, kw_only=True, tag="pin"):
    """Keep this version, however many come after it."""

    model: str
    version: int


class Unpin(Command, frozen=True, kw_only=True, tag="unpin"):
    """Keep the version no longer than `retain` says."""

    model: str
    version: int


class Hold(Command, frozen=True, kw_only=True, tag="hold"):
    """Have a copy of each of these versions for a while. Unlike a pin it keeps nothing from being overwritten.

    It states all that its holder holds of the model, in place of what the holder stated before; no version: the hold
    ends. What is not published, or was retired, is passed over. It ends by itself `lasts_s` after its entry.
    """

    model: str
    holder: str
    term: int
    """A holder's later process has a higher one. A hold with a lower (term, n) than the last is refused."""
    n: int
    versions: tuple[int, ...]
    lasts_s: int


class Rewind(Command, frozen=True, kw_only=True, tag="rewind"):
    """A trainer went back to a checkpoint: every version above `to` retires, and counting goes on above them."""

    model: str
    to: int


class Delete(Command, frozen=True, kw_only=True, tag="delete"):
    """Forget the model, its versions and its cache replicas. Its other replicas must be gone."""

    model: str


class DeleteJob(Command, frozen=True, kw_only=True, tag="delete_job"):
    """Close the job for good: every later command is refused, and agents free all of its memory."""


class DrainAgent(Command, frozen=True, kw_only=True, tag="drain"):
    """For maintenance: no new shard and no new copy on this agent, and none there counts. `on` False ends it."""

    agent: str
    on: bool = True


class Quota(Command, frozen=True, kw_only=True, tag="quota"):
    """The limit of bytes of all of the job's shards together; 0 means none."""

    nbytes: int


class Lead(Command, frozen=True, kw_only=True, tag="lead", omit_defaults=True):
    """A registry leads from here on. What another one still says of agents under a lower term is refused.

    `level`: from here on the job is folded at this level (`levels.py`). A lower one than it has changes nothing.
    """

    registry: str
    term: int
    level: int = 0


class Expire(Command, frozen=True, kw_only=True, tag="expire"):
    """The registry's leader has not heard this incarnation of the agent for a whole window."""

    agent: str
    incarnation: int
    term: int


class ForgetAgent(Command, frozen=True, kw_only=True, tag="forget_agent"):
    """The agent was lost long ago: forget it, with the shards that it had. A leader's word; too early it is refused."""

    agent: str
    incarnation: int
    term: int


class EndHold(Command, frozen=True, kw_only=True, tag="end_hold"):
    """The holder has not stated its hold again: end it. A leader's word; too early it is refused."""

    model: str
    holder: str
    term: int


class Join(Command, frozen=True, kw_only=True, tag="join", omit_defaults=True):
    """An agent came (again), with a higher incarnation, and states what its memory holds.

    What is as by default is not written: so a registry of an earlier release, which refuses a field that it does not
    know, lets in who makes no use of it.
    """

    host: str
    site: str
    holds: tuple[HeldShard, ...] = ()
    cache_bytes: int = 0
    """The bytes of copies of retained versions that this agent takes in at most."""
    rack: str = ""
    """The host's rack in its site; empty: none is known, and the host shares a rack with no other."""


class Register(ShardCommand, frozen=True, kw_only=True, tag="register"):
    """A worker brings a shard, or comes back to it.

    `mapped`: it will map what others hold on its host, and so never has bytes of its own.
    """

    shards: int
    spot: bool = False
    layout: str
    nbytes: int
    mapped: bool = False


class Release(ShardCommand, frozen=True, kw_only=True, tag="release"):
    """The shard leaves; its readers are gone already."""


class Ready(ShardCommand, frozen=True, kw_only=True, tag="ready"):
    """The shard's memory is gated and digested: it can be published with this root."""

    version: int | None
    root: str


class Decline(ShardCommand, frozen=True, kw_only=True, tag="decline"):
    """The shard can't fulfil the wish for a publication at log sequence `wish`; the event says why."""

    wish: int
    error: str
    message: str


class Withdraw(ShardCommand, frozen=True, kw_only=True, tag="withdraw"):
    """The shard no longer waits for its siblings' publication."""


class Unpublish(ShardCommand, frozen=True, kw_only=True, tag="unpublish"):
    """The shard grants no new leases; count it as draining.

    `void`: its publication was given up without the log's word, and the memory may have changed since. No retention
    holds that back: the bytes are gone, as after a crash.
    """

    void: bool = False


class Drained(ShardCommand, frozen=True, kw_only=True, tag="drained"):
    """No reader is left (or all were broken): the memory may be overwritten."""


class Stay(ShardCommand, frozen=True, kw_only=True, tag="stay"):
    """The bound of an unpublish that was held back is reached: the shard stays published, unless it drains already."""


class Want(ShardCommand, frozen=True, kw_only=True, tag="want"):
    """The shard joins its replica's round. `patient`: a wish for newer may wait until there is one.

    `supersede`: a version that is overtaken before the first byte is written is not begun any more, and an event says
    when one is overtaken while it is read. Rounds of senders that don't say so fold as they always did. `staged`: it
    is filled beside what it holds, which is kept until every shard of the replica is filled.
    """

    want: VersionRequest
    patient: bool = True
    supersede: bool = False
    staged: bool = False


class Settle(ShardCommand, frozen=True, kw_only=True, tag="settle"):
    """The shard's patience for something newer is over: answer None if nothing is decided yet."""

    round: int


class GiveUp(ShardCommand, frozen=True, kw_only=True, tag="give_up"):
    """The shard leaves the round, with the error that its caller should see.

    `round` None means the one that the shard is in at this entry of the log: an agent that never learnt the number
    sends it. `attempt` is the one that failed, and the word does not count against a later one; None gives up the round
    as such, because the caller's bound is reached.
    """

    round: int | None
    attempt: int | None = None
    error: str
    message: str


class Granted(ShardCommand, frozen=True, kw_only=True, tag="granted"):
    """All leases that this shard needs for the attempt are granted."""

    round: int
    attempt: int


class Replan(ShardCommand, frozen=True, kw_only=True, tag="replan"):
    """Leases for the attempt can't be had; decide again."""

    round: int
    attempt: int


class Drop(ShardCommand, frozen=True, kw_only=True, tag="drop"):
    """A newer version came while this attempt is being read, and it is better to read that one instead."""

    round: int
    attempt: int


class Filled(ShardCommand, frozen=True, kw_only=True, tag="filled"):
    """The shard holds the round's version, verified in place.

    `waits`: a replica that would swap, and holds the last copy of a retained version, may be held back until another
    copy counts. Where a shard of an older release completes the round, it swaps as it did then.

    `attempt`: of a mapped shard, the last one that was missing. No byte is moved and nothing is overwritten, so the
    round's start need not be waited for: that its leases of this attempt were granted is said with this command.
    """

    round: int
    version: int
    root: str
    waits: bool = False
    attempt: int | None = None


AnyCommand = (
    Publish
    | Retain
    | Pin
    | Unpin
    | Hold
    | Rewind
    | Delete
    | DeleteJob
    | DrainAgent
    | Quota
    | Lead
    | Expire
    | ForgetAgent
    | EndHold
    | Join
    | Register
    | Release
    | Ready
    | Decline
    | Withdraw
    | Unpublish
    | Drained
    | Stay
    | Want
    | Settle
    | GiveUp
    | Granted
    | Replan
    | Drop
    | Filled
)


class Unreadable(msgspec.Struct, frozen=True):
    """Something on the command subject that is no command; the fold answers it with a rejection."""

    verb: str
    reason: str


OUTSIDE_VERBS: Final = frozenset(
    {"publish", "retain", "pin", "unpin", "hold", "rewind", "delete", "delete_job", "drain", "quota"}
)
"""Verbs that anyone with the job's credentials may use; all others carry their sender in the subject."""


RETAINED_MAX: Final = 32
"""Limit of the last versions of a model that are retained, of those pinned, and of those that one holder holds: fewer
than are remembered."""

HOLDERS_MAX: Final = 8
"""Limit of those who hold versions of one model."""

HOLD_S_MAX: Final = 600
"""So long a hold lasts at most unless it is stated again."""
