"""Hosts on one machine: a network namespace for each agent, each with one wire of a given speed to a common switch.

The wires are shaped where a host sends (`tc tbf`), so each host gives at most so much, to however many; it takes in
what the others give. Needs root, `ip` and `tc`.
"""

import os
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from tests.partition.namespaces import NETNS, enter

from tensorhub_agent.main import main

NET: Final = "10.79.0"
COMMAND_S: Final = 10.0
PREFIX: Final = "BENCHMARK_HOSTS"
"""Names the environment variable that tells an agent how the namespaces' names begin."""

BURST: Final = "256kb"
LATENCY: Final = "50ms"
AGENT: Final = (sys.executable, "-m", "benchmarks.hosts")


class Hosts:
    """The namespaces, from entry to exit of the context."""

    def __init__(self, count: int, mbit: int) -> None:
        """Make so many hosts; each sends `mbit` Mbit/s."""
        self._count, self._mbit = count, mbit
        self.prefix = f"thb-{os.getpid()}"

    @property
    def switch(self) -> str:
        """The namespace in which the switch stands, and whatever is on no host; it is reached at `address(0)`."""
        return f"{self.prefix}-switch"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and with them the wires."""
        for name in [self.switch, *(namespace(self.prefix, host) for host in range(self._count))]:
            if (NETNS / name).exists():
                _run("ip", "netns", "del", name)

    def _make(self) -> None:
        inside = ("ip", "-n", self.switch)
        _run("ip", "netns", "add", self.switch)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "add", "switch", "type", "bridge")
        _run(*inside, "link", "set", "switch", "up")
        _run(*inside, "addr", "add", f"{address(0)}/24", "dev", "switch")
        for host in range(self._count):
            name, port = namespace(self.prefix, host), f"port{host}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "link", "add", "wire", "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
            _run(*inside, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "link", "set", "wire", "up")
            _run("ip", "-n", name, "addr", "add", f"{address(1 + host)}/24", "dev", "wire")
            shape = ("tbf", "rate", f"{self._mbit}mbit", "burst", BURST, "latency", LATENCY)
            _run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *shape)


def namespace(prefix: str, host: int) -> str:
    """Return the name of a host's namespace."""
    return f"{prefix}-{host}"


def address(number: int) -> str:
    """Return an IP address: 0 is the switch's, 1 + n that of host n."""
    return f"{NET}.{number + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S)


if __name__ == "__main__":
    # An agent of `tensorhub up` that moves to its host first.
    number = int(os.environ["TENSORHUB_HOST"].rpartition("-")[2])
    enter(namespace(os.environ[PREFIX], number))
    os.environ["TENSORHUB_ADDRESS"] = address(1 + number)
    main()
