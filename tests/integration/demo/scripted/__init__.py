"""Programs in place of the demo's trainer and rollouts: they tell `run` what a test wants told, and hold no model."""

import json
import os
import signal
import sys

WRONG = os.environ.get("SCRIPTED_WRONG", "")
"""What goes wrong: differs-held, differs-end, dies, hangs, stale, loss; nothing where it is empty."""


def tell(kind: str, **facts: object) -> None:
    print(json.dumps({"kind": kind, **facts}), flush=True)


def copy(kind: str, version: int, differing: list[str]) -> None:
    sources = [{"replica": "trainer", "nbytes": 7, "transport": "local"}]
    tell(kind, version=version, nbytes=7, differing=differing, says="", sources=sources)


def end_when_told(version: int, differing: list[str]) -> None:
    """Wait for the order to end, and compare once more."""
    signal.sigwait({signal.SIGTERM})
    copy("end", version, differing)
    sys.exit()


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
