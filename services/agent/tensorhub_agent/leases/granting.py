"""What stands against a lease that is asked for: the reason in words, or nothing. Pure.

Always true: whoever is let in reads exactly the version that was asked for, and nobody is let in who could wait for
himself, over however many others.
"""

from typing import Final

from tensorhub_agent.leases.lease import Offered
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import LeaseAsk, precedes

READERS_MAX: Final = 256
"""A shard serves at most so many readers at once."""

LEASES_OF_ONE_MAX: Final = 64
"""Of which one agent has at most so many, so that one that only asks leaves room for the others."""


def is_asked_for(coming: Offered, ask: LeaseAsk) -> bool:
    """Tell whether what a shard is being filled with is what is asked for. A reader by a program may know no root."""
    if coming.version != ask.version:
        return False
    return coming.root == ask.root or (ask.units and None in (coming.root, ask.root))


def bars_reading(offered: Offered, ask: LeaseAsk) -> str | None:
    """Tell why what stands ready is not what is asked for."""
    if ask.root is not None and ask.root != offered.root:
        return f"the shard holds other bytes than version {ask.version} has by the log"
    if offered.version is not None and offered.version != ask.version:
        return f"the shard holds version {offered.version}, not {ask.version}"
    if offered.version is None and (ask.root is None or ask.root == NO_ROOT):
        # Only a root of real digests says that these are the bytes of the version that the log has numbered meanwhile.
        return "the shard's publication has no number yet"
    return None


def bars_waiting(coming: Offered, ask: LeaseAsk, program: str | None) -> str | None:
    """Tell why the reader may not wait for what a shard is being filled with, by `program` if it goes by one."""
    assert coming.turn is not None
    if ask.promises and ask.program != program:
        return "the shard is not filled by the program by which the reader goes"
    if not ask.promises and not precedes(coming.turn, ask.turn):
        return "the shard is being filled, and its turn is not earlier than the reader's"
    if coming.units is not None and not ask.units:
        return "the shard is filled by a program: what its pieces hash to is not known yet"
    return None


def bars_another(offered: Offered, agent: str) -> str | None:
    """Tell why there is no room for another lease of this agent."""
    if len(offered.leases) >= READERS_MAX:
        return f"the shard has {READERS_MAX} readers already"
    if sum(lease.reader.startswith(f"{agent}/") for lease in offered.leases.values()) >= LEASES_OF_ONE_MAX:
        return f"agent {agent!r} has {LEASES_OF_ONE_MAX} leases on the shard already"
    return None
