"""A lease on leadership, kept in a JetStream KV bucket.

One process holds a key, for `ttl_s` from the beginning of its last renewal that succeeded. The entry has `Nats-TTL`, so
the server itself ends the lease of a holder that falls silent. Every write names the sequence that it replaces, so
of two that write at once one is refused.

Invariants:
- At most one holder's `held` is true at a time, as far as clocks run alike: the holder counts from before its request,
  and the server from after it, so the holder stops first. The one exception is a process that takes over from its own
  holder id; an operator who starts a process under an id warrants that the earlier one has ended.
- `term` is the revision at which the holder took the lease. It rises from holder to holder, so commands of an older
  holder are recognised by it.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import UNCERTAIN, NoResponder, StreamFailure, WrongLastSequence
from tensorhub_common.errors import InvalidName, TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.subjects import is_name
from tensorhub_common.runtime.supervision import Supervisor, log_only

BUCKET: Final = "tensorhub"
BUCKET_BYTES_MAX: Final = 16 * 1024 * 1024
ENTRY_BYTES_MAX: Final = 4096
MARKER_TTL_S: Final = 86_400
"""How long the server remembers that a lease ended. A key without an entry is free as well."""

TTL_S_MIN: Final = 1
RENEWALS_PER_TTL: Final = 4
RETRY_S: Final = 0.1
ATTEMPT_S_MAX: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.0

_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"

_log: Final = logging.getLogger(__name__)


class LeaseEntry(msgspec.Struct, frozen=True):
    """The value of the key. `nonce` differs for each process of a holder."""

    holder: str
    nonce: str
    format: int = 1
    """Whatever the format is, the named holder has the lease."""


def _config(bucket: str, replicas: int) -> dict[str, Any]:
    return {
        "name": f"KV_{bucket}",
        "description": "TensorHub's leases",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "discard": "new",
        "max_age": 0,
        "max_msgs_per_subject": 1,
        "max_bytes": BUCKET_BYTES_MAX,
        "max_msg_size": ENTRY_BYTES_MAX,
        "storage": "file",
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": MARKER_TTL_S * api.NS_PER_S,
        "deny_delete": True,
    }


class LeaderLease:
    """One process's claim on the lease: it takes it when it can and renews it until `close`.

    Use it as an async context manager, or call `start` and `close`. `on_change(held)` is called at each change.
    """

    def __init__(
        self,
        bus: Bus,
        key: str,
        holder: str,
        ttl_s: float,
        *,
        bucket: str = BUCKET,
        replicas: int = 1,
        on_change: Callable[[bool], None] | None = None,
    ) -> None:
        for text in (key, holder, bucket):
            if not is_name(text):
                raise InvalidName(f"{text!r:.80} can't be part of a lease: take letters, digits, '_' or '-'")
        if ttl_s < TTL_S_MIN:
            raise ValueError(f"a lease of {ttl_s:g} s is not possible: NATS counts in whole seconds, so take 1 or more")
        self.key = key
        self.holder = holder
        # Rounded down, as the server does: a longer count here would make two holders.
        self.ttl_s = int(ttl_s)
        self._bus = bus
        self._work = Supervisor(f"lease {key} of {holder}")
        self._bucket = bucket
        self._replicas = replicas
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}.{key}"
        self._entry = LeaseEntry(holder, token_hex(8))
        self._body = json.dumps(msgspec.to_builtins(self._entry)).encode()
        self._on_change = on_change
        self._revision = 0
        self._term = 0
        self._until = 0.0
        self._is_new_term = False
        self._foreign_seq = 0
        """An entry of the key that is no lease, and since when it is known."""
        self._foreign_since = 0.0
        self._has_bucket = False
        self._reported = False
        self._warned = ""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lease at this very moment."""
        return time.monotonic() < self._until

    @property
    def held_for_s(self) -> float:
        """How much longer the lease is held for certain, 0 when it is not."""
        return max(0.0, self._until - time.monotonic())

    @property
    def term(self) -> int:
        """The term of the lease that is held, or was last; 0 before the first."""
        return self._term

    async def wait(self, *, held: bool, timeout_s: float) -> bool:
        """Return whether `held` came to be so within the bound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.held == held)
        return self.held == held

    async def start(self) -> None:
        """Begin to ask for the lease."""
        self._task = self._work.start(self._keep(), "keeping it")

    async def close(self) -> None:
        """Give the lease back, so that another may have it at once; after `CLOSE_TIMEOUT_S` leave it to expire.

        `start` asks for it anew.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        revision, self._until = self._revision if self.held else 0, 0.0
        self._revision = 0
        await self._report()
        if revision:
            headers = {_OPERATION: "PURGE", "Nats-Rollup": "sub", api.EXPECTED_LAST: str(revision)}
            try:
                await api.store(self._bus, self._subject, b"", headers, CLOSE_TIMEOUT_S)
            except TensorHubError as error:
                _log.debug("lease %s is left to expire: %s", self.key, error)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------- keeping

    async def _keep(self) -> None:
        while True:
            pause_s = self.ttl_s / RENEWALS_PER_TTL
            try:
                await self._try_and_report()
            except WrongLastSequence:
                self._revision = 0
                pause_s = RETRY_S
            except UNCERTAIN as error:
                # Whether it was written is unknown: look at the entry before anything else.
                self._revision = 0
                self._has_bucket = not isinstance(error, NoResponder)
                pause_s = RETRY_S
                self._log_error(error)
            except Exception as error:  # noqa: BLE001 (a fault must not end the renewing; the lease runs out by itself)
                self._revision = 0
                self._work.fault("renewing it", error, log_only)
            await self._report()
            await self._pause(pause_s)

    async def _try_and_report(self) -> None:
        """Try once; should the lease run out meanwhile, report that at once and not at the end of a long wait."""
        turn = self._work.start(self._try(), "renewing it", awaited=True)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=self.held_for_s or None)
                await self._report()
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})
        turn.result()

    def _log_error(self, error: TensorHubError) -> None:
        """Warn of what only an operator can correct; all else passes by itself."""
        level = logging.WARNING if isinstance(error, StreamFailure) and str(error) != self._warned else logging.DEBUG
        _log.log(level, "lease %s can't be had: %s", self.key, error)
        if isinstance(error, StreamFailure):
            self._warned = str(error)

    async def _try(self) -> None:
        """Renew, or take the lease if it can be had."""
        attempt_s = min(ATTEMPT_S_MAX, self.ttl_s / RENEWALS_PER_TTL)
        if not self._has_bucket:
            await self._make_bucket()
        expected = self._revision or await self._look(attempt_s)
        if expected is None:
            return
        headers = {api.EXPECTED_LAST: str(expected), api.TTL: f"{self.ttl_s}s"}
        began = time.monotonic()
        ack = await api.store(self._bus, self._subject, self._body, headers, attempt_s)
        self._revision = ack.seq
        self._until = began + self.ttl_s
        if self._is_new_term:
            self._term, self._is_new_term = ack.seq, False

    async def _look(self, attempt_s: float) -> int | None:
        """Return the sequence that a writer must replace to have the lease, or None: another process has it."""
        last = await api.last_of(self._bus, self._stream, self._subject, attempt_s)
        if last is not None and not (last.headers.get(_OPERATION) or last.headers.get(_MARKER)):
            entry = _read(last)
            if entry is None:
                return self._replace_foreign(last.seq)
            if entry == self._entry:
                # An earlier write of ours whose acknowledgement was lost: no other process held the lease in between.
                return last.seq
            may_take_over = self._term == 0 and entry.holder == self.holder
            if not may_take_over:
                self._until = 0.0
                return None
        self._is_new_term = True
        return 0 if last is None else last.seq

    def _replace_foreign(self, seq: int) -> int | None:
        """Return whether to replace an entry that is no lease: JetStream answers on any subject that a user names.

        The last holder may still count on its lease for as long as one lasts, so no other process takes it before.
        """
        now = time.monotonic()
        if self.held:
            return seq
        if self._foreign_seq != seq:
            self._foreign_seq, self._foreign_since = seq, now
            _log.warning("an entry of %s is no lease: see docs/operate/security.md, 'JetStream answers'", self._subject)
        if now < self._foreign_since + self.ttl_s:
            return None
        self._is_new_term = True
        return seq

    async def _make_bucket(self) -> None:
        await api.ensure_stream(self._bus, _config(self._bucket, self._replicas), ("subjects", "allow_msg_ttl"))
        self._has_bucket = True

    async def _pause(self, pause_s: float) -> None:
        """Wait for the next turn, and awake where the lease runs out before it."""
        turn = time.monotonic() + pause_s
        while (left := turn - time.monotonic()) > 0:
            running_out = self._until - time.monotonic()
            if 0 < running_out < left:
                await asyncio.sleep(running_out)
                await self._report()
            else:
                await asyncio.sleep(left)

    async def _report(self) -> None:
        if self.held == self._reported:
            return
        self._reported = self.held
        _log.debug("%s %s lease %s (term %d)", self.holder, "holds" if self._reported else "lost", self.key, self._term)
        if self._on_change is not None:
            self._on_change(self._reported)
        async with self._changed:
            self._changed.notify_all()


def _read(stored: api.Stored) -> LeaseEntry | None:
    """Read the holder of the lease; None for an entry that no holder has written."""
    if stored.is_relayed:
        return None
    try:
        return msgspec.json.decode(stored.data, type=LeaseEntry)
    except MALFORMED:
        return None
