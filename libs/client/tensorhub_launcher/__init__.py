"""What the script `tensorhub` starts: the command, and Ctrl-C from the first instruction on.

To import the command takes half a second, in which Python would answer Ctrl-C with a traceback of the module at hand.
So this package imports nothing of ours, and next to nothing else. Until a command has begun there is nothing
to tidy up: a signal ends the process at once, with one line and the exit code that every command has for it (see
`tensorhub.cli.runner`).
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

BY_SIGNAL = 128
"""A command that a signal has ended has this exit code plus the signal's number, as shells have it."""

LINE = b"tensorhub: interrupted\n"
STDERR = 2


def end_at_once(number: int, _: "FrameType | None" = None) -> "NoReturn":
    """End the process for a signal, without unwinding anything."""
    os.write(STDERR, LINE)
    os._exit(BY_SIGNAL + number)


def listen() -> None:
    """End at once for Ctrl-C from now on. What was started to ignore it, as by `&` in a script, still does."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def have_standard_files() -> None:
    """Open stdin, stdout and stderr on nothing where they are closed: no socket may become what is printed to."""
    for descriptor in range(STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It takes the lowest number that is free, which is this one.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (it stays open; no imports)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (as above)


def main() -> None:
    """Be the command `tensorhub`."""
    listen()
    have_standard_files()
    from tensorhub_common.runtime.extras import run_main  # noqa: PLC0415 (nothing of ours before the two lines above)

    run_main("tensorhub.cli.main", "tensorhub", "cli")
