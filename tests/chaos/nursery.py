"""Starts worker processes within milliseconds: a process that has imported everything, and forks for each order.

Orders come by stdin, one JSON object a line; a worker connects to the script's socket as its standard output and says
first who it is. Workers die with the nursery, and the nursery with the script (see `tether`).
"""

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys

import msgspec
from tests.chaos import reports, worker
from tests.partition.namespaces import enter

from tensorhub.local.tether import PR_SET_PDEATHSIG


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Start this worker."""

    name: str
    config: worker.Config
    socket: str
    log: str


def main() -> None:
    # The kernel reaps: the script learns of an end by the end of the connection.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        if os.fork() == 0:
            _become(order)


def _become(order: Order) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    out = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    out.connect(order.socket)
    for fd, as_fd in ((null, 0), (out.fileno(), 1), (log, 2)):
        os.dup2(fd, as_fd)
    out.close()
    random.seed()
    if order.config.netns:
        enter(order.config.netns)
    worker.tell(reports.Born(at=worker.now(), name=order.name, pid=os.getpid()))
    code = 1
    try:
        asyncio.run(worker.main(order.config))
        code = 0
    finally:
        sys.stderr.flush()
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


if __name__ == "__main__":
    main()
