"""A program of either release: folds entries of a log and says what it decided. It uses what both releases have.

In: a JSON object with the job, the entries, and the snapshot to begin with. Out: the decided events as they would be
written, the snapshot at the end, and why it stopped, if it did.
"""

import base64
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from tensorhub_common.catalog.snapshot import decode, encode


def of_either(*paths: str) -> Any:
    for path in paths:
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"this release has none of {paths}")


JobFold = of_either("tensorhub_registry.core.job_fold:JobFold", "tensorhub_registry.outcomes:JobFold")
Decided = of_either("tensorhub_registry.core.job_fold:CommandDecided", "tensorhub_registry.steps:Decided")


class Entry(msgspec.Struct, frozen=True):
    """One entry of the log."""

    seq: int
    time: float
    subject: str
    data: bytes
    headers: Mapping[str, str] = {}


class Task(msgspec.Struct, frozen=True):
    """What to fold."""

    job: str
    entries: list[Entry]
    snapshot: bytes | None = None


class Folded(msgspec.Struct, frozen=True):
    """What came of it."""

    events: list[str]
    snapshot: bytes | None
    error: str | None
    seq: int


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    events: list[str] = []
    error = None
    fold = JobFold(task.job)
    try:
        if task.snapshot is not None:
            fold = JobFold.restored(decode(task.job, task.snapshot))
        for entry in task.entries:
            for effect in fold.handle(entry, 0.0):
                if isinstance(effect, Decided):
                    events += [msgspec.json.encode(event).decode() for event in effect.events]
    except Exception as why:  # noqa: BLE001 (it is what was asked for)
        error = f"{type(why).__name__}: {why}"
    snapshot = fold.snapshot()
    body = None if snapshot is None else base64.b64encode(encode(snapshot)).decode()
    json.dump({"events": events, "snapshot": body, "error": error, "seq": fold.seq}, sys.stdout)


if __name__ == "__main__":
    main()
