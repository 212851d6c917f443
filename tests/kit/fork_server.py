"""A process that has imported torch and tensorhub, and forks a Python program for each order within milliseconds.

An order comes by a socket, with the three files that become the program's own; the exit code goes back the same way.
All programs end with the fork server, and it with the tests. A test of an interpreter's end starts one of its own.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Final

from tensorhub.local.tether import PR_SET_PDEATHSIG

ORDER_BYTES_MAX: Final = 128 * 1024
ANSWER_BYTES_MAX: Final = 64
FILES: Final = 3
START_S: Final = 60.0
BUFFER_BYTES: Final = 4096
INTERRUPTED: Final = 128 + signal.SIGINT

Files = tuple[int, int, int]
"""The descriptors of stdin, stdout and stderr."""
Started = tuple[int, "Future[int]"]
"""A process id, and the exit code to come."""


class ForkServer:
    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
            )
        self._lock = threading.Lock()
        self._forked: Future[int] = Future()
        self._codes: dict[int, Future[int]] = {}
        self._listening = threading.Thread(target=self._listen, name="fork server", daemon=True)
        self._listening.start()

    def start(self, text: str, arguments: tuple[str, ...], environment: Mapping[str, str], files: Files) -> Started:
        order = json.dumps({"text": text, "arguments": arguments, "environment": dict(environment)}).encode()
        assert len(order) <= ORDER_BYTES_MAX
        with self._lock:
            self._forked = Future()
            socket.send_fds(self._orders, [order], files)
            pid = self._forked.result(START_S)
        return pid, self._codes[pid]

    def close(self) -> None:
        self._orders.shutdown(socket.SHUT_RDWR)
        self._listening.join(START_S)
        self._orders.close()
        self._process.wait(START_S)

    def _listen(self) -> None:
        while answer := self._orders.recv(ANSWER_BYTES_MAX):
            pid, code = json.loads(answer)
            if code is None:
                self._codes[pid] = Future()
                self._forked.set_result(pid)
            else:
                self._codes[pid].set_result(code)


_server = cache(ForkServer)
_lock: Final = threading.Lock()


def fork_server() -> ForkServer:
    """Return the one of this process, which `close` ends. Several threads may call it at once."""
    with _lock:
        return _server()


def close() -> None:
    with _lock:
        if _server.cache_info().currsize:
            _server().close()
            _server.cache_clear()


# What follows runs in the fork server.


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([orders.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, BUFFER_BYTES)
            _report_ends(orders)
        if orders.fileno() not in ready:
            continue
        order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, FILES)
        if not order:
            return
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            os._exit(_become(json.loads(order), files))
        for file in files:
            os.close(file)
        orders.send(json.dumps([pid, None]).encode())


def _report_ends(orders: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            orders.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def _become(order: dict[str, object], files: list[int]) -> int:
    """Run the program, and what an interpreter runs at its end; return its exit code.

    What an interpreter frees besides is left to the kernel: with torch that takes a second for each program.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for as_file, file in enumerate(files):
        os.dup2(file, as_file)
        os.close(file)
    text, arguments, environment = order["text"], order["arguments"], order["environment"]
    assert isinstance(text, str)
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv[:] = ["-c", *arguments]
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 (a program of the tests)
        code = 0
    except SystemExit as end:
        code = _code(end)
    except BaseException as error:  # noqa: BLE001 (an interpreter ends with any of them so)
        sys.excepthook(type(error), error, error.__traceback__)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    # What an interpreter calls here to join the threads; it has no public name.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    # What all this is for. The first four are what a command would import else, and that takes it ten times as long.
    import nkeys  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    from pydantic import Field, TypeAdapter  # noqa: F401 (Typer's)

    import tensorhub.cli.main  # noqa: F401

    main()
