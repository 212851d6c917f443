"""Every command that the fold refuses, in one table: the state, the command, and the code and sentence that it gets.

The sentences are part of the log. That a refused command changes nothing is asserted by the driver.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.common.catalog.scenes import one, republished, two, two_lines

from tensorhub_common.catalog.transitions import (
    SHARD_TRANSITIONS,
    IllegalTransition,
    ShardState,
    ShardTransition,
    transition,
)
from tensorhub_common.catalog.validation import NUMBER_MAX
from tensorhub_common.protocol.log import commands
from tensorhub_common.protocol.log.commands import NO_ROOT, SHARDS_MAX, VERSION_MAX, AnyCommand, Sender
from tensorhub_common.protocol.log.events import Event
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, kinds, reader_of_two, refused

Scene = Callable[[], CatalogDriver]
Say = Callable[[CatalogDriver], tuple[Event, ...]]

HOLD = {"holder": "rollouts", "term": 1, "n": 1, "versions": (9,), "lasts_s": 60}
HUB = Sender("_registry", 1, 999)
OTHER = Sender("_other", 9, 9)


def after(scene: Scene, *steps: Callable[[CatalogDriver], object]) -> Scene:
    """Return a state that is reached from another one."""

    def reached() -> CatalogDriver:
        world = scene()
        for step in steps:
            step(world)
        return world

    return reached


pair = after(one, lambda w: w.join("b"))
long = after(pair, lambda w: w.register("a", "long", layout="0123456789abcdef"))
published = after(pair, lambda w: w.publish("trainer", 12))
emptied = after(published, lambda w: w.empty("trainer"))
newer = after(emptied, lambda w: republished(w, 13), lambda w: w.empty("trainer"))
highest = after(emptied, lambda w: republished(w, VERSION_MAX), lambda w: w.empty("trainer"))
updating = after(published, lambda w: w.want("trainer", "newer"))
draining = after(published, lambda w: w.unpublish("trainer"))
lost = after(pair, lambda w: w.expire("a", term=7))
led = after(pair, lambda w: w.say(commands.Lead(by=Sender("_registry", 5, 0), registry="r-1", term=5)))
returned = after(pair, lambda w: w.join("a", w.holding("trainer")))
pinned = after(two_lines, lambda w: w.say(commands.Pin(model=MODEL, version=9)))
held = after(two_lines, lambda w: w.hold(9, term=2, n=5))
crowded = after(two_lines, *(lambda w, name=f"h{k}": w.hold(9, holder=name) for k in range(8)))
deleted = after(pair, lambda w: w.say(commands.DeleteJob()))
offered = after(reader_of_two, lambda w: w.ready("engine", 13, 0))
failed_offer = after(two, lambda w: w.ready("trainer", 12, 0), lambda w: w.ready("trainer", 13, 1))
joined = after(reader_of_two, lambda w: w.want("engine", "latest", 0))
decided = after(joined, lambda w: w.want("engine", "latest", 1))
filling = after(decided, lambda w: w.grant_all("engine"))
one_filled = after(filling, lambda w: w.filled("engine", 12, 0))
# Another round than the first one, which failed.
again = after(filling, lambda w: w.give_up("engine", 0), lambda w: w.want_all("engine"))
# The first shard holds 12, and the second one, which was lost, waits for it.
half_busy = after(
    two,
    lambda w: w.publish("trainer", 12),
    lambda w: w.join("b"),
    lambda w: w.register("b", "trainer", 1, 2),
    lambda w: w.want("trainer", 12, 1),
)
half = after(CatalogDriver, lambda w: w.join("a"), lambda w: w.register("a", "trainer", 0, 2))
# On agent b one replica of the trainer's layout, and one of another.
holders = after(published, lambda w: w.register("b", "same"), lambda w: w.register("b", "other", layout="M"))
rewound = after(
    holders,
    lambda w: w.ready("same", 12),
    lambda w: w.publish("other", 13),
    lambda w: w.say(commands.Rewind(model=MODEL, to=12)),
    lambda w: w.register("b", "late", layout="M"),
)


def reg(**said: Any) -> Say:
    """Register a shard of another replica on agent b, but for what is said here."""
    about: dict[str, Any] = {"by": Sender("b/7", 1, 100), "model": MODEL, "replica": "other", "shard": 0, "shards": 1}
    return say(commands.Register, **{**about, "layout": "L", "nbytes": 1, **said})


def join(agent: str = "c", **said: Any) -> Say:
    return say(commands.Join, **{"by": Sender(agent, 1, 1), "host": "h", "site": "s", **said})


def say(kind: Callable[..., AnyCommand | commands.Unreadable], **said: Any) -> Say:
    return lambda world: world.say(kind(**said))


def foreign(kind: Callable[..., AnyCommand], shard: int = 0, **said: Any) -> Say:
    """Let agent b speak for a shard of the trainer."""
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": shard}
    return lambda world: world.say(kind(**{"by": world.by("b", 3), **about, **said}))


def decline(**said: Any) -> Say:
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": 0, "error": "NotPublished", "message": ""}
    return lambda world: world.say(commands.Decline(by=world._shard_by("trainer", 0), **about, **said))


def round_word(kind: Callable[..., AnyCommand], off: int, **said: Any) -> Say:
    """Say something of another round than the engine's, whose number is so far off."""

    def word(world: CatalogDriver) -> tuple[Event, ...]:
        by, number = world._shard_by("engine", 0), world.round("engine") + off
        return world.say(kind(by=by, model=MODEL, replica="engine", shard=0, round=number, **said))

    return word


COMMANDS: dict[str, tuple[Scene, Say]] = {
    # Registering.
    "model a.b": (pair, reg(model="a.b")),
    "replica a.b": (pair, reg(replica="a.b")),
    "replica _x": (pair, reg(replica="_x")),
    "layout a.b": (pair, reg(layout="a.b")),
    "layout of 65": (pair, reg(layout="x" * 65)),
    "size -1": (pair, reg(nbytes=-1)),
    "size too large": (pair, reg(nbytes=10**30)),
    "shard 2 of 2": (pair, reg(shard=2, shards=2)),
    "shard -1": (pair, reg(shard=-1)),
    "no shards": (pair, reg(shards=0)),
    "too many shards": (pair, reg(shards=SHARDS_MAX + 1)),
    "other layout": (long, lambda w: w.register("a", "long", layout="fedcba9876543210")),
    "other count": (pair, lambda w: w.register("a", "trainer", 0, 2)),
    "spot beside none": (pair, lambda w: w.register("a", "trainer", spot=True)),
    "shard of another": (pair, lambda w: w.register("b", "trainer")),
    "register unjoined": (pair, reg(by=Sender("nobody/1", 1, 1))),
    "no sender's lane": (pair, reg(by=Sender("b/x", 1, 1))),
    # Joining.
    "host a.b": (pair, join(host="a.b")),
    "rack a.b": (pair, join(rack="a.b")),
    "site a.b": (pair, join(site="a.b")),
    "cache -1": (pair, join(cache_bytes=-1)),
    "join as the hub": (pair, join("_hub")),
    "join again with too much room": (published, join("a", by=Sender("a", 2, 100), cache_bytes=NUMBER_MAX + 1)),
    "join as it is": (pair, lambda w: w.join("a", incarnation=1)),
    "join lower": (pair, lambda w: w.join("a", incarnation=0)),
    "join again when lost": (lost, lambda w: w.join("a", incarnation=1)),
    "join unsigned": (pair, say(commands.Join, host="h", site="s")),
    # Shards of others, and of nobody.
    "release for another": (pair, foreign(commands.Release)),
    "unpublish for another": (pair, foreign(commands.Unpublish)),
    "unpublish of nothing": (pair, foreign(commands.Unpublish, 5)),
    "withdraw for another": (pair, foreign(commands.Withdraw)),
    "drained for another": (pair, foreign(commands.Drained)),
    "decline for another": (pair, foreign(commands.Decline, wish=1, error="NotPublished", message="")),
    "unpublish unsigned": (pair, say(commands.Unpublish, model=MODEL, replica="trainer", shard=0)),
    "ready of a lost one": (lost, lambda w: w.ready("trainer", 12)),
    "ready of an older one": (returned, foreign(commands.Ready, by=Sender("a/77", 1, 9999), version=1, root="r")),
    "unpublish of a later one": (pair, foreign(commands.Unpublish, by=Sender("b/3", 2, 1))),
    # Publishing.
    "root a.b": (pair, lambda w: w.ready("trainer", 1, digest="a.b")),
    "publish -1": (pair, lambda w: w.ready("trainer", -1)),
    "publish too high": (pair, lambda w: w.ready("trainer", VERSION_MAX + 1)),
    "publish over 12": (published, lambda w: w.ready("trainer", 13)),
    "publish the next over 12": (published, lambda w: w.ready("trainer", None)),
    "publish older": (emptied, lambda w: w.ready("trainer", 11, digest="other")),
    "publish equal with other bytes": (emptied, lambda w: w.ready("trainer", 12, digest="other")),
    "publish above the highest": (highest, lambda w: w.ready("trainer", None)),
    "publish below the highest": (highest, lambda w: w.ready("trainer", 14)),
    "publish draining": (draining, lambda w: w.ready("trainer", 12)),
    "publish in another layout": (holders, lambda w: w.ready("other", 12)),
    "publish other bytes": (holders, lambda w: w.ready("same", 12, digest="ff")),
    "publish without digests": (holders, lambda w: w.ready("same", 12, digest=NO_ROOT)),
    "publish what was retired": (rewound, lambda w: w.ready("late", 13)),
    "publish again what was retired": (rewound, lambda w: w.ready("other", 13)),
    "withdraw nothing": (pair, lambda w: w.withdraw("trainer")),
    "withdraw what failed": (failed_offer, lambda w: w.withdraw("trainer", 0)),
    "unpublish nothing": (pair, lambda w: w.unpublish("trainer")),
    "unpublish again": (draining, lambda w: w.unpublish("trainer")),
    "unpublish in a round": (updating, lambda w: w.unpublish("trainer")),
    "drained of nothing": (pair, lambda w: w.drained("trainer")),
    "release what is published": (published, lambda w: w.release("trainer")),
    # Wishes from outside.
    "wish over 12": (published, lambda w: w.wish("trainer", 13)),
    "wish the next over 12": (published, lambda w: w.wish("trainer", None)),
    "wish -1": (emptied, lambda w: w.wish("trainer", -1)),
    "wish not newer": (newer, lambda w: w.wish("trainer", 12)),
    "wish too high": (emptied, lambda w: w.wish("trainer", VERSION_MAX + 1)),
    "wish of a half": (half, lambda w: w.wish("trainer", 1)),
    "wish of nobody": (pair, lambda w: w.wish("nobody", 1)),
    "wish of no model": (pair, lambda w: w.wish("trainer", 1, model="other")),
    "wish in a round": (joined, lambda w: w.wish("engine", 13)),
    "wish beside one that is busy": (half_busy, lambda w: w.wish("trainer", 12)),
    "decline of no wish": (pair, decline(wish=-1)),
    # Rounds.
    "want -1": (reader_of_two, lambda w: w.want("engine", -1)),
    "want too high": (reader_of_two, lambda w: w.want("engine", VERSION_MAX + 1)),
    "want while offered": (offered, lambda w: w.want("engine", "latest", 0)),
    "want while draining": (draining, lambda w: w.want("trainer", "latest")),
    "want twice": (joined, lambda w: w.want("engine", "latest", 0)),
    "want again": (decided, lambda w: w.want("engine", "latest", 1)),
    "settle unjoined": (joined, lambda w: w.settle("engine", 1)),
    "give up unjoined": (joined, lambda w: w.give_up("engine", 1)),
    "granted unjoined": (joined, lambda w: w.granted("engine", 1, attempt=0)),
    "settle no round": (reader_of_two, lambda w: w.settle("engine", 0, number=8)),
    "late settle": (again, round_word(commands.Settle, -2)),
    "late give up": (again, round_word(commands.GiveUp, -2, error="X", message="")),
    "late filled": (again, round_word(commands.Filled, -2, version=12, root="L-12-0")),
    "late granted": (again, round_word(commands.Granted, -2, attempt=1)),
    "late replan": (again, round_word(commands.Replan, -2, attempt=1)),
    "granted to another attempt": (again, lambda w: w.granted("engine", 0, attempt=2)),
    "replan of another attempt": (again, lambda w: w.replan("engine", 0, attempt=2)),
    "replan of a later round": (decided, round_word(commands.Replan, 1, attempt=1)),
    "replan after the start": (filling, lambda w: w.replan("engine", 1)),
    "filled before the start": (decided, lambda w: w.filled("engine", 12, 0)),
    "filled with another root": (filling, lambda w: w.filled("engine", 12, 0, digest="other")),
    "filled with no digest": (filling, lambda w: w.filled("engine", 12, 0, digest="no digest")),
    "filled with 11": (filling, lambda w: w.filled("engine", 11, 0)),
    "filled with 13": (filling, lambda w: w.filled("engine", 13, 0)),
    "filled twice": (one_filled, lambda w: w.filled("engine", 12, 0)),
    # What users rule.
    "retain too many": (two_lines, say(commands.Retain, model=MODEL, last=33)),
    "retain of no model": (two_lines, say(commands.Retain, model="other", last=1)),
    "rewind to nothing": (two_lines, say(commands.Rewind, model=MODEL, to=10)),
    "rewind to -1": (two_lines, say(commands.Rewind, model=MODEL, to=-1)),
    "rewind behind a pin": (pinned, say(commands.Rewind, model=MODEL, to=8)),
    "drain nobody": (two_lines, say(commands.DrainAgent, agent="nobody")),
    "quota -1": (two_lines, say(commands.Quota, nbytes=-1)),
    "pin what nobody has": (two_lines, say(commands.Pin, model=MODEL, version=7)),
    "pin where nothing is": (draining, say(commands.Pin, model=MODEL, version=12)),
    "unpin -1": (two_lines, say(commands.Unpin, model=MODEL, version=-1)),
    "hold of no model": (two_lines, say(commands.Hold, model="other", **HOLD)),
    "hold as a.b": (two_lines, lambda w: w.hold(9, holder="a.b")),
    "hold in -1": (two_lines, lambda w: w.hold(9, term=-1)),
    "hold number -1": (two_lines, lambda w: w.hold(9, n=-1)),
    "hold for 0 s": (two_lines, lambda w: w.hold(9, lasts_s=0)),
    "hold for 601 s": (two_lines, lambda w: w.hold(9, lasts_s=601)),
    "hold too many": (two_lines, lambda w: w.hold(*range(33))),
    "hold in an older term": (held, lambda w: w.hold(9, term=1, n=6)),
    "hold with the same number": (held, lambda w: w.hold(9, term=2, n=5)),
    "hold as the ninth": (crowded, lambda w: w.hold(9, holder="h9")),
    "end a hold as an agent": (
        held,
        say(commands.EndHold, by=Sender("a", 1, 99), model=MODEL, holder="rollouts", term=99),
    ),
    "end a hold in -1": (held, say(commands.EndHold, by=HUB, model=MODEL, holder="rollouts", term=-1)),
    "end a hold that is none": (held, lambda w: w.end_hold("other")),
    "end a hold too early": (held, lambda w: w.end_hold()),
    "delete a model in use": (two_lines, say(commands.Delete, model=MODEL)),
    "delete the job as an agent": (pair, say(commands.DeleteJob, by=Sender("a", 1, 99))),
    "delete the job as the hub": (pair, say(commands.DeleteJob, by=HUB)),
    "register in a deleted job": (deleted, reg()),
    "what is no command": (two_lines, lambda w: w.say(commands.Unreadable("retain", "the body is no command"))),
    # What registries say.
    "lead as an agent": (pair, say(commands.Lead, by=Sender("a", 1, 99), registry="r-0", term=1)),
    "lead as a.b": (pair, say(commands.Lead, by=HUB, registry="a.b", term=1)),
    "lead in -1": (pair, say(commands.Lead, by=HUB, registry="r-0", term=-1)),
    "lead at level -1": (pair, say(commands.Lead, by=Sender("_registry", 5, 0), registry="r-1", term=5, level=-1)),
    "lead in the term of another": (led, say(commands.Lead, by=Sender("_registry", 7, 0), registry="r-0", term=5)),
    "expire as an agent": (pair, say(commands.Expire, by=Sender("a", 1, 99), agent="b", incarnation=1, term=99)),
    "expire as a namesake": (pair, say(commands.Expire, by=Sender("registry", 1, 1), agent="b", incarnation=1, term=9)),
    "expire unsigned": (pair, say(commands.Expire, agent="a", incarnation=1, term=1)),
    "expire in -1": (pair, say(commands.Expire, by=HUB, agent="a", incarnation=1, term=-1)),
    "expire in an older term": (lost, say(commands.Expire, by=OTHER, agent="b", incarnation=1, term=6)),
    "expire on an older lane": (lost, lambda w: w.expire("b", term=6)),
    "expire against the leader": (led, say(commands.Expire, by=OTHER, agent="a", incarnation=1, term=4)),
    "expire again": (lost, lambda w: w.expire("a", term=7)),
    "expire an older incarnation": (returned, lambda w: w.expire("a", incarnation=1)),
    "forget as an agent": (lost, say(commands.ForgetAgent, by=Sender("b", 1, 999), agent="a", incarnation=1, term=7)),
    "forget in -1": (lost, say(commands.ForgetAgent, by=OTHER, agent="a", incarnation=1, term=-1)),
    "forget a live one": (lost, lambda w: w.forget("b", term=7)),
    "forget nobody": (lost, lambda w: w.forget("nobody", term=7)),
    "forget an older incarnation": (lost, say(commands.ForgetAgent, by=OTHER, agent="a", incarnation=2, term=7)),
    "forget in an older term": (lost, say(commands.ForgetAgent, by=OTHER, agent="a", incarnation=1, term=1)),
    "forget too early": (lost, lambda w: w.forget("a", term=7)),
}

SNAPSHOT = """
model a.b => InvalidName: model name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
replica a.b => InvalidName: replica name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
replica _x => InvalidName: replica name '_x' begins with '_', which is kept for the hub itself: choose another
layout a.b => BadCommand: layout 'a.b' is no digest: send the hexadecimal digits of it
layout of 65 => BadCommand: layout 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' is no digest: send the hexadecimal digits of it
size -1 => BadCommand: size -1 is out of range: take 0 to 9007199254740991
size too large => BadCommand: size 1000000000000000000000000000000 is out of range: take 0 to 9007199254740991
shard 2 of 2 => LayoutMismatch: shard 2 of 2 of policy/other is out of range: shards count from 0, at most 4096
shard -1 => LayoutMismatch: shard -1 of 1 of policy/other is out of range: shards count from 0, at most 4096
no shards => LayoutMismatch: shard 0 of 0 of policy/other is out of range: shards count from 0, at most 4096
too many shards => LayoutMismatch: shard 0 of 4097 of policy/other is out of range: shards count from 0, at most 4096
other layout => LayoutMismatch: shard 0 of policy/long stands with another layout (0123456789ab, not fedcba987654): release it first, or use another replica name
other count => LayoutMismatch: policy/trainer was registered with shards=1, spot=False, not shards=2, spot=False: use the same for all its shards, or release them first
spot beside none => LayoutMismatch: policy/trainer was registered with shards=1, spot=False, not shards=1, spot=True: use the same for all its shards, or release them first
shard of another => ReplicaConflict: shard 0 of policy/trainer stands on agent 'a': release it there, or use another replica name
register unjoined => StaleSender: agent 'nobody' has not joined job 'run-7': send 'join' first
no sender's lane => BadCommand: ('b/x', 1, 1) is no sender: take a process's name, or with '/' its lane 0 to 1023, and numbers from 0 to 9007199254740991
host a.b => InvalidName: host name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
rack a.b => InvalidName: rack name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
site a.b => InvalidName: site name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
cache -1 => BadCommand: cache -1 is out of range: take 0 to 9007199254740991
join as the hub => BadCommand: an agent must join under its own name, which can't begin with '_'
join again with too much room => BadCommand: cache 9007199254740992 is out of range: take 0 to 9007199254740991
join as it is => StaleSender: agent 'a' joined with incarnation 1 before: use a higher one
join lower => StaleSender: lane 'a' has said (1, 1) already, so (0, 4) comes too late
join again when lost => StaleSender: agent 'a' joined with incarnation 1 before: use a higher one
join unsigned => BadCommand: an agent must join under its own name, which can't begin with '_'
release for another => BadCommand: shard 0 of policy/trainer stands on agent 'a': 'b' can't speak for it
unpublish for another => BadCommand: shard 0 of policy/trainer stands on agent 'a': 'b' can't speak for it
unpublish of nothing => BadCommand: shard 5 of policy/trainer is not registered: 'b' can't speak for it
withdraw for another => BadCommand: shard 0 of policy/trainer stands on agent 'a': 'b' can't speak for it
drained for another => BadCommand: shard 0 of policy/trainer stands on agent 'a': 'b' can't speak for it
decline for another => BadCommand: shard 0 of policy/trainer stands on agent 'a': 'b' can't speak for it
unpublish unsigned => BadCommand: this command must name its sender
ready of a lost one => StaleSender: incarnation 1 of agent 'a' is over (the log knows 1, lost): join again with a higher one
ready of an older one => StaleSender: incarnation 1 of agent 'a' is over (the log knows 2, live): join again with a higher one
unpublish of a later one => StaleSender: incarnation 2 of agent 'b' is over (the log knows 1, live): join again with a higher one
root a.b => BadCommand: root 'a.b' is no digest: send the hexadecimal digits of it
publish -1 => VersionConflict: version -1 is out of range: take 0 to 9007199254740991
publish too high => VersionConflict: version 9007199254740992 is out of range: take 0 to 9007199254740991
publish over 12 => VersionConflict: policy/trainer shard 0 still has version 12 published: unpublish 12 first
publish the next over 12 => VersionConflict: policy/trainer shard 0 still has version 12 published: unpublish 12 first
publish older => VersionConflict: version 11 of model 'policy' is not newer than the last published one, 12: publish 13 or higher
publish equal with other bytes => VersionConflict: version 12 of model 'policy' is not newer than the last published one, 12, and with other bytes than these (version 12 is taken): publish 13 or higher
publish above the highest => VersionConflict: no version above 9007199254740991 is possible: publish 'policy' under another name
publish below the highest => VersionConflict: version 14 of model 'policy' is not newer than the last published one, 9007199254740991: no version above 9007199254740991 is possible: publish 'policy' under another name
publish draining => ReplicaConflict: policy/trainer shard 0 is busy (draining): wait until its other call has ended
publish in another layout => VersionConflict: version 12 of model 'policy' is not newer than the last published one, 12, and in a layout that no holder has, so that equal bytes can't be told: only a read can fill this replica (version 12 is taken): publish 13 or higher
publish other bytes => VersionConflict: version 12 of model 'policy' is not newer than the last published one, 12, and with other bytes than these (version 12 is taken): publish 13 or higher
publish without digests => VersionConflict: version 12 of model 'policy' is not newer than the last published one, 12, and without digests, by which equal bytes could be told (version 12 is taken): publish 13 or higher
publish what was retired => VersionConflict: version 13 of model 'policy' is not newer than the last published one, 13, and was retired by a rewind (version 13 is taken): publish 14 or higher
publish again what was retired => VersionConflict: policy/other shard 0 still has version 13 published: unpublish 13 first
withdraw nothing => NotPublished: shard 0 of policy/trainer waits for no publication
withdraw what failed => NotPublished: shard 0 of policy/trainer waits for no publication
unpublish nothing => NotPublished: shard 0 of policy/trainer has nothing published
unpublish again => NotPublished: shard 0 of policy/trainer has nothing published
unpublish in a round => ReplicaConflict: shard 0 of replica 'trainer' is in round N: wait for its end
drained of nothing => NotPublished: shard 0 of policy/trainer is not draining
release what is published => ReplicaConflict: shard 0 of policy/trainer still has version 12 published: unpublish it first
wish over 12 => VersionConflict: policy/trainer shard 0 still has version 12 published: unpublish 12 first
wish the next over 12 => VersionConflict: policy/trainer shard 0 still has version 12 published: unpublish 12 first
wish -1 => VersionConflict: version -1 is out of range: take 0 to 9007199254740991
wish not newer => VersionConflict: version 12 of model 'policy' is not newer than the last published one, 13: publish 14 or higher
wish too high => VersionConflict: version 9007199254740992 is out of range: take 0 to 9007199254740991
wish of a half => BadCommand: replica 'trainer' lacks shards [1]: register all of them before publishing
wish of nobody => BadCommand: replica 'nobody' of model 'policy' is unknown: register its shards first
wish of no model => VersionUnavailable: model 'other' is unknown in job 'run-7': register a replica of it first
wish in a round => ReplicaConflict: policy/engine shard 0 is busy (empty): wait until its other call has ended
wish beside one that is busy => ReplicaConflict: policy/trainer shard 1 is busy (empty): wait until its other call has ended
decline of no wish => BadCommand: wish -1 is out of range: take 0 to 9007199254740991
want -1 => VersionUnavailable: version -1 can't exist: versions are 0 to 9007199254740991
want too high => VersionUnavailable: version 9007199254740992 can't exist: versions are 0 to 9007199254740991
want while offered => ReplicaConflict: shard 0 of policy/engine is being published: wait until that call has ended
want while draining => ReplicaConflict: shard 0 of policy/trainer is draining: wait until that has ended
want twice => ReplicaConflict: shard 0 of policy/engine is in round N already: wait for its end
want again => ReplicaConflict: shard 1 of policy/engine is in round N already: wait for its end
settle unjoined => BadCommand: shard 1 is not in round N of replica 'engine'
give up unjoined => BadCommand: shard 1 is not in round N of replica 'engine'
granted unjoined => BadCommand: shard 1 is not in round N of replica 'engine'
settle no round => BadCommand: round N of replica 'engine' is over
late settle => BadCommand: round N of replica 'engine' is over
late give up => BadCommand: round N of replica 'engine' is over
late filled => BadCommand: round N of replica 'engine' is over
late granted => BadCommand: round N of replica 'engine' is over
late replan => BadCommand: round N of replica 'engine' is over
granted to another attempt => BadCommand: attempt 2 of round N is over
replan of another attempt => BadCommand: attempt 2 of round N is over
replan of a later round => BadCommand: round N of replica 'engine' is over
replan after the start => BadCommand: attempt 1 of round N is over
filled before the start => BadCommand: round N is not filling version 12
filled with another root => IntegrityError: shard 0 of policy/engine has root other, and the log keeps L-12-0
filled with no digest => BadCommand: root 'no digest' is no digest: send the hexadecimal digits of it
filled with 11 => BadCommand: round N is not filling version 11
filled with 13 => BadCommand: round N is not filling version 13
filled twice => BadCommand: shard 0 of round N is ready, not filling
retain too many => RetentionFull: 33 versions can't be retained: take 0 (none) to 32
retain of no model => VersionUnavailable: model 'other' is unknown in job 'run-7': register a replica of it first
rewind to nothing => VersionUnavailable: model 'policy' can't be rewound to version 10: the last published one is 9
rewind to -1 => VersionUnavailable: model 'policy' can't be rewound to version -1: the last published one is 9
rewind behind a pin => VersionConflict: versions [9] of model 'policy' are pinned, so it can't be rewound to 8: unpin them first
drain nobody => AgentUnavailable: agent 'nobody' has not joined job 'run-7'
quota -1 => BadCommand: quota -1 is out of range: take 0 to 9007199254740991
pin what nobody has => VersionUnavailable: version 7 of model 'policy' has no live holder, so it can't be pinned; available now: [8, 9]
pin where nothing is => VersionUnavailable: version 12 of model 'policy' has no live holder, so it can't be pinned; available now: none
unpin -1 => BadCommand: version -1 is out of range: take 0 to 9007199254740991
hold of no model => VersionUnavailable: model 'other' is unknown in job 'run-7': register a replica of it first
hold as a.b => InvalidName: holder name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
hold in -1 => BadCommand: term -1 is out of range: take 0 to 9007199254740991
hold number -1 => BadCommand: n -1 is out of range: take 0 to 9007199254740991
hold for 0 s => BadCommand: a hold can't last 0 s: take 1 to 600
hold for 601 s => BadCommand: a hold can't last 601 s: take 1 to 600
hold too many => RetentionFull: 33 versions are too many: hold at most 32
hold in an older term => StaleSender: 'rollouts' has stated hold (2, 5) of model 'policy' already, so (1, 6) comes too late
hold with the same number => StaleSender: 'rollouts' has stated hold (2, 5) of model 'policy' already, so (2, 5) comes too late
hold as the ninth => RetentionFull: 8 hold versions of model 'policy' already: wait until one of these holds ends
end a hold as an agent => BadCommand: only a registry may say that a hold has ended
end a hold in -1 => BadCommand: term -1 is out of range: take 0 to 9007199254740991
end a hold that is none => BadCommand: 'other' holds nothing of model 'policy'
end a hold too early => BadCommand: 'rollouts' holds versions for 58 s more: wait
delete a model in use => ReplicaConflict: model 'policy' has replicas ['trainer', 'engine'] on live agents: release them first
delete the job as an agent => BadCommand: a job is deleted by those who use it, not by an agent
delete the job as the hub => BadCommand: a job is deleted by those who use it, not by an agent
register in a deleted job => JobGone: job 'run-7' was deleted: take another name, or let this one be used anew with 'tensorhub delete --job run-7 --forget'
what is no command => BadCommand: the body is no command
lead as an agent => BadCommand: only a registry may say that it leads
lead as a.b => InvalidName: registry name 'a.b' can't be used: take 1 to 64 letters, digits, '_' or '-'
lead in -1 => BadCommand: term -1 is out of range: take 0 to 9007199254740991
lead at level -1 => BadCommand: level -1 is out of range: take 0 to 9007199254740991
lead in the term of another => BadCommand: term 5 is over: term 5 has spoken, so take a higher one
expire as an agent => BadCommand: only a registry may say that an agent is lost
expire as a namesake => BadCommand: only a registry may say that an agent is lost
expire unsigned => BadCommand: only a registry may say that an agent is lost
expire in -1 => BadCommand: term -1 is out of range: take 0 to 9007199254740991
expire in an older term => BadCommand: term 6 is over: term 7 has spoken
expire on an older lane => StaleSender: lane '_registry' has said (7, 4) already, so (6, 5) comes too late
expire against the leader => BadCommand: term 4 is over: term 5 has spoken
expire again => BadCommand: agent 'a' has no live incarnation 1
expire an older incarnation => BadCommand: agent 'a' has no live incarnation 1
forget as an agent => BadCommand: only a registry may say that an agent is forgotten
forget in -1 => BadCommand: term -1 is out of range: take 0 to 9007199254740991
forget a live one => BadCommand: agent 'b' has no lost incarnation 1
forget nobody => BadCommand: agent 'nobody' has no lost incarnation 1
forget an older incarnation => BadCommand: agent 'a' has no lost incarnation 2
forget in an older term => BadCommand: term 1 is over: term 7 has spoken
forget too early => BadCommand: agent 'a' was lost 2 s ago, and is remembered for 86400 s: wait
"""  # noqa: E501 (one sentence a line)

SENTENCES = dict(line.split(" => ") for line in SNAPSHOT.strip().splitlines())


def test_the_table_has_one_line_for_each_command() -> None:
    assert list(SENTENCES) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_refused_and_in_which_words(name: str) -> None:
    scene, command = COMMANDS[name]
    refusal = refused(command(scene()))
    assert re.sub(r"round -?\d+", "round N", f"{refusal.error}: {refusal.message}") == SENTENCES[name]


def test_the_largest_numbers_count() -> None:
    """What every JSON reader keeps exact is taken, the last number included."""
    world = pair()
    assert kinds(world.join("c", incarnation=NUMBER_MAX)) == ["agent.joined"]
    by = Sender("c/0", NUMBER_MAX, NUMBER_MAX)
    assert kinds(reg(nbytes=NUMBER_MAX, by=by)(world)) == ["shard.registered"]
    assert kinds(reg(by=by)(world)) == ["command.repeated"]


def test_a_move_that_no_table_has_is_named() -> None:
    """A bug: what is raised must say which transition was tried."""
    with pytest.raises(IllegalTransition, match=r"^ready knows no started$"):
        transition(SHARD_TRANSITIONS, ShardState.READY, ShardTransition.STARTED)
