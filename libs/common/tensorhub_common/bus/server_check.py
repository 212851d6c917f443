"""Whether a NATS server can do what the hub needs, and lets in none but whom it knows.

Always true of a server that passed: leases on it end by themselves, and if it listens beyond loopback, it asks each
client for credentials.
"""

import asyncio
import contextlib
import ipaddress
import json
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import nats.errors

from tensorhub_common.bus.address import shown
from tensorhub_common.bus.errors import NoAnswer, NoResponder
from tensorhub_common.errors import RegistryUnavailable

if TYPE_CHECKING:
    from tensorhub_common.bus.connection import Bus

API_LEVEL_MIN: Final = 2
"""JetStream's API level of nats-server 2.12, the oldest that the hub was built for. Servers silently ignore headers
that they don't know: below level 1 (2.11) a lease that is given with `Nats-TTL` would never end."""

ATTEMPT_S: Final = 1.0
"""A question that reached a cluster while it had no leader is never answered, so it is asked again after this."""
WAIT_S: Final = 0.1


def why_never(error: Exception) -> str | None:
    """Say why a server will not let us in however often we try, or None where another try may help."""
    if "authorization violation" in str(error).lower():
        return "it refuses the credentials"
    if isinstance(error, nats.errors.SecureConnRequiredError):
        return "it does not speak TLS, and TENSORHUB_NATS_CA says that it must"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error}; TENSORHUB_NATS_CA names whom to believe"
    return None


async def check_server(bus: "Bus", timeout_s: float) -> None:
    """Look at the server that we are connected to. Raises `RegistryUnavailable`."""
    if is_open_to_all(bus.server_info):
        raise RegistryUnavailable(
            f"NATS at {shown(bus.url)} lets in whoever reaches it, and listens at {bus.server_info.get('host')}: give "
            "it users and keys (`tensorhub credentials` makes them), or let it listen on 127.0.0.1 alone"
        )
    info = await _info(bus, timeout_s)
    if "error" in info:
        why = info["error"].get("description", "JetStream does not answer")
        to_do = "see that more than half of its nodes run" if bus.server_info.get("cluster") else "start it with -js"
        raise RegistryUnavailable(f"NATS at {shown(bus.url)} has no JetStream for us ({why}): {to_do}")
    level = int(info.get("api", {}).get("level", 0))
    if level < API_LEVEL_MIN:
        raise RegistryUnavailable(
            f"NATS at {shown(bus.url)} is too old (JetStream API level {level}, and {API_LEVEL_MIN} is needed): leases "
            "would never end on it. Run nats-server 2.12 or newer"
        )


async def _info(bus: "Bus", timeout_s: float) -> dict[str, Any]:
    """Ask until there is an answer: the nodes of a cluster give none while they elect who answers."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        attempt_s = min(ATTEMPT_S, max(0.0, deadline - loop.time()))
        info: dict[str, Any] = {"error": {}}
        with contextlib.suppress(NoResponder, NoAnswer):
            info = json.loads(await bus.request("$JS.API.INFO", b"", attempt_s))
        is_electing = bool(bus.server_info.get("cluster")) and "error" in info
        if not is_electing or loop.time() + WAIT_S >= deadline:
            return info
        await asyncio.sleep(WAIT_S)


def is_open_to_all(info: Mapping[str, Any]) -> bool:
    """Tell by what a server says of itself whether strangers on the network may use it."""
    return not info.get("auth_required") and not info.get("tls_verify") and not _is_loopback(str(info.get("host", "")))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
