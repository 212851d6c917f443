"""The few requests of JetStream that the hub makes, as plain functions over a bus.

They speak JetStream's JSON API directly: what goes over the wire is then all that happens, and a request ends as soon
as the connection breaks. The caller knows whether a repeat is harmless, and says so with `insist`.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from tensorhub_common.bus.connection import REQUEST_TIMEOUT_S, Bus
from tensorhub_common.bus.errors import (
    LogFull,
    MessageTooLarge,
    NoAnswer,
    NoBus,
    NoResponder,
    StreamFailure,
    StreamMismatch,
    WrongLastSequence,
)
from tensorhub_common.bus.message import NO_HEADERS, STREAM, Headers

API: Final = "$JS.API"

MSG_ID: Final = "Nats-Msg-Id"
TTL: Final = "Nats-TTL"
EXPECTED_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_ID: Final = "Nats-Expected-Last-Msg-Id"
EXPECTED_LAST_OF: Final = "Nats-Expected-Last-Subject-Sequence-Subject"

NOT_FOUND: Final = "404"
NO_MESSAGE: Final = 10037
STREAM_NOT_FOUND: Final = 10059
STREAM_EXISTS: Final = 10058
WRONG_LAST: Final = frozenset({10071, 10164})
FULL: Final = frozenset({10002, 10023, 10047, 10077})
"""Account, server or file system without room; a stream at its own limits."""
TOO_LARGE: Final = 10054
DUPLICATE_UNDER_WAY: Final = 10158
NO_LEADER: Final = frozenset({10004, 10006, 10008, 10009})
"""The nodes of a cluster elect a leader, have no majority, or this one is no leader any more. Another try may help."""
NOT_CLUSTERED: Final = 10074

ATTEMPTS_MAX: Final = 4
RETRY_WAIT_S: Final = 0.2

MISSING_LOOKS_MAX: Final = 8
"""In a cluster a stream counts as missing once that has been said so often."""
MISSING_WAIT_S: Final = 0.5

Result = TypeVar("Result")

NS_PER_S: Final = 1_000_000_000
_ACK_TOKENS: Final = 9
_ACK_TOKENS_LONG: Final = 12
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z", re.ASCII)


class Ack(msgspec.Struct, frozen=True):
    """JetStream has stored a message, as number `seq` of its stream; `duplicate`: an earlier one with the same id."""

    seq: int
    duplicate: bool = False


class _Answer(msgspec.Struct, frozen=True):
    """What JetStream answers to a message for a stream."""

    seq: int | None = None
    duplicate: bool = False
    error: dict[str, Any] | None = None


_answers: Final = msgspec.json.Decoder(_Answer)


class _MessageFound(msgspec.Struct, frozen=True):
    """One message as a stream's leader writes it; bytes are in base64."""

    subject: str
    seq: int
    time: str
    hdrs: bytes = b""
    data: bytes = b""


class _Found(msgspec.Struct, frozen=True):
    """What a stream's leader answers to a look-up."""

    message: _MessageFound | None = None
    error: dict[str, Any] | None = None


_found: Final = msgspec.json.Decoder(_Found)


class Stored(msgspec.Struct, frozen=True):
    """One message as a stream holds it. `time_ns` is the server's time of storing it, since the epoch."""

    seq: int
    time_ns: int
    subject: str
    headers: Mapping[str, str]
    data: bytes
    is_relayed: bool = False
    """It is a copy of an answer of JetStream itself (see `entry`)."""


def is_relayed(headers: Mapping[str, str], marks_max: int = 0) -> bool:
    """Tell by JetStream's marks whether a message was looked up in a stream more often than `marks_max` times."""
    return isinstance(headers, Headers) and headers.count(STREAM.encode()) > marks_max


async def api(
    bus: Bus, verb: str, payload: Mapping[str, Any] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any]:
    """Make one request of JetStream's API. Raises `StreamFailure` where JetStream says no."""
    body = b"" if payload is None else json.dumps(payload).encode()
    answer = await bus.request(f"{API}.{verb}", body, timeout_s)
    result: dict[str, Any] = json.loads(answer)
    if "error" in result:
        raise _failure(result["error"], f"{API}.{verb}")
    return result


async def store(
    bus: Bus,
    subject: str,
    body: bytes,
    headers: Mapping[str, str] = NO_HEADERS,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Ack:
    """Publish into a stream and wait until it is stored.

    Raises `WrongLastSequence`, `LogFull`, `MessageTooLarge` or `StreamFailure`: nothing was stored. After `NoAnswer`
    and `NoBus` it may be stored all the same. `NoResponder`: no stream takes the subject, or its leader is being
    elected.
    """
    answer = _answers.decode(await bus.request(subject, body, timeout_s, headers))
    if answer.error is not None:
        raise _failure(answer.error, subject)
    if answer.seq is None:
        raise StreamFailure(f"JetStream's answer to a message on {subject} names no sequence")
    return Ack(answer.seq, answer.duplicate)


async def last_of(bus: Bus, stream: str, subject: str, timeout_s: float = REQUEST_TIMEOUT_S) -> Stored | None:
    """Return the last message of a subject, wildcards and all, or None. Raises `NoResponder` without a stream."""
    return await _get(bus, stream, {"last_by_subj": subject}, timeout_s)


async def number(bus: Bus, stream: str, seq: int, timeout_s: float = REQUEST_TIMEOUT_S) -> Stored | None:
    """Return the message with this sequence number, or None. Raises `NoResponder` without a stream."""
    return await _get(bus, stream, {"seq": seq}, timeout_s)


async def last_at_leader(bus: Bus, stream: str, subject: str, timeout_s: float = REQUEST_TIMEOUT_S) -> Stored | None:
    """Do what `last_of` does, of a stream whose leader alone answers."""
    return await _get_at_leader(bus, stream, {"last_by_subj": subject}, timeout_s)


async def number_at_leader(bus: Bus, stream: str, seq: int, timeout_s: float = REQUEST_TIMEOUT_S) -> Stored | None:
    """Do what `number` does, of a stream whose leader alone answers."""
    return await _get_at_leader(bus, stream, {"seq": seq}, timeout_s)


async def insist(attempt: Callable[[], Awaitable[Result]], *, on_no_responder: bool = False) -> Result:
    """Try again, a few times, what is harmless to repeat; raise the last failure when all of them failed."""
    for left in reversed(range(ATTEMPTS_MAX)):
        try:
            return await attempt()
        except (NoBus, NoAnswer):
            if left == 0:
                raise
        except NoResponder:
            if left == 0 or not on_no_responder:
                raise
        await asyncio.sleep(RETRY_WAIT_S)
    raise AssertionError


async def stream_info(bus: Bus, stream: str, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
    """Return what JetStream says of a stream. Raises `StreamFailure` with `STREAM_NOT_FOUND` when there is none.

    In a cluster that is asked for again, for some seconds, before it counts: a node that has just become the leader of
    all may not have come to the stream's making yet, and one that slept may not have noticed that it leads no more.
    """
    for left in reversed(range(MISSING_LOOKS_MAX)):
        try:
            return await api(bus, f"STREAM.INFO.{stream}", None, timeout_s)
        except StreamFailure as failure:
            if failure.err_code != STREAM_NOT_FOUND or left == 0 or not is_clustered(bus):
                raise
        await asyncio.sleep(MISSING_WAIT_S)
    raise AssertionError


async def is_missing(bus: Bus, stream: str, timeout_s: float = REQUEST_TIMEOUT_S) -> bool:
    """Tell whether there is no such stream; raise what JetStream says else."""
    try:
        await stream_info(bus, stream, timeout_s)
    except StreamFailure as failure:
        if failure.err_code == STREAM_NOT_FOUND:
            return True
        raise
    return False


def is_clustered(bus: Bus) -> bool:
    """Tell whether the node that the client is connected to is one of several."""
    return bool(bus.server_info.get("cluster"))


async def ensure_stream(bus: Bus, config: Mapping[str, Any], fixed: Iterable[str]) -> dict[str, Any]:
    """Create a stream, or check that the existing one agrees in its `fixed` properties. Returns its information.

    What is not fixed (limits, replicas) an operator may have changed since, and keeps.
    """
    name = config["name"]
    try:
        return await insist(lambda: api(bus, f"STREAM.CREATE.{name}", config))
    except StreamFailure as failure:
        if failure.err_code != STREAM_EXISTS:
            raise
    info = await insist(lambda: api(bus, f"STREAM.INFO.{name}"))
    wrong = [
        f"{key} is {info['config'].get(key)!r} and must be {config[key]!r}"
        for key in fixed
        if info["config"].get(key) != config[key]
    ]
    if wrong:
        raise StreamMismatch(f"stream {name} was not made by this hub: {'; '.join(wrong)}. Rename or delete it")
    return info


async def delete_stream(bus: Bus, name: str) -> None:
    """Delete a stream with everything in it; where there is none, nothing is done."""
    try:
        await insist(lambda: api(bus, f"STREAM.DELETE.{name}"))
    except StreamFailure as failure:
        if failure.err_code != STREAM_NOT_FOUND:
            raise


def time_ns_of(text: str) -> int:
    """Return nanoseconds since the epoch for the server's form of a time, to the last digit."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise StreamFailure(f"NATS sent {text!r:.60} where a time was expected")
    seconds = int(datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp())
    return seconds * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


def delivery_of(reply: str) -> tuple[int, int, int]:
    """Return the stream's and the consumer's sequence and the time, which JetStream puts into the reply subject."""
    tokens = reply.split(".")
    if len(tokens) == _ACK_TOKENS:
        return int(tokens[5]), int(tokens[6]), int(tokens[7])
    if len(tokens) >= _ACK_TOKENS_LONG - 1:
        return int(tokens[7]), int(tokens[8]), int(tokens[9])
    raise StreamFailure(f"JetStream delivered a message without its numbers: {reply!r:.120}")


async def _get(bus: Bus, stream: str, what: Mapping[str, Any], timeout_s: float) -> Stored | None:
    message = await bus.request_message(f"{API}.DIRECT.GET.{stream}", json.dumps(what).encode(), timeout_s)
    headers = dict(message.headers)
    if "Nats-Sequence" not in headers:
        if message.status == NOT_FOUND:
            return None
        raise StreamFailure(f"stream {stream} gave no message: {headers.get('Description', 'without a reason')}")
    relayed = is_relayed(message.headers, marks_max=1)
    headers.pop(STREAM, None)
    seq, subject = int(headers.pop("Nats-Sequence")), headers.pop("Nats-Subject")
    return Stored(seq, time_ns_of(headers.pop("Nats-Time-Stamp")), subject, headers, message.data, relayed)


async def _get_at_leader(bus: Bus, stream: str, what: Mapping[str, Any], timeout_s: float) -> Stored | None:
    subject = f"{API}.STREAM.MSG.GET.{stream}"
    answer = _found.decode(await bus.request(subject, json.dumps(what).encode(), timeout_s))
    if answer.error is not None:
        failure = _failure(answer.error, subject)
        code = failure.err_code if isinstance(failure, StreamFailure) else 0
        if code == NO_MESSAGE:
            return None
        if code == STREAM_NOT_FOUND:
            # As without a responder for the stream's messages: a node may not have come to its making yet.
            raise NoResponder(f"there is no stream {stream}")
        raise failure
    found = answer.message
    if found is None:
        raise StreamFailure(f"stream {stream} gave neither a message nor a reason")
    headers = Headers(found.hdrs)
    return Stored(found.seq, time_ns_of(found.time), found.subject, dict(headers), found.data, is_relayed(headers))


def _failure(error: Mapping[str, Any], where: str) -> Exception:
    code, text = int(error.get("err_code", 0)), str(error.get("description", "no reason given"))
    if code in WRONG_LAST:
        last = text.rpartition(" ")[2]
        return WrongLastSequence(f"somebody else wrote first: {text}", int(last) if last.isdecimal() else None)
    if code in FULL:
        return LogFull(
            f"nothing was written for {where}: {text}. Raise the stream's limits, or give NATS more disk space"
        )
    if code in NO_LEADER:
        return NoAnswer(f"JetStream can't answer on {where} now: {text}. More than half of its nodes must run")
    if code == NOT_CLUSTERED:
        return StreamFailure(
            f"JetStream refused {where}: {text}. Run a NATS cluster, or set TENSORHUB_LOG_REPLICAS=1", code
        )
    if code == TOO_LARGE:
        return MessageTooLarge(
            f"the message for {where} is over the stream's limit: put what is large into the blob store"
        )
    return StreamFailure(f"JetStream refused {where}: {text} (error {code})", code)
