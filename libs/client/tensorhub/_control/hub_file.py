"""`hub.json`: how programs on this machine find the hub that `tensorhub up` runs here.

It is written by rename, so a reader sees a whole file or none, and readable by its owner alone, as the key is that it
names. It exists from when all is ready until the hub stops.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_common.bus.address import addresses
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.decoding import MALFORMED

FILE_NAME: Final = "hub.json"
MODE: Final = 0o600
FORMAT: Final = 1
"""Raised when the value of a field means something else than before. A field that is not known is passed over."""


class ProcessEntry(msgspec.Struct, frozen=True):
    """A service, by its process id."""

    pid: int


class AgentEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent: where workers of its host reach it, and the host that it pretends to be; a rack if there is one."""

    id: str
    pid: int
    socket: str
    host: str
    site: str
    rack: str = ""


class RegistryEntry(msgspec.Struct, frozen=True):
    """One of the registries, or of the rollout managers; whichever holds the lease speaks."""

    id: str
    pid: int


class RunnerEntry(msgspec.Struct, frozen=True):
    """A runner: its engine, the agent that it is at, and the replica that its engine is."""

    id: str
    pid: int
    engine: str
    agent: str
    replica: str


class NatsEntry(msgspec.Struct, frozen=True):
    """One node of NATS."""

    url: str
    pid: int


class HubFile(msgspec.Struct, frozen=True):
    """The content of the file. `credentials` is the path of the key for clients of every job.

    `nats`, `nats_pid` and `registry` are the first of `nats_nodes` and of `registries`.
    """

    nats: str
    nats_pid: int
    credentials: str
    registry: ProcessEntry
    planner: ProcessEntry
    agents: list[AgentEntry]
    registries: list[RegistryEntry] = []
    nats_nodes: list[NatsEntry] = []
    rollout: ProcessEntry | None = None
    """The first of `rollout_managers`, if there is one."""
    rollout_managers: list[RegistryEntry] = []
    runners: list[RunnerEntry] = []
    format: int = FORMAT

    @property
    def nats_all(self) -> str:
        """The addresses of all nodes of NATS, as `connect(nats=…)` takes them."""
        return ",".join(node.url for node in self.nats_nodes) or self.nats

    def is_at(self, nats: str) -> bool:
        """Tell whether an address, or several, are this hub's."""
        return set(addresses(nats)) <= {self.nats, *addresses(self.nats_all)}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of all that run for this hub, by the names of their logs."""
        several = len(self.nats_nodes) > 1
        nats = {f"nats-{i}" if several else "nats": node.pid for i, node in enumerate(self.nats_nodes)}
        registries = {entry.id: entry.pid for entry in self.registries}
        return {
            **(nats or {"nats": self.nats_pid}),
            **(registries or {"registry-0": self.registry.pid}),
            "planner-0": self.planner.pid,
            **{agent.id: agent.pid for agent in self.agents},
            **{manager.id: manager.pid for manager in self.rollout_managers},
            **{runner.id: runner.pid for runner in self.runners},
        }


def path_in(directory: Path) -> Path:
    """Return the path of the file in a hub's directory."""
    return directory / FILE_NAME


def write(directory: Path, hub: HubFile) -> None:
    """Put the file there, in place of the one that is there."""
    target = path_in(directory)
    draft = target.with_name(f".{FILE_NAME}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(hub), indent=2) + b"\n")
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def remove(directory: Path) -> None:
    """Take the file away, if it is there."""
    path_in(directory).unlink(missing_ok=True)


def read(directory: Path) -> HubFile:
    """Return what the file says. Raises `RegistryUnavailable` when there is none or it is no hub file."""
    target = path_in(directory)
    try:
        data = target.read_bytes()
    except FileNotFoundError:
        raise RegistryUnavailable(
            f"no hub is found: there is no {target}. Start one with `tensorhub up`, or say where it is with "
            "TENSORHUB_DIR or TENSORHUB_NATS"
        ) from None
    except OSError as error:
        raise RegistryUnavailable(f"{target} can't be read: {error.strerror or error}") from None
    try:
        found = msgspec.json.decode(data, type=HubFile)
    except MALFORMED as error:
        raise RegistryUnavailable(
            f"{target} is no hub file ({error}): start the hub anew with `tensorhub up`"
        ) from None
    if found.format > FORMAT:
        raise RegistryUnavailable(
            f"{target} is of a newer release (format {found.format}, and this one reads {FORMAT}): use the programs of "
            "the release that `tensorhub up` runs"
        )
    return found
