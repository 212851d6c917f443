"""A user's key: a file with its secret half, and the public half, which is all that the server knows.

Keys are NATS's own (nkeys, Ed25519): the server sends a nonce and the user signs it, so no secret crosses the wire or
is part of the server's configuration. Always true: a key file is readable by its owner alone and is never overwritten
by `make_key`; a secret is in no error's text.
"""

import os
from pathlib import Path
from typing import Final

from tensorhub_common.errors import TensorHubError

MODE: Final = 0o600
SEED_BYTES: Final = 32
SEED_CHARS: Final = 58
"""How long NATS's form of a user's seed is."""
SEED_PREFIX: Final = "SU"

SUFFIX: Final = ".nk"
"""How the name of a key file ends."""


class KeyUnusable(TensorHubError):
    """A key file can't be read or made, or holds no key; the message names the file and what to do."""


def make_key(path: Path) -> str:
    """Write a new key and return its public half. Raises `FileExistsError` where there is one."""
    import nkeys  # noqa: PLC0415 (see `public_key_of`)

    seed: bytes = nkeys.encode_seed(os.urandom(SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "wb") as file:
        # Without a newline: not every NATS client cuts it off.
        file.write(seed)
    return public_key_of(seed.decode(), path)


def read_seed(path: Path) -> str:
    """Return the secret half of a key. Raises `KeyUnusable`."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as why:
        raise KeyUnusable(f"the key in {path} can't be read: {why}") from None
    if not is_seed(text):
        raise KeyUnusable(f"{path} holds no key: make one with `tensorhub credentials`")
    return text


def is_seed(text: str) -> bool:
    """Tell whether a text has the form of a user's secret half."""
    return text.startswith(SEED_PREFIX) and len(text) == SEED_CHARS and text.isascii() and text.isalnum()


def public_key_of(seed: str, where: Path) -> str:
    """Return the public half that belongs to a secret one, which was found at `where`."""
    import nkeys  # noqa: PLC0415 (it loads libsodium: where there is no key, it isn't needed)

    try:
        return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()
    except (nkeys.NkeysError, ValueError):
        # Its text would be the seed's.
        raise KeyUnusable(f"the key in {where} is damaged: make a new one with `tensorhub credentials`") from None
