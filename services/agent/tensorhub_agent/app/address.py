"""At which IP other agents reach this one."""

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from tensorhub_common.errors import AgentUnavailable

NATS_PORT: Final = 4222


def own_address(given: str | None, nats: str) -> str:
    """Return the IP that was given by settings, else the one from which this host reaches NATS.

    A host that has several networks has to be told which one the bytes should take. Raises `AgentUnavailable` when
    none is found.
    """
    try:
        if given:
            return str(ipaddress.ip_address(given))
        at = urlsplit(nats.split(",", maxsplit=1)[0])
        return _towards(at.hostname or "127.0.0.1", at.port or NATS_PORT)
    except (OSError, ValueError) as why:
        raise AgentUnavailable(
            f"this agent does not know at which IP others reach it ({why}): set TENSORHUB_ADDRESS, for example "
            "TENSORHUB_ADDRESS=10.0.0.12"
        ) from None


def _towards(host: str, port: int) -> str:
    family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        # Nothing is sent: this only has the kernel choose the way.
        probe.connect(where)
        return str(probe.getsockname()[0])
