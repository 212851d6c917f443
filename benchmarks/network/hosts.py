"""Hosts on one machine: a network namespace for each agent, each with one wire of a given speed to a common switch.

The wires are shaped where a host sends (`tc tbf`), so each host gives at most so much, to however many; it takes in
what the others give. Needs root, `ip` and `tc`.
"""

import os
import sys
from typing import Final

from tests.partition.namespaces import Namespaces, enter, run

from tensorhub_agent.app.main import main

NET: Final = "10.79.0"
PREFIX: Final = "BENCHMARK_HOSTS"
"""Names the environment variable that tells an agent how the namespaces' names begin."""

BURST: Final = "256kb"
LATENCY: Final = "50ms"
AGENT: Final = (sys.executable, "-m", "benchmarks.network.hosts")


class Hosts(Namespaces):
    """The namespaces of the hosts, and of the switch."""

    def __init__(self, count: int, mbit: int) -> None:
        """Make so many hosts; each sends `mbit` Mbit/s."""
        self._count, self._mbit = count, mbit
        self.prefix = f"thb-{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        """The namespace in which the switch stands, and whatever is on no host; it is reached at `address(0)`."""
        super().__init__([self.switch, *(namespace(self.prefix, host) for host in range(count))])

    def lay(self) -> None:
        """Lay a wire from each host to the switch."""
        inside = ("ip", "-n", self.switch)
        run(*inside, "link", "add", "switch", "type", "bridge")
        run(*inside, "link", "set", "switch", "up")
        run(*inside, "addr", "add", f"{address(0)}/24", "dev", "switch")
        for host in range(self._count):
            name, port = namespace(self.prefix, host), f"port{host}"
            run("ip", "link", "add", "wire", "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
            run(*inside, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", name, "link", "set", "wire", "up")
            run("ip", "-n", name, "addr", "add", f"{address(1 + host)}/24", "dev", "wire")
            shape = ("tbf", "rate", f"{self._mbit}mbit", "burst", BURST, "latency", LATENCY)
            run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *shape)


def namespace(prefix: str, host: int) -> str:
    """Return the name of a host's namespace."""
    return f"{prefix}-{host}"


def address(number: int) -> str:
    """Return an IP address: 0 is the switch's, 1 + n that of host n."""
    return f"{NET}.{number + 1}"


if __name__ == "__main__":
    # An agent of `tensorhub up` that moves to its host first.
    number = int(os.environ["TENSORHUB_HOST"].rpartition("-")[2])
    enter(namespace(os.environ[PREFIX], number))
    os.environ["TENSORHUB_ADDRESS"] = address(1 + number)
    main()
