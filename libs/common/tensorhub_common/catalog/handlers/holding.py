"""Holds: versions that somebody needs for a while have a copy meanwhile, and nothing waits for that.

Invariants:
- A hold has the versions of its holder's highest (term, n): a late word never takes the place of a later one.
- It stands until it is stated anew, or a registry's leader ends it after its time, by JetStream's time of the entry.
- No act of a trainer waits, or is refused, because of a hold (`retention.must_stay` does not look at them), and a copy
  that is only held makes room for one of a retained version.
"""

from collections.abc import Callable
from typing import Final

from tensorhub_common.catalog.availability import Out
from tensorhub_common.catalog.state import Catalog, VersionHold
from tensorhub_common.catalog.validation import (
    CommandRefused,
    checked_name,
    checked_number,
    is_registry_sender,
    the_model,
)
from tensorhub_common.errors import BadCommand, RetentionFull, StaleSender
from tensorhub_common.protocol.log.commands import HOLD_S_MAX, HOLDERS_MAX, RETAINED_MAX, EndHold, Hold
from tensorhub_common.protocol.log.events import HoldEnded, HoldStated
from tensorhub_common.protocol.queries import VersionState


def hold(catalog: Catalog, command: Hold, out: Out) -> None:
    """Have copies of a holder's versions from now on, in place of those that it held before."""
    model = the_model(catalog, command.model)
    holder = checked_name("holder", command.holder)
    checked_number("term", command.term)
    checked_number("n", command.n)
    if not 1 <= command.lasts_s <= HOLD_S_MAX:
        raise CommandRefused(BadCommand, f"a hold can't last {command.lasts_s} s: take 1 to {HOLD_S_MAX}")
    if len(command.versions) > RETAINED_MAX:
        raise CommandRefused(
            RetentionFull, f"{len(command.versions)} versions are too many: hold at most {RETAINED_MAX}"
        )
    known = model.holds.get(holder)
    if known is not None and (command.term, command.n) <= (known.term, known.n):
        raise CommandRefused(
            StaleSender,
            f"{holder!r} has stated hold ({known.term}, {known.n}) of model {model.name!r} already, so "
            f"({command.term}, {command.n}) comes too late",
        )
    if known is None and len(model.holds) >= HOLDERS_MAX:
        raise CommandRefused(
            RetentionFull,
            f"{HOLDERS_MAX} hold versions of model {model.name!r} already: wait until one of these holds ends",
        )
    standing = {n for n, version in model.versions.items() if version.state is not VersionState.RETIRED}
    versions = tuple(sorted(standing.intersection(command.versions)))
    until = catalog.time + command.lasts_s
    if versions:
        model.holds[holder] = VersionHold(command.term, command.n, versions, until)
    else:
        model.holds.pop(holder, None)
    catalog.tended[model.name] = None
    out.append(HoldStated(model=model.name, holder=holder, versions=versions, until=until))


def end_hold(catalog: Catalog, command: EndHold, out: Out) -> None:
    """End a hold that was not stated again in time."""
    if command.by is None or not is_registry_sender(command.by):
        raise CommandRefused(BadCommand, "only a registry may say that a hold has ended")
    checked_number("term", command.term)
    if command.term < catalog.term:
        raise CommandRefused(BadCommand, f"term {command.term} is over: term {catalog.term} has spoken")
    model = the_model(catalog, command.model)
    known = model.holds.get(command.holder)
    if known is None:
        raise CommandRefused(BadCommand, f"{command.holder!r:.80} holds nothing of model {model.name!r}")
    if catalog.time < known.until:
        left = known.until - catalog.time
        raise CommandRefused(BadCommand, f"{command.holder!r} holds versions for {left:.0f} s more: wait")
    catalog.term = command.term
    del model.holds[command.holder]
    out.append(HoldEnded(model=model.name, holder=command.holder, term=command.term))


HANDLERS: Final[dict[type, Callable[..., None]]] = {Hold: hold, EndHold: end_hold}
"""What carries out which command; `apply` looks here."""
