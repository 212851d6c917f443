"""Network namespaces, and two of them with two links: one for messages, one for bytes. Each can be cut silently.

A cut link looks like a dead switch: frames go to a hardware address that nobody has, so nothing comes back, and neither
side is told. Needs root and `ip`.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

CLONE_NEWNET: Final = 0x40000000
CLONE_NEWNS: Final = 0x00020000
MS_REC: Final = 0x4000
MS_SLAVE: Final = 0x80000
MNT_DETACH: Final = 2
NETNS: Final = Path("/run/netns")
NOBODY: Final = "02:00:00:00:00:ff"
COMMAND_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Link:
    """One link. Its ends are called after it, with 0 in the namespace `here` and 1 in `there`."""

    name: str
    net: str
    number: int

    def device(self, side: int) -> str:
        """Return the name of an end."""
        return f"{self.name}{side}"

    def address(self, side: int) -> str:
        """Return the IP address of an end."""
        return f"{self.net}.{side + 1}"

    def hardware(self, side: int) -> str:
        """Return the hardware address of an end."""
        return f"02:00:00:00:{self.number:02x}:{side:02x}"


LINKS: Final = {"messages": Link("thmsg", "10.77.0", 1), "bytes": Link("thbyte", "10.78.0", 2)}


class Namespaces:
    """Namespaces of these names, from entry to exit of the context; each has its loopback device, and `lay` the rest.

    With a namespace goes whatever stands in it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.lay()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lay(self) -> None:
        """Lay what is between them."""

    def close(self) -> None:
        """Remove them."""
        for name in self.names:
            if (NETNS / name).exists():
                run("ip", "netns", "del", name)


class Net(Namespaces):
    """The two namespaces and their links."""

    def __init__(self) -> None:
        super().__init__((f"th-here-{os.getpid()}", f"th-there-{os.getpid()}"))

    def lay(self) -> None:
        """Lay the links."""
        for link in LINKS.values():
            self._connect(link)

    def cut(self, paths: Iterable[str]) -> None:
        """Let nothing through any more, in either direction."""
        for path in paths:
            for side in (0, 1):
                self._send_to(LINKS[path], side, NOBODY)

    def heal(self, paths: Iterable[str]) -> None:
        """Let everything through again."""
        for path in paths:
            for side in (0, 1):
                self._send_to(LINKS[path], side, LINKS[path].hardware(1 - side))

    def _connect(self, link: Link) -> None:
        ends = [link.device(side) for side in (0, 1)]
        here, there = self.names
        run("ip", "link", "add", ends[0], "netns", here, "type", "veth", "peer", "name", ends[1], "netns", there)
        for side, name in enumerate(self.names):
            run("ip", "-n", name, "link", "set", ends[side], "address", link.hardware(side), "up")
            run("ip", "-n", name, "addr", "add", f"{link.address(side)}/24", "dev", ends[side])
            self._send_to(link, side, link.hardware(1 - side))

    def _send_to(self, link: Link, side: int, hardware: str) -> None:
        """Say which hardware address the other end has, so that nobody need ask for it over the link."""
        neighbour = (link.address(1 - side), "lladdr", hardware, "dev", link.device(side), "nud", "permanent")
        run("ip", "-n", self.names[side], "neigh", "replace", *neighbour)


def enter(name: str) -> None:
    """Move this process, and whatever it starts, into a namespace. Call it while there is one thread alone.

    /sys is mounted anew, in a mount namespace of its own: UCX takes its devices from there, and the old one goes on
    showing those of the namespace that was left.
    """
    fd = os.open(NETNS / name, os.O_RDONLY)
    try:
        _libc("setns", fd, CLONE_NEWNET)
    finally:
        os.close(fd)
    _libc("unshare", CLONE_NEWNS)
    _libc("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    _libc("umount2", b"/sys", MNT_DETACH)
    _libc("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _libc(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def why_not() -> str | None:
    """Say why there can be no namespaces here, or None when there can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no 'ip' here: apt install iproute2"
    try:
        with Net():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.strip()}"


def run(*command: str) -> str:
    """Run a command and return what it says; raises `CalledProcessError` when it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S).stdout
