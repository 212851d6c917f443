"""The ways for bytes between hosts: what `tensorhub doctor` learns of them, and what it says of them. Pure.

The structs store what was found, before it is judged. `findings` takes them and returns advice.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from tensorhub.cli.doctor.finding import Finding, fail, ok, warn
from tensorhub.cli.output import size


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


class ProbeFailed(msgspec.Struct, frozen=True):
    """A try that gave no result: `why` is UCX's or Python's own sentence, or how the process ended."""

    why: str


class ProbeCase(msgspec.Struct, frozen=True):
    """What is tried: two processes of this machine, one way between them."""

    name: str
    settings: dict[str, str]
    """UCX's environment variables."""
    errors: bool = True
    """Endpoint error handling: an agent needs it, for it tells at once when a peer is gone."""
    memory: str = "host"


class Transferred(msgspec.Struct, frozen=True):
    """All bytes came and were compared."""

    gbps: float
    """Gigabytes a second."""
    lanes: tuple[str, ...]
    """What UCX says to have sent them over, for example `tcp/lo`."""


class ProbeRun(msgspec.Struct, frozen=True):
    """One way, and what came of it."""

    way: ProbeCase
    result: Transferred | ProbeFailed

    @property
    def carried(self) -> Transferred | None:
        """The result, if the bytes came."""
        return self.result if isinstance(self.result, Transferred) else None


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

    ucx: Ucx | ProbeFailed
    host_ucx: Ucx | ProbeFailed | None
    tried: tuple[ProbeRun, ...]
    rdma: Rdma
    gpus: Gpus
    settings: dict[str, str]
    """UCX's environment variables where the agents run."""


TCP: Final = "tcp"
SHARED: Final = "shared memory"
SHARED_UNSAFE: Final = "shared memory without error handling"
VERBS: Final = "verbs"
CUDA: Final = "cuda memory"

SHARED_LANES: Final = ("posix", "sysv", "cma", "xpmem", "knem")
VERBS_LANES: Final = ("rc", "ud", "dc")

SEGMENT_GAIN_MIN: Final = 1.3
"""Segment sizes are judged on a machine that others use as well: a smaller gain may be chance."""

PREFER_HOST: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
SEGMENTS: Final = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")

ONE_HOST: Final = "transfers between hosts need it; those of one host don't"


def findings(found: Transports) -> Iterator[Finding]:
    """Yield what there is to say, one finding for each check."""
    if isinstance(found.ucx, ProbeFailed):
        yield warn("ucx", f"not usable: {found.ucx.why}", f"pip install 'tensorhub[agent]': {ONE_HOST}")
        if found.rdma.devices:
            yield _rdma_device(found.rdma)
        return
    yield _ucx(found.ucx)
    yield _tcp(found)
    if segments := [each for each in found.tried if each.way.name.startswith(f"{TCP} ")]:
        yield _segments(segments, found.settings)
    yield _shared(found)
    yield _verbs(found, found.ucx)
    yield _cuda(found, found.ucx)


def way_named(found: Transports, name: str) -> ProbeRun | None:
    """Return what came of a way, or None when it was not tried."""
    return next((each for each in found.tried if each.way.name == name), None)


def _ucx(ucx: Ucx) -> Finding:
    whose = "of the wheel" if ucx.from_wheel else "of this host"
    built = [f"{'with' if has else 'without'} {what}" for has, what in ((ucx.has_verbs, "verbs"), (ucx.has_cuda, CUDA))]
    return ok("ucx", f"ucxx {ucx.ucxx} on UCX {ucx.ucx} {whose} ({ucx.library}), {' and '.join(built)}")


def _tcp(found: Transports) -> Finding:
    tried = [each for each in found.tried if each.way.name.startswith(TCP)]
    carried = [each.carried for each in tried if each.carried is not None]
    if carried:
        best = max(carried, key=lambda each: each.gbps)
        devices = sorted({each.partition("/")[2] for each in _resources(found) if each.startswith("tcp/")})
        return ok("ucx tcp", f"{_rate(best)} between two processes here; devices: {', '.join(devices) or 'none'}")
    why = "; ".join(each.result.why for each in tried if isinstance(each.result, ProbeFailed)) or "it was not tried"
    chosen = {name: text for name, text in found.settings.items() if name in {"UCX_TLS", "UCX_NET_DEVICES"}}
    said = f" (the agents have {', '.join(f'{name}={text}' for name, text in chosen.items())})" if chosen else ""
    return fail(
        "ucx tcp",
        f"no bytes come through: {why}{said}",
        "agents of different hosts can't read from each other: see that UCX_NET_DEVICES names a device that is up,"
        " and that nothing forbids connections on it",
    )


def _resources(found: Transports) -> tuple[str, ...]:
    return found.ucx.resources if isinstance(found.ucx, Ucx) else ()


def _segments(tried: list[ProbeRun], settings: dict[str, str]) -> Finding:
    """Compare the sizes of TCP segments, and with what the agents were told."""
    rates = {each.way.settings[SEGMENTS[0]]: each.carried.gbps for each in tried if each.carried is not None}
    if not rates:
        return warn("tcp segments", "none was carried", "see 'ucx tcp'")
    best = max(rates, key=lambda name: rates[name])
    found = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
    for name in SEGMENTS:
        told = settings.get(name, "").lower()
        if told in rates and rates[told] * SEGMENT_GAIN_MIN < rates[best]:
            return warn("tcp segments", f"{found}; the agents have {name}={told}", f"set {name}={best}, or unset it")
    return ok("tcp segments", found)


def _shared(found: Transports) -> Finding:
    """Agents of one host use TensorHub's own transport, so a UCX that can't do it lacks nothing."""
    said = []
    for name, how in ((SHARED, "with error handling"), (SHARED_UNSAFE, "without")):
        tried = way_named(found, name)
        if tried is None:
            continue
        if tried.carried is None:
            said.append(f"{how} it fails ({tried.result.why if isinstance(tried.result, ProbeFailed) else ''})")
        elif _over(tried.carried, SHARED_LANES):
            said.append(f"{how} {_rate(tried.carried)} over {', '.join(tried.carried.lanes)}")
        else:
            said.append(f"{how} UCX takes {', '.join(tried.carried.lanes)} instead")
    return ok("ucx shm", f"{'; '.join(said) or 'not tried'}; agents of one host don't need it: they map segments")


def _verbs(found: Transports, ucx: Ucx) -> Finding:
    rdma = found.rdma
    if not rdma.devices:
        return ok("rdma", "this host has no RDMA device; bytes between hosts go over TCP")
    device = _rdma_device(rdma)
    if device.level != "ok":
        return device
    if not ucx.has_verbs:
        return _without_verbs(found, ", ".join(rdma.active))
    tried = way_named(found, VERBS)
    if tried is not None and tried.carried is not None and _over(tried.carried, VERBS_LANES):
        return ok("rdma", f"{_rate(tried.carried)} over {', '.join(tried.carried.lanes)}; {device.found}")
    why = tried.result.why if tried is not None and isinstance(tried.result, ProbeFailed) else "UCX took another way"
    return warn(
        "rdma",
        f"{device.found}, and no bytes come through: {why}",
        "see 'ucx_info -d' and 'ibv_devinfo' on this host; on RoCE set UCX_IB_GID_INDEX; until then bytes go over TCP",
    )


def _without_verbs(found: Transports, devices: str) -> Finding:
    """Say how the host's UCX, which knows verbs, takes the place of the wheel's."""
    host = found.host_ucx
    told = f"this UCX was built without verbs, so bytes don't use {devices}"
    if isinstance(host, Ucx) and host.has_verbs:
        return warn("rdma", told, f"start agents with {PREFER_HOST}=true: UCX {host.ucx} in {host.library} has verbs")
    if isinstance(host, Ucx):
        return warn("rdma", f"{told}; neither does the host's UCX {host.ucx}", _install_verbs())
    if isinstance(host, ProbeFailed):
        return warn("rdma", f"{told}; the host's UCX is not usable: {host.why}", _install_verbs())
    return warn("rdma", told, _install_verbs())


def _install_verbs() -> str:
    return (
        "install UCX 1.19 or newer with verbs on the host (DOCA-OFED and HPC-X bring one), with its development files,"
        f" for libucp.so is looked for without a number; start agents with {PREFER_HOST}=true; run the doctor again"
    )


def _rdma_device(rdma: Rdma) -> Finding:
    """Judge whether this process may use the devices at all."""
    devices = ", ".join(rdma.devices)
    if not rdma.active:
        return warn("rdma", f"{devices}: no port is active", "see 'ibv_devinfo': cable, switch, or subnet manager")
    if not rdma.nodes:
        return warn(
            "rdma",
            f"{devices}, and no device file in /dev/infiniband",
            "load ib_uverbs ('modprobe ib_uverbs'); in a container pass --device /dev/infiniband",
        )
    if rdma.denied:
        return warn(
            "rdma",
            f"{', '.join(rdma.denied)} may not be opened",
            "let the agents' user read and write them: a udev rule, or the group that owns them",
        )
    if rdma.locked_bytes_max is not None:
        return warn(
            "rdma",
            f"{devices} pins what it moves, and only {size(rdma.locked_bytes_max)} may be locked",
            "set memlock to unlimited (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1, or limits.conf)",
        )
    return ok("rdma", f"{', '.join(rdma.active)} active")


def _cuda(found: Transports, ucx: Ucx) -> Finding:
    gpus: Gpus = found.gpus
    if not gpus.names:
        if gpus.has_nodes:
            return warn("gpu", f"/dev has NVIDIA devices, but: {gpus.why}", "install the driver's libnvidia-ml")
        return ok("gpu", "none")
    names = ", ".join(gpus.names)
    if not ucx.has_cuda:
        return warn(
            "gpu",
            f"{names}; UCX can't move their memory",
            "install ucxx and libucx for the driver's CUDA ('pip install tensorhub[agent]' brings those of CUDA 13),"
            " and see that libcuda.so is found",
        )
    tried = way_named(found, CUDA)
    if tried is None or tried.carried is None:
        why = tried.result.why if tried is not None and isinstance(tried.result, ProbeFailed) else "not tried"
        return warn("gpu", f"{names}; no bytes come out of their memory: {why}", "see 'nvidia-smi', and UCX_TLS")
    return ok("gpu", f"{names}; {_rate(tried.carried)} over {', '.join(tried.carried.lanes)}")


def _over(carried: Transferred, transports: tuple[str, ...]) -> bool:
    return any(lane.startswith(transports) for lane in carried.lanes)


def _rate(carried: Transferred) -> str:
    return f"{carried.gbps:.1f} GB/s"
