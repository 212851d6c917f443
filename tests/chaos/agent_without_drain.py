"""An agent whose `unpublish` neither waits for readers nor breaks their leases, and that says what torn bytes it meets.

It is what the torn-read hunt is held against: without the drain readers must meet pieces of two versions, must see it
by the digests, and must commit none of them.
"""

import os
from collections.abc import Iterable
from typing import Final

from tensorhub_agent.app.main import main
from tensorhub_agent.transfer.verification import Verification
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.faultsim.mutants.planting import planted

TORN: Final = "a piece is torn"
"""What stands on stderr for each."""


def _tell_torn() -> None:
    count = Verification.count

    def counted(self: Verification, ranges: Iterable[Range], digests: bytes) -> list[Range]:
        wrong = count(self, ranges, digests)
        if wrong:
            os.write(2, f"{TORN}: {wrong}\n".encode())
        return wrong

    Verification.count = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    _tell_torn()
    with planted("no-drain"):
        main()
