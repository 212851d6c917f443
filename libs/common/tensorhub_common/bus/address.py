"""Where NATS is and how we are let in: addresses without their secrets, files of credentials, and TLS.

Where NATS is goes as one text everywhere: an address, or those of several nodes of one cluster with commas between.
A file of credentials is one of three: a key (NATS's nkey, which `tensorhub credentials` makes), NATS's own `.creds`, or
one line "user:password". Invariants: none of its secrets appears in an error or in a log; with files for TLS nothing
is sent to a server that does not speak TLS.
"""

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from tensorhub_common.auth.keys import KeyUnusable, is_seed, public_key_of
from tensorhub_common.auth.permissions import inbox_of
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.protocol.subjects import INBOX, is_name

CONNECT_TIMEOUT_S: Final = 5.0
"""How long a program waits for NATS by default."""

_CREDS: Final = "BEGIN NATS USER JWT"


def addresses(nats: str) -> list[str]:
    """Return the addresses in a text that has commas between them."""
    return [url for each in nats.split(",") if (url := each.strip())]


def shown(nats: str) -> str:
    """Return one address, or several, without the secrets that they may contain."""
    return ", ".join(_shown(url) for url in addresses(nats))


def _shown(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else url.rpartition("@")[2]
    except ValueError:
        return url.rpartition("@")[2]


class Login(msgspec.Struct, frozen=True):
    """What nats-py is to be given, and what the inboxes of this user begin with."""

    options: dict[str, Any]
    inbox: str


def login(nats: str, credentials: Path | None, tls: TlsFiles | None = None) -> Login:
    """Read the files. Raises `RegistryUnavailable`, with what to do. A user in an address is the same in each."""
    options: dict[str, Any] = {} if tls is None else {"tls": tls.context()}
    if credentials is None:
        return Login(options, _inbox_of_name(_user_in(nats)))
    try:
        text = credentials.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryUnavailable(f"the credentials for NATS in {credentials} can't be read: {error}") from None
    if _CREDS in text:
        return Login({**options, "user_credentials": str(credentials)}, INBOX)
    if is_seed(seed := text.strip()):
        try:
            return Login({**options, "nkeys_seed_str": seed}, inbox_of(public_key_of(seed, credentials)))
        except KeyUnusable as why:
            raise RegistryUnavailable(str(why)) from None
    user, colon, password = text.strip().partition(":")
    if not user or not colon or "\n" in password:
        raise RegistryUnavailable(
            f"{credentials} holds no credentials for NATS: it must be a key that `tensorhub credentials` made, a "
            ".creds file or one line user:password"
        )
    return Login({**options, "user": user, "password": password}, _inbox_of_name(user))


def _user_in(nats: str) -> str | None:
    try:
        return urlsplit(next(iter(addresses(nats)), "")).username
    except ValueError:
        return None  # What is wrong with it is said when it is dialled.


def _inbox_of_name(user: str | None) -> str:
    """Return the inbox prefix of a user without a key: under the user's name, if it is valid in a subject."""
    return inbox_of(user) if user is not None and is_name(user) else INBOX
