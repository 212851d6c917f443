"""Starts a program that ends when its parent does, even when the parent is killed.

Run as `python -I -S tether.py PARENT_PID PROGRAM ARGUMENT…`: it asks the kernel to kill this process at its parent's
end and becomes the program, so the process id stays. The kernel means the parent *thread*: what starts children
must do so from a thread that lives as long as they shall. A program of its own, since Python code between fork and
exec isn't safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


def main() -> None:
    """Become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"the kernel would not tie this process to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # It ended before the kernel knew of our wish.
        sys.exit("the parent has already ended")
    try:
        os.execvp(program[0], program)  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.stderr.write(f"{program[0]} can't be started: {error}\n")
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main()
