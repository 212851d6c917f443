"""UCX on this host: how it is loaded, with which defaults, and the few calls that the transport makes of it.

A user's own `UCX_*` variables win over every default of ours. With `RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true` the
host's UCX is taken instead of the one that pip has brought, which is built without verbs: RDMA needs that.
"""

import ctypes
import ipaddress
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

PROCESS_DEFAULTS: Final = {
    # UCX would print a backtrace of its own in front of Python's, and end the process by itself.
    "UCX_ERROR_SIGNALS": "",
    # The environment of an agent may have variables for other programs.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # That a peer was killed is told by us, with names; UCX would print it once for each socket.
    "UCX_LOG_LEVEL": "fatal",
}

CONTEXT_DEFAULTS: Final = {
    # Segments of TCP as large as a core's cache: +40 % over loopback against UCX's 8 and 64 KiB.
    "TCP_TX_SEG_SIZE": "512k",
    "TCP_RX_SEG_SIZE": "512k",
}


def defaults_for(address: str) -> dict[str, str]:
    """Return what we set for a context that is reached at an IP, by the names that UCX has without its prefix.

    Two network namespaces of one machine look like one host to UCX, which would then try loopback between them: it is
    left out, unless it is all that there is.
    """
    loopback = ipaddress.ip_address(address).is_loopback
    return {**CONTEXT_DEFAULTS, "NET_DEVICES": "lo" if loopback else "^lo"}


LIBRARY: Final = "libucp.so.0"
FIRST_ERROR: Final = (1 << 64) - 100
"""From here on a pointer of UCX's is an error."""

READY_MAX: Final = 64
"""How many streams one call asks UCX for."""


class _Ready(ctypes.Structure):
    """UCX's `ucp_stream_poll_ep_t`."""

    _fields_ = (
        ("endpoint", ctypes.c_void_p),
        ("user_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint8 * 16),
    )


class Streams:
    """What comes over the streams of a worker's endpoints. UCX says which have something; the others cost nothing.

    ucxx has requests for it, one to be posted at each endpoint and looked at whenever anything has moved. These are the
    calls of UCX itself, which say for the whole worker what there is. Belongs to the thread that owns the worker.
    """

    def __init__(self, worker: Any) -> None:  # noqa: ANN401 (ucxx has no annotations)
        """Read the streams of a worker of ucxx."""
        # It is in this process, so this is the same. The GIL is kept, for the calls are shorter than giving it up.
        ucp = ctypes.PyDLL(LIBRARY)
        self._poll, self._take, self._release = (
            ucp.ucp_stream_worker_poll,
            ucp.ucp_stream_recv_data_nb,
            ucp.ucp_stream_data_release,
        )
        self._poll.restype = ctypes.c_ssize_t
        self._poll.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._take.restype = ctypes.c_void_p
        self._take.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._release.restype = None
        self._release.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._ready, self._length = (_Ready * READY_MAX)(), ctypes.c_size_t()
        self._asked = (worker.handle, ctypes.addressof(self._ready), READY_MAX, 0)
        self._length_at = ctypes.addressof(self._length)

    def ready(self) -> Iterator[int]:
        """Yield the handles of the endpoints to which something has come since. Each has to be read to its end."""
        while (count := self._poll(*self._asked)) > 0:
            yield from [each.endpoint for each in self._ready[:count]]

    def read(self, endpoint: int) -> bytes:
        """Return all that has come for an endpoint that is not closed. Raises OSError when UCX has none to give."""
        parts = []
        while data := self._take(endpoint, self._length_at):
            if data >= FIRST_ERROR:
                raise OSError(f"UCX can't read a stream: error {data - (1 << 64)}")
            parts.append(ctypes.string_at(data, self._length.value))
            self._release(endpoint, data)
        return b"".join(parts)


class Library:
    """The calls into ucxx. Loaded once in a process, by the thread that uses it."""

    def __init__(self, address: str) -> None:
        """Load UCX. Raises ImportError or OSError when it is not there."""
        for name, value in PROCESS_DEFAULTS.items():
            os.environ.setdefault(name, value)
        import libucx  # noqa: PLC0415 (most processes never load UCX, and some hosts don't have it)

        # First, or ucxx asks for rmm, which wants CUDA.
        libucx.load_library()
        import ucxx._lib.libucxx as ucx  # noqa: PLC0415
        from ucxx._lib.arr import Array  # noqa: PLC0415

        config = {name: value for name, value in defaults_for(address).items() if f"UCX_{name}" not in os.environ}
        features = (ucx.Feature.TAG, ucx.Feature.STREAM, ucx.Feature.WAKEUP)
        self._ucx, self.array = ucx, Array
        self.tag: Callable[[int], Any] = ucx.UCXXTag
        self._context = ucx.UCXContext(config, feature_flags=features)

    def worker(self) -> Any:  # noqa: ANN401 (ucxx has no annotations)
        """Return a worker that wakes an epoll when there is something to do."""
        worker = self._ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
        return worker

    def listen(self, worker: Any, arrived: Callable[[Any], None]) -> Any:  # noqa: ANN401
        """Let others connect at a free port of every address; `arrived` is given the endpoints."""
        return self._ucx.UCXListener.create(worker=worker, port=0, cb_func=arrived, cb_args=(), deliver_endpoint=True)

    def connect(self, worker: Any, address: str, port: int) -> Any:  # noqa: ANN401
        """Begin to connect; with error handling, since a killed peer must be noticed."""
        return self._ucx.UCXEndpoint.create(worker, address, port, True)  # noqa: FBT003 (takes no names)


def load(address: str) -> Library:
    """Load UCX for an agent that is reached at this IP."""
    return Library(address)
