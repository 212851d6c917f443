"""What the agent's core has to know of a transport. Pure.

A transport is `local` (the memory of this host) or a wire. Nothing else in core, leases, transfer and rates
names one, so that a further wire is added without them.
"""

from typing import Final

from tensorhub_common.protocol.plans import Transport

_READ_FROM_MEMORY: Final[frozenset[Transport]] = frozenset({"local"})


def reads_memory(transport: Transport) -> bool:
    """Tell whether a reader copies out of the source's own memory, and the source does nothing for it.

    So a source that is late says nothing of the source, its memory can be lent to a worker, and a patch saves nothing.
    """
    return transport in _READ_FROM_MEMORY
