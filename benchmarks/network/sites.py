"""Two datacenters on one machine: two network namespaces, and between them a line with a rate and a delay.

    near ── nearwan │ relay │ farwan ── far

The line is `benchmarks/relay.py`, in a third namespace. Offloads are switched off at both ends, so a frame is what
would travel on a wire with an MTU of 1500, and the interfaces count what a wire would carry. Traffic within a site goes
over its loopback device and is counted nowhere. Needs root and `ip`.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from typing import Any, Final

from tests.partition.namespaces import COMMAND_S, Namespaces, enter, run

from tensorhub_agent.app.main import main

NET: Final = "10.81.0"
PREFIX: Final = "BENCHMARK_SITES"
"""Names the environment variable that tells an agent how the namespaces' names begin."""

NEAR: Final = "near"
FAR: Final = "far"
NEAR_AGENTS: Final = "BENCHMARK_NEAR_AGENTS"
"""Names the variable that tells how many hosts, from the first one on, stand in the near site: the trainer's."""

AGENT: Final = (sys.executable, "-m", "benchmarks.network.sites")

SIOCETHTOOL: Final = 0x8946
OFFLOADS: Final = {"gro": 0x2C, "gso": 0x24, "tso": 0x1F, "scatter-gather": 0x19, "checksums": 0x17}
"""What to switch off, by the numbers of `ethtool`. Without the last one frames would be relayed without checksums."""


class Sites(Namespaces):
    """The namespaces and the line."""

    def __init__(self, mbit: float, rtt_ms: float) -> None:
        """Make a line of so many Mbit/s in each direction."""
        self._mbit, self._rtt_ms = mbit, rtt_ms
        self.prefix = f"ths-{os.getpid()}"
        self._relay: subprocess.Popen[str] | None = None
        super().__init__(map(self.name, (NEAR, "middle", FAR)))

    def name(self, site: str) -> str:
        """Return the name of a site's namespace."""
        return f"{self.prefix}-{site}"

    def close(self) -> None:
        """Remove the line, and the namespaces."""
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.close()
            self._relay.wait(COMMAND_S)
        super().close()

    def counters(self) -> dict[str, int]:
        """Return what has gone from near to far: by the interface that sends it, and by the relay as it came out."""
        shown: Any = json.loads(run("ip", "-n", self.name(NEAR), "-s", "-j", "link", "show", "dev", "wan"))
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write("counts\n")
        self._relay.stdin.flush()
        there = json.loads(self._relay.stdout.readline())[0]
        return {"interface": shown[0]["stats64"]["tx"]["bytes"], **there}

    def lay(self) -> None:
        """Lay the line."""
        middle = self.name("middle")
        for number, site in enumerate((NEAR, FAR)):
            name, end = self.name(site), f"{site}wan"
            run("ip", "link", "add", "wan", "netns", name, "type", "veth", "peer", "name", end, "netns", middle)
            run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "wan")
            for where, device in ((name, "wan"), (middle, end)):
                run("ip", "-n", where, "link", "set", device, "up")
                run(sys.executable, "-m", "benchmarks.network.sites", "plain", where, device)
        queue_kib = max(64, round(2 * self._mbit * 1e6 / 8 * self._rtt_ms / 1e3 / 1024))
        line = ("--mbit", str(self._mbit), "--delay-ms", str(self._rtt_ms / 2), "--queue-kib", str(queue_kib))
        relay = (sys.executable, "-m", "benchmarks.network.relay", "nearwan", "farwan", *line)
        command = ("ip", "netns", "exec", middle, *relay)
        pipe = subprocess.PIPE
        self._relay = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the line between the sites does not come up")


def address(number: int) -> str:
    """Return the IP address of a site: 0 is near, 1 is far."""
    return f"{NET}.{number + 1}"


def make_plain(name: str, device: str) -> None:
    """Switch a device's offloads off. It moves this process into the namespace."""
    enter(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for number in OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", number, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request + bytes(16))


def _be_agent() -> None:
    """Be an agent of `tensorhub up` that moves to its site first."""
    far = int(os.environ["TENSORHUB_HOST"].rpartition("-")[2]) >= int(os.environ[NEAR_AGENTS])
    site = FAR if far else NEAR
    enter(f"{os.environ[PREFIX]}-{site}")
    os.environ |= {"TENSORHUB_ADDRESS": address(int(far)), "TENSORHUB_SITE": site}
    main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:
        make_plain(*sys.argv[2:4])
    else:
        _be_agent()
