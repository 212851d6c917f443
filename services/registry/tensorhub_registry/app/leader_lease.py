"""A lease on leadership, kept in a JetStream KV bucket.

Of all that ask for a key one holds it, for `ttl_s` from the beginning of its last renewal that succeeded. The entry
carries `Nats-TTL`, so the server itself ends the lease of a holder that falls silent; and every write names the
sequence that it replaces, so of two that write at once one is refused.

Always true: at most one holder's `held` is true at a time, as far as clocks run alike (the holder counts from before
it asked, the server from after, so the holder stops first); `term` is the revision at which the holder took the lease
and rises from holder to holder, so what an older holder still says can be told by it. The one exception is a process
that took over from the same holder id: whoever starts a process under an id warrants that the earlier one is gone.
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
"""How long the server remembers that a lease ended; with no entry at all a key is free as well."""

TTL_S_MIN: Final = 1
RENEWALS_PER_TTL: Final = 4
RETRY_S: Final = 0.1
ATTEMPT_S_MAX: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.0

_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"

_log: Final = logging.getLogger(__name__)


class LeaseEntry(msgspec.Struct, frozen=True):
    """What stands under the key. `nonce` is another for each life of a holder."""

    holder: str
    nonce: str
    format: int = 1
    """Whatever it is, who is named holds the lease."""


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
    """One process's wish to hold the lease: it takes it when it can and renews it until `close`.

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
        # Rounded down, as the server does: to think that it lasted longer would make two holders.
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
        self._nobodys = 0
        """Where something stands that is nobody's lease, and since when that is known."""
        self._nobodys_since = 0.0
        self._has_bucket = False
        self._told = False
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
        await self._tell()
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
                await self._turn_and_tell()
            except WrongLastSequence:
                self._revision = 0
                pause_s = RETRY_S
            except UNCERTAIN as error:
                # Whether it was written is unknown: look what stands there before anything else.
                self._revision = 0
                self._has_bucket = not isinstance(error, NoResponder)
                pause_s = RETRY_S
                self._say_why(error)
            except Exception as error:  # noqa: BLE001 (a fault must not end the asking; the lease runs out by itself)
                self._revision = 0
                self._work.fault("asking for it", error, log_only)
            await self._tell()
            await self._pause(pause_s)

    async def _turn_and_tell(self) -> None:
        """Take a turn; should the lease run out meanwhile, tell so at once and not at the end of a long wait."""
        turn = self._work.start(self._turn(), "asking for it", awaited=True)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=self.held_for_s or None)
                await self._tell()
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})
        turn.result()

    def _say_why(self, error: TensorHubError) -> None:
        """Warn of what only an operator can mend; all else passes by itself."""
        level = logging.WARNING if isinstance(error, StreamFailure) and str(error) != self._warned else logging.DEBUG
        _log.log(level, "lease %s can't be had: %s", self.key, error)
        if isinstance(error, StreamFailure):
            self._warned = str(error)

    async def _turn(self) -> None:
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
        """Return the sequence that a writer must replace to have the lease, or None: it is somebody else's."""
        last = await api.last_of(self._bus, self._stream, self._subject, attempt_s)
        if last is not None and not (last.headers.get(_OPERATION) or last.headers.get(_MARKER)):
            entry = _read(last)
            if entry is None:
                return self._over_nobodys(last.seq)
            if entry == self._entry:
                # An earlier write of ours whose acknowledgement was lost: nobody held the lease in between.
                return last.seq
            may_take_over = self._term == 0 and entry.holder == self.holder
            if not may_take_over:
                self._until = 0.0
                return None
        self._is_new_term = True
        return 0 if last is None else last.seq

    def _over_nobodys(self, seq: int) -> int | None:
        """Say whether to replace what is no lease: JetStream answers on any subject that somebody names.

        Whoever held the lease may still believe so for as long as a lease lasts: nobody else takes it before.
        """
        now = time.monotonic()
        if self.held:
            return seq
        if self._nobodys != seq:
            self._nobodys, self._nobodys_since = seq, now
            _log.warning(
                "what is no lease stands on %s: see docs/operate/security.md, 'JetStream answers'", self._subject
            )
        if now < self._nobodys_since + self.ttl_s:
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
                await self._tell()
            else:
                await asyncio.sleep(left)

    async def _tell(self) -> None:
        if self.held == self._told:
            return
        self._told = self.held
        _log.debug("%s %s lease %s (term %d)", self.holder, "holds" if self._told else "lost", self.key, self._term)
        if self._on_change is not None:
            self._on_change(self._told)
        async with self._changed:
            self._changed.notify_all()


def _read(stored: api.Stored) -> LeaseEntry | None:
    """Read who holds the lease; None for what no holder has written."""
    if stored.is_relayed:
        return None
    try:
        return msgspec.json.decode(stored.data, type=LeaseEntry)
    except MALFORMED:
        return None
