"""What fake engines have made, by their own word: a record for each token, and for each attempt that was begun.

An engine appends to a file of its own process. What it has written stays when it is killed, so that tokens which were
made and got lost can be counted. Times are CLOCK_MONOTONIC, which all processes share.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import attempt_key

RECORD: Final = np.dtype(
    [
        ("at", "<f8"),
        ("seed", "<u8"),
        ("attempt", "<i8"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("version", "<i4"),
        ("pid", "<i4"),
    ]
)
"""`seed` is the request's own; `attempt` as a frame has it (`attempt_key`)."""

BEGUN: Final = -1
"""In place of a token: the engine began with the attempt behind `position` tokens."""

Records = npt.NDArray[np.void]


class EngineRecorder:
    """Writes the records of one engine. `folder`: empty, to write none."""

    def __init__(self, folder: str, runner: str) -> None:
        self._pending: list[tuple[int, int, int, int, int]] = []
        self._file = -1
        self._pid = os.getpid()
        if folder:
            path = Path(folder) / f"{runner}-{self._pid}.records"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begun(self, seed: int, attempt: Attempt, position: int, version: int) -> None:
        """Note, and write at once, that an attempt was begun."""
        self.made(seed, attempt, position, BEGUN, version)
        self.write()

    def made(self, seed: int, attempt: Attempt, position: int, token: int, version: int) -> None:
        """Note a token."""
        if self._file >= 0:
            self._pending.append((seed, attempt_key(attempt), position, token, version))

    def write(self) -> None:
        """Write what was noted."""
        if self._pending:
            at = time.monotonic()
            rows = np.array([(at, *each, self._pid) for each in self._pending], RECORD)
            os.write(self._file, rows.tobytes())
            self._pending.clear()


def read_records(folder: Path) -> Records:
    """Return all records of a folder, in the order of their times."""
    parts = []
    for path in sorted(folder.glob("*.records")):
        data = path.read_bytes()
        # Of a process that was killed while it wrote, the last record may be torn.
        parts.append(np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD))
    found = np.concatenate(parts) if parts else np.empty(0, RECORD)
    return found[np.argsort(found["at"], kind="stable")]


def delays(records: Records, struck_at: float, pid: int | None = None, *, elsewhere: bool = False) -> list[float]:
    """Return, for each request, how long after a blow its next token was made; in order. One that got none has none.

    `pid`: of the requests alone that this process had made the last token of, or had begun last. `elsewhere`: the
    tokens of other processes alone count.
    """
    is_before = records["at"] <= struck_at
    before, after = records[is_before], records[~is_before & (records["token"] != BEGUN)]
    if elsewhere:
        after = after[after["pid"] != pid]
    last = dict(zip(before["seed"].tolist(), before["pid"].tolist(), strict=True))
    first: dict[int, float] = {}
    for seed, at in zip(after["seed"].tolist(), after["at"].tolist(), strict=True):
        if pid is None or last.get(seed) == pid:
            first.setdefault(seed, at - struck_at)
    return sorted(first.values())


def repeats(records: Records) -> int:
    """Return how many tokens were made for a place of a request for which one had been made before."""
    made = records[records["token"] != BEGUN]
    return len(made) - len(np.unique(fingerprints(made["seed"], made["position"])))


def fingerprints(*columns: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    """Return one number for each row of the columns; of two different rows it is the same by chance of 2^-64."""
    found = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found
