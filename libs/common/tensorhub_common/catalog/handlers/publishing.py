"""How versions come and go: publish, unpublish, and who waits for whom.

A replica publishes when all of its shards have offered the memory that they hold, under one version, or not at all.
Versions are compared with the last *published* one, so an abandoned number may be used again.
"""

from collections.abc import Callable, Mapping
from typing import Final

from tensorhub_common.catalog import cache_replicas, retention
from tensorhub_common.catalog.availability import Out, move_shard, refresh_availability
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.state import (
    Catalog,
    Model,
    Offer,
    Replica,
    Shard,
    Version,
    holds,
    is_retired,
    known_root,
    root_key,
)
from tensorhub_common.catalog.transitions import ShardState, ShardTransition
from tensorhub_common.catalog.validation import CommandRefused, checked_digest, checked_number, owned_shard, the_replica
from tensorhub_common.errors import BadCommand, NotPublished, ReplicaConflict, VersionConflict
from tensorhub_common.protocol.log.commands import (
    NO_ROOT,
    VERSION_MAX,
    Decline,
    Drained,
    Publish,
    Ready,
    Stay,
    Unpublish,
    Withdraw,
)
from tensorhub_common.protocol.log.events import (
    PublishDeclined,
    PublishFailed,
    PublishJoined,
    PublishStands,
    PublishWished,
    PublishWithdrawn,
    ReplicaReady,
    ShardDrained,
    ShardDraining,
    ShardStays,
    UnpublishHeld,
    VersionPublished,
)
from tensorhub_common.protocol.log.levels import known_error

FIRST_VERSION = 1
REASON_CHARS_MAX = 1000


def publish(catalog: Catalog, command: Publish, out: Out) -> None:
    """Pass on a wish from outside; the agents of the replica's shards answer it with `Ready`."""
    model, replica = the_replica(catalog, command.model, command.replica)
    if len(replica.members) < replica.shards:
        raise CommandRefused(
            BadCommand,
            f"replica {replica.name!r} lacks shards {list(replica.missing(replica.members))}: "
            "register all of them before publishing",
        )
    wished = command.version
    for shard in _in_order(replica):
        if wished is not None and holds(model, replica, shard.index, wished):
            continue
        _check_free(model, replica, shard, wished)
        why = _not_newer(model, replica, shard, wished, None)
        if why is not None:
            raise CommandRefused(VersionConflict, why)
    out.append(PublishWished(model=model.name, replica=replica.name, version=wished, shards=replica.shards))


def decline(catalog: Catalog, command: Decline, out: Out) -> None:
    """Pass on why a wish is not fulfilled."""
    model, replica, shard = owned_shard(catalog, command)
    out.append(
        PublishDeclined(
            model=model.name,
            replica=replica.name,
            shard=shard.index,
            wish=checked_number("wish", command.wish),
            error=known_error(catalog.level, command.error),
            message=command.message[:REASON_CHARS_MAX],
        )
    )


def ready(catalog: Catalog, command: Ready, out: Out) -> None:
    """Take one shard's offer, and publish once every shard of the replica has one."""
    model, replica, shard = owned_shard(catalog, command)
    same = (command.version, command.root) == (shard.version, shard.root)
    if shard.state is ShardState.READY and same and not is_retired(model, shard.version):
        out.append(_stands(model, replica, shard))
        return
    if replica.cache is not None:
        raise CommandRefused(
            BadCommand, f"replica {replica.name!r} is a copy of version {replica.cache}: publish another one"
        )
    if replica.mapped:
        raise CommandRefused(BadCommand, f"replica {replica.name!r} maps what others hold: publish another one")
    checked_digest("root", command.root)
    _check_free(model, replica, shard, command.version)
    offers = {**replica.offers, shard.index: Offer(command.version, command.root)}
    why = _conflicting_versions(offers) or _not_newer(model, replica, shard, command.version, command.root)
    if why is not None and len(offers) == 1:
        raise CommandRefused(VersionConflict, why)
    replica.offers = offers
    if why is not None:
        fail(model, replica, why, out)
        return
    missing = _missing(model, replica)
    if missing:
        out.append(
            PublishJoined(
                model=model.name, replica=replica.name, shard=shard.index, version=command.version, missing=missing
            )
        )
        return
    _conclude(catalog, model, replica, out)


def _stands(model: Model, replica: Replica, shard: Shard) -> PublishStands:
    assert shard.version is not None
    return PublishStands(model=model.name, replica=replica.name, shard=shard.index, version=shard.version)


def _check_free(model: Model, replica: Replica, shard: Shard, version: int | None) -> None:
    """Refuse a shard that can't publish now, and a number that no version has."""
    where = f"{model.name}/{replica.name} shard {shard.index}"
    if shard.state is ShardState.READY:
        raise CommandRefused(
            VersionConflict, f"{where} still has version {shard.version} published: unpublish {shard.version} first"
        )
    if shard.state is not ShardState.EMPTY or (replica.round is not None and shard.index in replica.round.wants):
        raise CommandRefused(ReplicaConflict, f"{where} is busy ({shard.state}): wait until its other call has ended")
    if version is not None and not 0 <= version <= VERSION_MAX:
        raise CommandRefused(VersionConflict, f"version {version} is out of range: take 0 to {VERSION_MAX}")


def _not_newer(model: Model, replica: Replica, shard: Shard, version: int | None, root: str | None) -> str | None:
    """Say why an offer can't become a version, or None. A wish has no root: its bytes are not digested yet."""
    last = model.last
    if last is None or (version is not None and version > last):
        return None
    full = f"no version above {last} is possible: publish {model.name!r} under another name"
    if version is None:
        return None if last < VERSION_MAX else full
    same = ""
    if version == last:
        if root is None or _equal_bytes(model, replica, shard, version, root):
            return None
        same = f", and {_taken(model, replica, shard, version, root)} (version {version} is taken)"
    return (
        f"version {version} of model {model.name!r} is not newer than the last published one, {last}{same}: "
        f"{full if last >= VERSION_MAX else f'publish {last + 1} or higher'}"
    )


def _taken(model: Model, replica: Replica, shard: Shard, version: int, root: str) -> str:
    """Say why the shard can't join those who hold the last version."""
    if is_retired(model, version):
        return "was retired by a rewind"
    known = known_root(model, replica, shard, version)
    if known is None:
        return "in a layout that no holder has, so that equal bytes can't be told: only a read can fill this replica"
    if NO_ROOT in (root, known):
        return "without digests, by which equal bytes could be told"
    return "with other bytes than these"


def _equal_bytes(model: Model, replica: Replica, shard: Shard, version: int, root: str) -> bool:
    known = known_root(model, replica, shard, version)
    return root != NO_ROOT and root == known and not is_retired(model, version)


def _conflicting_versions(offers: Mapping[int, Offer]) -> str | None:
    numbers = sorted({offer.version for offer in offers.values() if offer.version is not None})
    return f"the shards name versions {numbers}; all shards must publish one" if len(numbers) > 1 else None


def _target(model: Model, offers: Mapping[int, Offer]) -> int:
    named = next((offer.version for offer in offers.values() if offer.version is not None), None)
    if named is not None:
        return named
    return FIRST_VERSION if model.last is None else model.last + 1


def _missing(model: Model, replica: Replica) -> tuple[int, ...]:
    """Name the shards that have made no offer and are not ready at the offered version either."""
    version = _target(model, replica.offers)
    missing = replica.missing(replica.offers)
    # A version that is new has no holder.
    if version not in model.versions:
        return missing
    return tuple(index for index in missing if not holds(model, replica, index, version))


def _conclude(catalog: Catalog, model: Model, replica: Replica, out: Out) -> None:
    """Every shard has come: publish, or fail for all of them."""
    version = _target(model, replica.offers)
    offers = dict(replica.offers)
    # Another replica may have published since the first shard offered: equal bytes make a holder, others fail.
    refusals = [_not_newer(model, replica, replica.members[i], version, offer.root) for i, offer in offers.items()]
    why = next((each for each in refusals if each is not None), None)
    if why is not None:
        fail(model, replica, why, out)
        return
    if model.last is None or version > model.last:
        keys = [root_key(replica.shards, shard.index, shard.layout) for shard in _in_order(replica)]
        roots = [offers[index].root for index in range(replica.shards)]
        model.versions[version] = Version(
            number=version,
            time=catalog.time,
            publisher=replica.name,
            roots=dict(zip(keys, roots, strict=True)),
        )
        model.last = version
        out.append(VersionPublished(model=model.name, version=version, replica=replica.name, roots=tuple(roots)))
    replica.offers.clear()
    for index, offer in offers.items():
        move_shard(replica.members[index], ShardTransition.PUBLISHED, version, offer.root)
    refresh_availability(model, replica, "published", out)
    out.append(ReplicaReady(model=model.name, replica=replica.name, version=version))
    rounds.decide_waiting_rounds(catalog, model, out)
    rounds.report_overtaken(model, version, out)


def _in_order(replica: Replica) -> list[Shard]:
    return [replica.members[index] for index in range(replica.shards)]


def fail(model: Model, replica: Replica, message: str, out: Out) -> None:
    """End a publication for all shards that have offered."""
    shards = tuple(sorted(replica.offers))
    replica.offers.clear()
    out.append(
        PublishFailed(
            model=model.name,
            replica=replica.name,
            error=VersionConflict.__name__,
            message=message,
            shards=shards,
        )
    )


def withdraw(catalog: Catalog, command: Withdraw, out: Out) -> None:
    """Take a shard's offer back, unless the log has decided already."""
    model, replica, shard = owned_shard(catalog, command)
    if shard.state is ShardState.READY:
        out.append(_stands(model, replica, shard))
        return
    if shard.index not in replica.offers:
        raise CommandRefused(
            NotPublished, f"shard {shard.index} of {model.name}/{replica.name} waits for no publication"
        )
    missing = _missing(model, replica)
    del replica.offers[shard.index]
    out.append(PublishWithdrawn(model=model.name, replica=replica.name, shard=shard.index, missing=missing))


def unpublish(catalog: Catalog, command: Unpublish, out: Out) -> None:
    """Count a shard as draining: it is no holder any more, and its memory still must not change.

    One of the last counting copy of a retained version goes on being published until another one is whole.
    """
    model, replica, shard = owned_shard(catalog, command)
    if shard.state is not ShardState.READY or shard.version is None:
        raise CommandRefused(NotPublished, f"shard {shard.index} of {model.name}/{replica.name} has nothing published")
    if replica.round is not None and shard.index in replica.round.wants:
        raise CommandRefused(
            ReplicaConflict,
            f"shard {shard.index} of replica {replica.name!r} is in round {replica.round.number}: wait for its end",
        )
    version = shard.version
    if command.void or not retention.must_stay(catalog, model, replica):
        drain(model, replica, shard, out)
        return
    placed: Out = []
    coming = retention.is_coming(catalog, model, replica, version)
    if not coming and not cache_replicas.place_copy(catalog, model, model.versions[version], placed):
        raise retention.refuse_full(model, replica, version)
    shard.leaving = True
    out.append(UnpublishHeld(model=model.name, replica=replica.name, shard=shard.index, version=version))
    out.extend(placed)


def drain(model: Model, replica: Replica, shard: Shard, out: Out) -> None:
    """Count a ready shard as draining."""
    version = shard.version
    assert version is not None
    move_shard(shard, ShardTransition.UNPUBLISHED)
    out.append(ShardDraining(model=model.name, replica=replica.name, shard=shard.index, version=version))
    refresh_availability(model, replica, "unpublished", out)


def stay(catalog: Catalog, command: Stay, out: Out) -> None:
    """Leave a shard published whose unpublish was held back, at its caller's bound."""
    model, replica, shard = owned_shard(catalog, command)
    if not shard.leaving or shard.version is None:
        raise CommandRefused(
            NotPublished, f"shard {shard.index} of {model.name}/{replica.name} waits for no other copy"
        )
    shard.leaving = False
    out.append(ShardStays(model=model.name, replica=replica.name, shard=shard.index, version=shard.version))


def drained(catalog: Catalog, command: Drained, out: Out) -> None:
    """Count a draining shard as empty."""
    model, replica, shard = owned_shard(catalog, command)
    if shard.state is not ShardState.DRAINING or shard.version is None:
        raise CommandRefused(NotPublished, f"shard {shard.index} of {model.name}/{replica.name} is not draining")
    version = shard.version
    move_shard(shard, ShardTransition.DRAINED)
    out.append(ShardDrained(model=model.name, replica=replica.name, shard=shard.index, version=version))


HANDLERS: Final[dict[type, Callable[..., None]]] = {
    Publish: publish,
    Ready: ready,
    Decline: decline,
    Withdraw: withdraw,
    Unpublish: unpublish,
    Stay: stay,
    Drained: drained,
}
"""What carries out which command; `apply` looks here."""
