"""TLS to NATS by settings, and no hub on a NATS that lets in every client."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from tests.kit.nats import RunningNats, running_nats

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.connection import connect
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import RegistryUnavailable

CLIENT: Final = User(Role.CLIENT)
PROMPT_S: Final = 20.0
"""The bound that connecting is given here; a refusal comes long before."""

MESSAGES: Final = 20
MESSAGE_BYTES: Final = 1_000_000


def certificate(folder: Path, name: str, *names: str) -> tuple[Path, Path]:
    """Make one that is its own authority, as docs/operate/deploy.md says."""
    key, pem = folder / f"{name}.key", folder / f"{name}.pem"
    kind = ("-x509", "-newkey", "ed25519", "-noenc", "-days", "1", "-subj", f"/CN={name}")
    subject = ("-addext", f"subjectAltName={','.join(names or ('DNS:nobody',))}")
    subprocess.run(["openssl", "req", *kind, *subject, "-keyout", key, "-out", pem], check=True, capture_output=True)  # noqa: S607
    return key, pem


@contextmanager
def server(folder: Path, keys: Keyring, tls: str) -> Iterator[RunningNats]:
    keys.make(OF_EVERY_HUB)
    with keys.conf.open("a") as file:
        file.write(tls)
    with running_nats(folder / "nats", keys.conf) as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "credentials")


@pytest.fixture
def encrypted(tmp_path: Path, keys: Keyring) -> Iterator[tuple[str, Path]]:
    key, pem = certificate(tmp_path, "nats", "IP:127.0.0.1")
    with server(tmp_path, keys, f'tls {{ cert_file: "{pem}", key_file: "{key}" }}\n') as running:
        yield running.url, pem


async def test_who_is_believed(
    encrypted: tuple[str, Path], keys: Keyring, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the authority's file it goes through; with another's, or none, it ends at once and says why."""
    url, pem = encrypted
    key = keys.path_of(CLIENT)
    async with await connect(url, name="x", credentials=key, tls=TlsFiles(pem)) as bus:
        assert bus.server_info["tls_required"]
    assert caplog.messages == [], "each command ends one, and what asyncio said of it would stand below the answer"
    _, foreign = certificate(tmp_path, "foreign", "IP:127.0.0.1")
    for tls in (None, TlsFiles(foreign)):
        async with asyncio.timeout(PROMPT_S / 2):
            with pytest.raises(RegistryUnavailable, match="TENSORHUB_NATS_CA names whom to believe"):
                await connect(url, name="x", credentials=key, tls=tls, timeout_s=PROMPT_S)
    with pytest.raises(RegistryUnavailable, match="must be PEM"):
        await connect(url, name="x", credentials=key, tls=TlsFiles(key))


async def test_a_slow_reader_keeps_little(encrypted: tuple[str, Path], keys: Keyring) -> None:
    """What it has no time for stays with the server; nats-py would read on over TLS, and keep all of it."""
    url, pem = encrypted
    admin, tls = keys.path_of(User(Role.ADMIN)), TlsFiles(pem)
    kept: list[int] = []
    taken_all = asyncio.Event()

    def take(_: Message) -> None:
        transport: Any = reader._client._transport
        kept.append(len(transport._io_reader._buffer))
        if len(kept) == MESSAGES:
            taken_all.set()

    async with (
        await connect(url, name="talker", credentials=admin, tls=tls) as talker,
        await connect(url, name="reader", credentials=admin, tls=tls) as reader,
    ):
        await reader.subscribe("long", take)
        for _ in range(MESSAGES):
            await talker.publish("long", bytes(MESSAGE_BYTES))
        async with asyncio.timeout(PROMPT_S):
            await taken_all.wait()
    assert max(kept) < MESSAGE_BYTES


async def test_nothing_is_said_in_the_clear(keys: Keyring, tmp_path: Path) -> None:
    """A program between the two may deny that there is TLS; then it learns nothing of the client."""
    _, pem = certificate(tmp_path, "nats", "IP:127.0.0.1")
    with server(tmp_path, keys, "") as running:
        key = keys.path_of(CLIENT)
        async with asyncio.timeout(PROMPT_S / 2):
            with pytest.raises(RegistryUnavailable, match="does not speak TLS"):
                await connect(running.url, name="x", credentials=key, tls=TlsFiles(pem), timeout_s=PROMPT_S)


async def test_a_certificate_of_ones_own(keys: Keyring, tmp_path: Path) -> None:
    """Where the server asks for one, the key of NATS alone is not enough."""
    key, pem = certificate(tmp_path, "nats", "IP:127.0.0.1")
    my_key, my_pem = certificate(tmp_path, "mine")
    tls = f'tls {{ cert_file: "{pem}", key_file: "{key}", ca_file: "{my_pem}", verify: true }}\n'
    with server(tmp_path, keys, tls) as running:
        client, mine = keys.path_of(CLIENT), TlsFiles(pem, my_pem, my_key)
        async with await connect(running.url, name="x", credentials=client, tls=mine):
            pass
        with pytest.raises(RegistryUnavailable):
            await connect(running.url, name="x", credentials=client, tls=TlsFiles(pem), timeout_s=1.0)


async def test_a_nats_that_is_open_to_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without users it may listen on loopback alone: elsewhere no process of a hub works with it."""
    no_users = tmp_path / "users.conf"
    no_users.write_text("")
    for listen, is_fine in (("127.0.0.1", True), ("0.0.0.0", False)):  # noqa: S104 (it is what must be refused)
        monkeypatch.setattr("tensorhub.local.nats_server.LISTEN", listen)
        with running_nats(tmp_path / listen, no_users) as running:
            url = running.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
            if is_fine:
                async with await connect(url, name="x"):
                    continue
            with pytest.raises(RegistryUnavailable, match="lets in whoever reaches it"):
                await connect(url, name="x")
