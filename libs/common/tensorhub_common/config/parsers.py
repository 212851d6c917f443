"""What the text of a setting may be: one parser for each kind of value.

A parser takes the text of an environment variable and returns its value, or raises ValueError with the end of the
sentence "TENSORHUB_X is … and …", which `settings.load` completes. It looks at the text alone: a path or an address may
be right in form and still lead nowhere.
"""

import ipaddress
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol.rollout.entries import ArrivalTerm
from tensorhub_common.protocol.subjects import check_name

COUNT_MAX: Final = 9999

_BYTES: Final = re.compile(r"(\d{1,18})\s*(|KiB|MiB|GiB|TiB)", re.ASCII)
_BYTES_FACTOR: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ENGINE: Final = re.compile(r"torch|vllm|sglang|[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_NATS_SCHEMES: Final = ("nats", "tls", "ws", "wss")

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
RunnerInstall = Literal["staged", "mapped"]


class Listen(NamedTuple):
    """Where a server listens. Port 0: a free one is picked."""

    host: str
    port: int


def seconds(least: float, *, above: bool = False) -> Callable[[str], float]:
    """Take a finite number of seconds of at least `least`, or above it."""
    bound = f"above {least:g}" if above else f"of at least {least:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"must be a number of seconds {bound}")
        return value

    return parse


def byte_count(least: int) -> Callable[[str], int]:
    """Take a number of bytes such as `1048576` or `64MiB`."""

    def parse(text: str) -> int:
        match = _BYTES.fullmatch(text)
        value = int(match[1]) * _BYTES_FACTOR[match[2]] if match else -1
        if value < least:
            raise ValueError(
                f"must be a whole number of bytes of at least {least}, or one followed by KiB, MiB, GiB or TiB"
            )
        return value

    return parse


def count(text: str) -> int:
    """Take a whole number of things."""
    if not text.isascii() or not text.isdecimal() or int(text) > COUNT_MAX:
        raise ValueError(f"must be a whole number from 0 to {COUNT_MAX}")
    return int(text)


def optional_count(text: str) -> int | None:
    """Take a whole number of things, or none, which is the empty text."""
    return count(text) if text else None


def count_between(least: int, most: int) -> Callable[[str], int]:
    """Take a whole number of things within bounds."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(text)

    return parse


def switch(text: str) -> bool:
    """Take `on` or `off`."""
    if text not in {"on", "off"}:
        raise ValueError("must be on or off")
    return text == "on"


def name(what: str) -> Callable[[str], str]:
    """Take a name that is valid in a subject."""

    def parse(text: str) -> str:
        try:
            return check_name(what, text)
        except InvalidName as error:
            raise ValueError(f"can't be used: {error}") from None

    return parse


def optional_name(what: str) -> Callable[[str], str]:
    """Take a name that is valid in a subject, or none, which is the empty text."""
    parse = name(what)
    return lambda text: parse(text) if text else ""


def path(text: str) -> Path:
    """Take a path."""
    if "\0" in text:
        raise ValueError("must be a path, which holds no zero byte")
    return Path(text)


def optional_path(text: str) -> Path | None:
    """Take a path, or none."""
    return path(text) if text else None


def optional_ip(text: str) -> str | None:
    """Take an IP address, or none."""
    if not text:
        return None
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("must be an IP address") from None


def agent_name_or_socket(text: str) -> str | None:
    """Take an agent's id, the path of its socket (which has a slash), or none."""
    if not text:
        return None
    return str(path(text)) if "/" in text else name("agent")(text)


def replicas(text: str) -> int:
    """Take a number of NATS nodes of which the larger part can still decide when one is lost, or one."""
    if text not in ("1", "3", "5"):
        raise ValueError("must be 1, 3 or 5")
    return int(text)


def nats_urls(text: str) -> str | None:
    """Take the address of a NATS server, those of several nodes with commas between, or none.

    An address may hold a password, so the complaint doesn't repeat it.
    """
    if not text:
        return None
    urls = [each.strip() for each in text.split(",")]
    if not all(_is_nats_url(url) for url in urls):
        raise ValueError(
            "must be the address of a NATS server: nats:// (or tls://, ws://, wss://), a host and a port; of several "
            "nodes, each address whole, with commas between"
        )
    if len({url.startswith("ws") for url in urls}) > 1:
        raise ValueError("must not mix ws:// or wss:// with others: give one kind of address for all nodes")
    return ",".join(urls)


def _is_nats_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in _NATS_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def listen(text: str) -> Listen | None:
    """Take a port of this machine's loopback, an address and a port, or none."""
    if not text:
        return None
    try:
        parts = urlsplit(f"//127.0.0.1:{text}" if text.isdecimal() else f"//{text}")
        host, port = parts.hostname, parts.port
        fits = host is not None and port is not None and parts.netloc == parts.geturl()[2:] and "@" not in text
    except ValueError:
        host, port, fits = None, None, False
    if not fits or host is None or port is None:
        raise ValueError("must be a port, or an address and a port with ':' between")
    return Listen(host, port)


def log_level(text: str) -> LogLevel:
    """Take a level's name, in whatever case."""
    match text.lower():
        case "debug" | "info" | "warning" | "error" as level:
            return level
        case _:
            raise ValueError("must be debug, info, warning or error")


def log_format(text: str) -> LogFormat:
    """Take the name of a log format."""
    match text:
        case "console" | "json":
            return text
        case _:
            raise ValueError("must be console or json")


def engine(text: str) -> str:
    """Take the name of an engine, or where one can be imported from."""
    if _ENGINE.fullmatch(text) is None:
        raise ValueError("must be torch, vllm, sglang, or an engine of your own as module:function")
    return text


def device(text: str) -> str:
    """Parse what an engine computes on."""
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", text) is None:
        raise ValueError("must be cpu, cuda, or a GPU by its number as cuda:1")
    return text


def loopback_url(text: str) -> str:
    """Take the address of an HTTP server of this host, and return that of its root; empty is none."""
    if not text:
        return ""
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("must be the address of a server's root, as http://127.0.0.1:8000")
    if parts.hostname != "localhost" and not _is_loopback(parts.hostname):
        raise ValueError(
            "must be an address of this host, as http://127.0.0.1:8000: the endpoints that control an engine have no "
            "authentication, so a runner stands beside its server"
        )
    return f"http://{parts.netloc}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def arrival_terms(text: str) -> frozenset[ArrivalTerm]:
    """Take terms of the policy `arrival` with commas between, or none, which is the empty text."""
    terms: frozenset[ArrivalTerm] = frozenset(get_args(ArrivalTerm))
    named = {each.strip() for each in text.split(",")} if text else set()
    unknown = sorted(named - terms)
    if unknown:
        known = ", ".join(get_args(ArrivalTerm))
        raise ValueError(f"must be of {known}, with commas between: {unknown[0]!r:.40} is none")
    return frozenset(each for each in terms if each in named)


def runner_install(text: str) -> RunnerInstall:
    """Take the name of a way in which a runner's engine gets weights."""
    match text:
        case "staged" | "mapped":
            return text
        case _:
            raise ValueError("must be staged or mapped")
