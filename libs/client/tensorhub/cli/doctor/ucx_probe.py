"""Tries UCX in two processes of its own, for `tensorhub doctor`: a UCX that hangs or crashes takes only these along.

Run as a file, with UCX's own environment variables saying what to try:

    python ucx_probe.py about
    python ucx_probe.py send NBYTES on|off host|cuda

`about` says which UCX was loaded and what it was built with. `send` brings bytes from a process that connects to one
that listens on this machine, with endpoint error handling on or off, out of and into memory of this kind. The last line
on stdout is one JSON object; what UCX logs comes before it. Nothing of TensorHub is imported: UCX alone is tried.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROUNDS: Final = 3
"""The best counts: the first round also connects and registers memory."""

WAIT_S: Final = 8.0
"""Nothing that is tried takes longer; the doctor's own bound is above it."""

PROGRESS_TIMES: Final = 32
"""So often UCX may work between two looks at the clock and at the other side."""

LOCALHOST: Final = "127.0.0.1"
TAG_GO: Final = 1
TAG_BYTES: Final = 2
ODD: Final = 0x9E3779B97F4A7C15


class Failed(Exception):
    """What was tried does not work, for the reason given."""


def about() -> dict[str, object]:
    """Say which libraries were loaded, and list the components and resources of a context."""
    ucxx, api = _load()
    info = api.UCXContext().info
    mapped = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[5] for line in mapped if "/libucp.so" in line}
    return {
        "ucxx": ucxx.__version__,
        "ucx": ".".join(str(part) for part in ucxx.get_ucx_version()),
        "library": min(loaded, default="unknown"),
        "components": re.findall(r"component \d+\s*:\s*(\S+)", info),
        "resources": sorted(set(re.findall(r"resource \d+ .*--\s*(\S+)", info))),
    }


def send(nbytes: int, memory: str, *, errors: bool) -> dict[str, object]:
    """Bring bytes from one process to another, and compare them."""
    _, api = _load()
    port_read, port_write = os.pipe()
    sender = os.fork()
    if sender == 0:
        os.close(port_write)
        try:
            _connect_and_send(api, int(os.read(port_read, 16)), nbytes, memory, errors=errors)
        except Exception as error:  # noqa: BLE001 (any error is a finding)
            sys.stderr.write(f"the sender: {_said(error)}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)
    os.close(port_read)
    try:
        best_s = _listen_and_compare(api, port_write, nbytes, memory, errors=errors, sender=sender)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(sender, signal.SIGKILL)
            os.waitpid(sender, 0)
    return {"seconds": best_s}


def _load() -> tuple[Any, Any]:
    """Import ucxx. Loading UCX first lets it be imported without rmm."""
    import libucx  # noqa: PLC0415 (only here is a broken UCX met)

    libucx.load_library()
    import ucxx  # noqa: PLC0415
    import ucxx._lib.libucxx as api  # noqa: PLC0415 (the blocking interface; the public one needs asyncio)

    return ucxx, api


def _listen_and_compare(
    api: Any,  # noqa: ANN401
    port_write: int,
    nbytes: int,
    memory: str,
    *,
    errors: bool,
    sender: int,
) -> float:
    def is_alone() -> bool:
        ended, _ = os.waitpid(sender, os.WNOHANG)
        return ended == sender

    worker = api.UCXWorker(api.UCXContext())
    requests: list[int] = []
    listener = api.UCXListener.create(worker, 0, requests.append)
    os.write(port_write, str(listener.port).encode())
    _until(worker, lambda: bool(requests), is_alone)
    endpoint = listener.create_endpoint_from_conn_request(requests[0], errors)
    took = []
    for number in range(ROUNDS):
        buffer = _empty(nbytes, memory)
        receiving = endpoint.tag_recv(_array(buffer), api.UCXXTag(TAG_BYTES))
        going = endpoint.tag_send(_array(_pattern(1, number)), api.UCXXTag(TAG_GO))
        began = time.perf_counter()
        _finish(worker, is_alone, receiving, going)
        took.append(time.perf_counter() - began)
        if not _equal(buffer, _pattern(nbytes, number)):
            raise Failed("the bytes that came are not those that were sent")
    return min(took)


def _connect_and_send(api: Any, port: int, nbytes: int, memory: str, *, errors: bool) -> None:  # noqa: ANN401
    worker = api.UCXWorker(api.UCXContext())
    endpoint = worker.create_endpoint_from_hostname(LOCALHOST, port, errors)

    def is_alone() -> bool:
        return not endpoint.alive

    for number in range(ROUNDS):
        buffer = _filled(_pattern(nbytes, number), memory)
        going = endpoint.tag_recv(_array(_empty(1, "host")), api.UCXXTag(TAG_GO))
        _finish(worker, is_alone, going)
        _finish(worker, is_alone, endpoint.tag_send(_array(buffer), api.UCXXTag(TAG_BYTES)))
    # A send is done for this side once UCX has it, so this side goes on until the other has all and ends it.
    _until(worker, lambda: False, is_alone)


def _until(worker: Any, done: Callable[[], bool], is_alone: Callable[[], bool]) -> None:  # noqa: ANN401
    """Let UCX work until something is done; give up when the other side is gone, or after a while."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        for _ in range(PROGRESS_TIMES):
            worker.progress()
        if is_alone():
            raise Failed("UCX found no way between the two processes")
        if time.monotonic() > deadline:
            raise Failed(f"nothing came within {WAIT_S:g} s")


def _finish(worker: Any, is_alone: Callable[[], bool], *requests: Any) -> None:  # noqa: ANN401
    _until(worker, lambda: all(request.completed for request in requests), is_alone)
    for request in requests:
        request.check_error()


# Memory of both kinds.


def _array(buffer: Any) -> Any:  # noqa: ANN401
    from ucxx._lib.arr import Array  # noqa: PLC0415

    return Array(buffer)


def _pattern(nbytes: int, number: int) -> Any:  # noqa: ANN401
    """Return bytes of which no eight are those of another round."""
    import numpy as np  # noqa: PLC0415

    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(ODD) + np.uint64(number + 1)
    return words.view(np.uint8)[:nbytes]


def _empty(nbytes: int, memory: str) -> Any:  # noqa: ANN401
    import numpy as np  # noqa: PLC0415

    return _filled(np.zeros(nbytes, np.uint8), memory)


def _filled(data: Any, memory: str) -> Any:  # noqa: ANN401
    if memory == "host":
        return data
    # It comes with ucxx, and imports on hosts with a GPU alone.
    return importlib.import_module("rmm").DeviceBuffer.to_device(data.tobytes())


def _equal(buffer: Any, expected: Any) -> bool:  # noqa: ANN401
    data = buffer.tobytes()
    return bool(data == expected.tobytes())


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Try what the arguments say."""
    try:
        match sys.argv[1:]:
            case ["about"]:
                result = about()
            case ["send", nbytes, errors, memory]:
                result = send(int(nbytes), memory, errors=errors == "on")
            case _:
                sys.exit(__doc__)
    except Failed as why:
        result = {"why": str(why)}
    except Exception as error:  # noqa: BLE001 (a broken installation fails in any way it likes)
        result = {"why": _said(error)}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
