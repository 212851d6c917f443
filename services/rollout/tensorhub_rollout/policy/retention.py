"""Which versions the hub is to hold: those that open requests are for alone. Pure.

A version ends with its last holder: its trainer publishes the next one, and machines of instances go away. While a
request is for it alone, the hub therefore has a copy. The number of copies is bounded, since each takes a model's size.
What is held stays held while requests need it. Then the oldest version comes first: a trainer, or other instances, are
likely to have the newer ones. A version beyond the bound is as safe as without this policy: its last instance does not
go on from it (`activation.py`), and the loss of that one takes it.
"""

from collections.abc import Collection

import msgspec


class RetentionLimits(msgspec.Struct, frozen=True):
    """The settings of retention."""

    is_on: bool = True
    versions_max: int = 4
    """Limit of the versions of a model that are held at once."""
    hold_s: int = 60
    """So long a hold lasts after its entry, in seconds: a manager that was killed has a successor by then."""


def decide(
    needed: Collection[int],
    available: Collection[int],
    held: Collection[int],
    limits: RetentionLimits,
    *,
    can_load: bool,
) -> tuple[int, ...]:
    """Return the versions to hold from now on.

    `needed`: versions that requests are open for alone, and that are not retired. `available`: those that a replica
    has. `held`: those that are held now. `can_load`: whether there may be an instance that loads an older version; what
    is held stays held without one, since it may be about to come.
    """
    if not limits.is_on:
        return ()
    # What is held and not available may come back with its holder.
    wanted = [each for each in needed if each in held or (can_load and each in available)]
    wanted.sort(key=lambda version: (version not in held, version))
    return tuple(sorted(wanted[: limits.versions_max]))
