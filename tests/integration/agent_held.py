"""An agent that is held in the middle of a read, so that a test meets it there however fast the machine is.

`HOLD` names what is held. `copying`: the reader's agent copies no further once it has copied a part, until the file
`go-on` stands in `HELD_DIR`, and the source's begins no second life before `may-return` stands there. `sending`: the
source's agent stops itself with SIGSTOP once a part of what it sends has arrived. Either way the file `held` is made
before.
"""

import os
import signal
import time
from pathlib import Path
from typing import Final

import xxhash

from tensorhub_agent.app.main import main
from tensorhub_agent.compute.pool import CopyBatch
from tensorhub_agent.transports.ucxx.server import Served

HOLD: Final = "HOLD"
HELD_DIR: Final = "HELD_DIR"
SENT_BYTES: Final = 8 * 1024 * 1024
LOOK_S: Final = 0.01


def _hold_copying(folder: Path) -> None:
    works = CopyBatch._do

    def held(self: CopyBatch, first: int, last: int, hasher: xxhash.xxh3_128) -> None:
        works(self, first, last, hasher)
        if self._from_address is not None:
            (folder / "held").touch()
            _wait_for(folder / "go-on")

    CopyBatch._do = held  # type: ignore[method-assign]


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(LOOK_S)


def _hold_return(folder: Path) -> None:
    if (folder / "held").exists():
        _wait_for(folder / "may-return")


def _hold_sending(folder: Path) -> None:
    works, sent_bytes = Served._sent, 0

    def held(self: Served, nbytes: int) -> None:
        nonlocal sent_bytes
        works(self, nbytes)
        sent_bytes += nbytes
        if sent_bytes >= SENT_BYTES and not (folder / "held").exists():
            (folder / "held").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    Served._sent = held  # type: ignore[method-assign]


HOLDS: Final = {
    ("copying", "agent-0"): _hold_return,
    ("copying", "agent-1"): _hold_copying,
    ("sending", "agent-0"): _hold_sending,
}


if __name__ == "__main__":
    hold = HOLDS.get((os.environ[HOLD], os.environ["TENSORHUB_AGENT_ID"]))
    if hold is not None:
        hold(Path(os.environ[HELD_DIR]))
    main()
