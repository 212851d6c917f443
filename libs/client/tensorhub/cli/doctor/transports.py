"""What `tensorhub doctor` learns of the ways for bytes between hosts, before anybody judges it."""

import msgspec


class Ucx(msgspec.Struct, frozen=True):
    """A UCX that could be loaded, and what it was built with."""

    ucxx: str
    ucx: str
    library: str
    components: tuple[str, ...]
    """UCX names what it was built with, for example `tcp`, `cma`, `ib`, `cuda_cpy`."""
    resources: tuple[str, ...]
    """Transport and device, for example `tcp/eth0`."""

    @property
    def has_verbs(self) -> bool:
        """Whether it was built for RDMA."""
        return bool({"ib", "mlx5", "rdmacm"} & set(self.components))

    @property
    def has_cuda(self) -> bool:
        """Whether it was built for GPU memory, and the driver is there."""
        return any(component.startswith(("cuda", "gdr")) for component in self.components)

    @property
    def from_wheel(self) -> bool:
        """Whether it is the one that pip installed."""
        return "/site-packages/" in self.library


class Broken(msgspec.Struct, frozen=True):
    """A try that gave no result: `why` is UCX's or Python's own sentence, or how the process ended."""

    why: str


class Way(msgspec.Struct, frozen=True):
    """What is tried: two processes of this machine, one way between them."""

    name: str
    settings: dict[str, str]
    """UCX's environment variables."""
    errors: bool = True
    """Endpoint error handling: an agent needs it, for it tells at once when a peer is gone."""
    memory: str = "host"


class Carried(msgspec.Struct, frozen=True):
    """All bytes came and were compared."""

    gbps: float
    """Gigabytes a second."""
    lanes: tuple[str, ...]
    """What UCX says to have sent them over, for example `tcp/lo`."""


class Tried(msgspec.Struct, frozen=True):
    """One way, and what came of it."""

    way: Way
    result: Carried | Broken

    @property
    def carried(self) -> Carried | None:
        """The result, if the bytes came."""
        return self.result if isinstance(self.result, Carried) else None


class Rdma(msgspec.Struct, frozen=True):
    """RDMA devices of this host, and whether this process may use them."""

    devices: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    """Those with an active port."""
    nodes: tuple[str, ...] = ()
    """Device files of verbs, in /dev/infiniband."""
    denied: tuple[str, ...] = ()
    """Those of them that may not be opened for reading and writing."""
    locked_bytes_max: int | None = None
    """How much memory may be locked; None is all of it."""


class Gpus(msgspec.Struct, frozen=True):
    """GPUs of this host, by the driver's own word; `why` says why it could not be asked."""

    names: tuple[str, ...] = ()
    why: str = ""
    has_nodes: bool = False
    """Whether /dev has device files of NVIDIA, driver or not."""


class Transports(msgspec.Struct, frozen=True):
    """All that was found out. `host_ucx`: the host's own, if RDMA calls for one and there is one."""

    ucx: Ucx | Broken
    host_ucx: Ucx | Broken | None
    tried: tuple[Tried, ...]
    rdma: Rdma
    gpus: Gpus
    settings: dict[str, str]
    """UCX's environment variables where the agents run."""
