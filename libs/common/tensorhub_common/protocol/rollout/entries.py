"""The entries of the log of a job's rollouts, as JSON. docs/design/rollouts/log.md has the rules of their fold.

Entries are small: prompts and tokens are payloads, which entries name by their digests. An entry of the SDK carries its
attachment and a number, so that a repeat is recognised at any distance. An entry of a manager carries its term.
"""

from typing import Annotated, Final, Literal

import msgspec

from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.commands import VERSION_MAX

ENTRY_BYTES_MAX: Final = 256 * 1024
"""What is larger is not even parsed."""

PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit of one payload."""

PRIORITY_MAX: Final = 1_000_000

Count = Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)]
"""A number that every JSON reader keeps exact."""

EndReason = Literal["stop", "length", "cancelled", "failed"]
ManagerEndReason = Literal["stop", "length", "failed"]
"""How a manager may end a request. Only its trainer cancels it."""


class Attempt(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One placement of a request. A later placement has a higher one, whichever leader made it."""

    term: Count
    n: Count


class RequestId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A request of this log: the sequence of the entry that submitted it, and its index among that entry's requests."""

    submission: Count
    index: Count


PolicyName = Literal["arrival", "rlboost", "streamrl"]
"""How requests are placed."""
DEFAULT_POLICY: Final[PolicyName] = "arrival"
ArrivalTerm = Literal["activation", "admission", "migration", "retention", "seeding"]
"""What the policy `arrival` can do without: a manager's setting and a simulated job's scenario name them."""


class Payload(msgspec.Struct, frozen=True):
    """Bytes in the job's payload stream: their digest (64 hexadecimal digits) and how many they are."""

    digest: str
    nbytes: Count


class SdkSender(msgspec.Struct, frozen=True):
    """Who sent an entry: an attachment (the sequence of its `attach`), and n, which counts its entries from 1."""

    attachment: Count
    n: Count


class Attach(
    msgspec.Struct, frozen=True, tag_field="verb", tag="attach", forbid_unknown_fields=True, omit_defaults=True
):
    """A trainer takes a consumer's name. A higher epoch drops all that an earlier one left."""

    name: str
    model: str
    epoch: Count
    nonce: str
    """Chosen for this attachment, so that its sender knows its own entry again."""
    policy: Annotated[str, msgspec.Meta(max_length=64)] = DEFAULT_POLICY
    """How requests are placed: one of `PolicyName`; a manager that does not know it takes RLBoost's. The default is
    not said, so that earlier releases read the rest."""


class GroupSubmitted(msgspec.Struct, frozen=True):
    """One prompt and how many responses it is to have."""

    id: str
    digest: str
    """Over prompt, sampling, version and size: what the id stands for."""
    size: Count
    """How many requests."""
    prompt_tokens: Count
    tokens_max: Count
    """Limit of the tokens of each response."""
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    version: Count | None = None
    """The version that each request must run on; None: the consumer's rule."""
    is_named: bool = True
    """Whether the user chose the id. An id that the SDK made is not kept once the group is done."""


class Submit(msgspec.Struct, frozen=True, tag_field="verb", tag="submit", forbid_unknown_fields=True):
    """Groups to be generated. The payload has their prompts, samplings and metadata, in this order."""

    by: SdkSender
    groups: tuple[GroupSubmitted, ...]
    payload: Payload


class Cancel(msgspec.Struct, frozen=True, tag_field="verb", tag="cancel", forbid_unknown_fields=True):
    """End the open requests of these groups."""

    by: SdkSender
    groups: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag_field="verb", tag="done", forbid_unknown_fields=True):
    """The trainer has these responses and wants none of them again."""

    by: SdkSender
    requests: tuple[RequestId, ...]


class Lead(msgspec.Struct, frozen=True, tag_field="verb", tag="lead", forbid_unknown_fields=True):
    """A manager leads from here on. Entries of lower terms count for nothing behind it."""

    term: Count
    manager: str


class TokensKept(msgspec.Struct, frozen=True):
    """Tokens `start` to `stop` of a request, as its attempt made them."""

    request: RequestId
    attempt: Attempt
    start: Count
    stop: Count


class Checkpoint(msgspec.Struct, frozen=True, tag_field="verb", tag="checkpoint", forbid_unknown_fields=True):
    """Tokens of open requests, so that they outlive manager and runner. The payload has them in this order."""

    term: Count
    instance: str
    parts: tuple[TokensKept, ...]
    payload: Payload


class RequestEnded(msgspec.Struct, frozen=True):
    """How a request ended, and how many tokens its response has."""

    request: RequestId
    attempt: Attempt | None
    """The attempt that made the last token; None: none did."""
    reason: ManagerEndReason
    tokens: Count
    error: str | None = None
    """Why it failed, as a user should read it."""


class End(msgspec.Struct, frozen=True, tag_field="verb", tag="end", forbid_unknown_fields=True):
    """Requests ended. The payload has their responses in this order; None: none of them has a token."""

    term: Count
    ends: tuple[RequestEnded, ...]
    payload: Payload | None = None


class Scale(msgspec.Struct, frozen=True, tag_field="verb", tag="scale", forbid_unknown_fields=True):
    """How many instances the policy wishes for at a site ("" is any), and why. Launchers follow it."""

    term: Count
    instances: Count
    site: str
    reason: str


SdkEntry = Submit | Cancel | Done
LeaderEntry = Checkpoint | End | Scale
AnyEntry = Attach | SdkEntry | Lead | LeaderEntry


class UnreadableEntry(msgspec.Struct, frozen=True):
    """What stands in the log and is no entry. It changes nothing."""

    verb: str
    reason: str


_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[AnyEntry]] = msgspec.json.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    """Return the JSON form."""
    return _encoder.encode(entry)


def decode(verb: str, data: bytes) -> AnyEntry | UnreadableEntry:
    """Read what came on the subject of `verb`. What is no entry of it becomes `UnreadableEntry` with the reason."""
    if len(data) > ENTRY_BYTES_MAX:
        return UnreadableEntry(verb, f"the body has {len(data)} bytes; an entry has at most {ENTRY_BYTES_MAX}")
    try:
        entry = _decoder.decode(data)
    except MALFORMED as why:
        return UnreadableEntry(verb, f"the body is no entry: {why}"[:500])
    said = str(entry.__struct_config__.tag)
    if said != verb:
        return UnreadableEntry(verb, f"the subject says {verb!r} and the body says {said!r}; they must agree")
    return entry
