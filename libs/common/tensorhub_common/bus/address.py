"""Where NATS is and how we are let in: addresses without their secrets, and files of credentials."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tensorhub_common.errors import RegistryUnavailable


def shown(url: str) -> str:
    """Return an address without the secret that may stand in it."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.hostname else url.rpartition("@")[2]
    except ValueError:
        return url.rpartition("@")[2]


def login(credentials: Path | None) -> dict[str, Any]:
    """Return what nats-py is to be given for this file: NATS's own `.creds`, or one line "user:password"."""
    if credentials is None:
        return {}
    try:
        text = credentials.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryUnavailable(f"the credentials for NATS in {credentials} can't be read: {error}") from None
    if "BEGIN NATS USER JWT" in text:
        return {"user_credentials": str(credentials)}
    user, colon, password = text.strip().partition(":")
    if not user or not colon or "\n" in password:
        raise RegistryUnavailable(
            f"{credentials} holds no credentials for NATS: it must be a .creds file or one line user:password"
        )
    return {"user": user, "password": password}
