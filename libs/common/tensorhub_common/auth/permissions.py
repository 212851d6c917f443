"""The NATS permissions of each user of a hub, as allow lists and as nats-server configuration. Pure.

The server refuses every subject that a user's allow lists do not name. `users_conf` renders all users for nats-server,
in the server's own configuration format: their public keys and their allow lists.

Invariants:
- A user subscribes to no inbox but its own, so no user reads another user's replies.
- An agent publishes commands, beats and questions under its own id only.
- Events, snapshots, leases and streams belong to the registry.
- A client of one job can name no other job.

Allow lists have one gap. JetStream sends its answers to the reply subject of a request. A user that may send JetStream
a request can therefore make JetStream's own words appear on any subject. `jetstream/log_entry.py` tells such messages
from those of a user.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.subjects import check_name

_API: Final = "$JS.API"
_LEASES: Final = "$KV.tensorhub.>"

ASKS_OF_REGISTRY: Final = ("open", "versions", "replicas", "status", "outcome", "story", "forget", "health.registry")
"""What anybody with a job's credentials may ask the leading registry about the job; with those of all, of the hub."""
ASKS_OF_PLANNER: Final = ("health.planner",)
"""The same, of the planner."""
ASKS_OF_AGENTS: Final = ("open", "plan")
ASKS_OF_ALL_PROCESSES: Final = ("transfers", "spans", "activity")
"""What every process answers for itself."""
ASKS_OF_CLIENTS: Final = (*ASKS_OF_REGISTRY, *ASKS_OF_PLANNER, *ASKS_OF_ALL_PROCESSES)


class Role(StrEnum):
    """What a user is in the hub."""

    ADMIN = "admin"
    """May everything: for operators, at a terminal."""
    REGISTRY = "registry"
    PLANNER = "planner"
    AGENT = "agent"
    CLIENT = "client"
    """A trainer, an engine or a command, of one job or of all."""


class User(msgspec.Struct, frozen=True, order=True):
    """Who logs in. `name` is an agent's id, or a client's job; a client without one may speak in every job."""

    role: Role
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the name, which becomes part of subjects."""
        if self.role is Role.AGENT:
            check_name("agent", self.name or "")
        elif self.role is Role.CLIENT and self.name is not None:
            subjects.check_job(self.name)
        elif self.role is not Role.CLIENT and self.name is not None:
            raise ValueError(f"there is one {self.role} in a hub, so {self.name!r} can't be its name")

    def __str__(self) -> str:
        return self.role if self.name is None else f"{self.role} {self.name}"


class Permissions(msgspec.Struct, frozen=True):
    """Allow lists of subjects, wildcards and all."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_of(public_key: str) -> str:
    """Return what a user's inboxes begin with."""
    return f"{subjects.INBOX}.{public_key}"


def permissions_of(user: User, inbox: str) -> Permissions:
    """Return what a user may do whose inboxes begin with `inbox`."""
    match user.role:
        case Role.ADMIN:
            return Permissions((">",), (">",))
        case Role.REGISTRY:
            publish, subscribe = _registry()
        case Role.PLANNER:
            publish, subscribe = _planner()
        case Role.AGENT:
            publish, subscribe = _agent(user.name or "")
        case Role.CLIENT:
            publish, subscribe = _client(user.name)
    # Into its own inbox it writes to learn that the server has read what it sent before; health checks ping.
    return Permissions((f"{_API}.INFO", subjects.pings(), f"{inbox}.>", *publish), (f"{inbox}.>", *subscribe))


def _registry() -> tuple[list[str], list[str]]:
    streams = [f"{_API}.STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "PURGE", "DELETE")]
    publish = [
        f"{_API}.STREAM.NAMES",
        *streams,
        *_reading("*"),
        _LEASES,
        subjects.events_of_all_jobs(),
        subjects.snapshots_of_all_jobs(),
        subjects.commands_of_all_jobs_by(subjects.REGISTRY),
        # Answers, and outcomes on the inbox that a command names.
        f"{subjects.INBOX}.>",
    ]
    asks = [subjects.asks_of_all_jobs(what) for what in (*ASKS_OF_REGISTRY, *ASKS_OF_ALL_PROCESSES)]
    return publish, [*asks, subjects.beats(), subjects.pings()]


def _planner() -> tuple[list[str], list[str]]:
    asks = [subjects.asks_of_all_jobs(what) for what in ("plan", *ASKS_OF_PLANNER, *ASKS_OF_ALL_PROCESSES)]
    # Transfer programs are blobs.
    publish = [f"{_API}.STREAM.NAMES", *_reading("*"), subjects.blobs_of_all_jobs(), f"{subjects.INBOX}.>"]
    return publish, [*asks, subjects.beats(), subjects.pings()]


def _agent(agent: str) -> tuple[list[str], list[str]]:
    publish = [
        *_reading("*"),
        subjects.commands_of_all_jobs_by(agent),
        subjects.blobs_of_all_jobs(),
        *(subjects.asks_of_all_jobs(what) for what in ASKS_OF_AGENTS),
        subjects.beat(agent),
        subjects.asks_by_agent(agent),
        f"{subjects.INBOX}.>",
    ]
    asks = [subjects.asks_of_all_jobs(what) for what in ASKS_OF_ALL_PROCESSES]
    return publish, [*asks, subjects.asks_to_agent(agent), subjects.ping(agent)]


def _client(job: str | None) -> tuple[list[str], list[str]]:
    if job is None:
        streams = [*_reading("*"), f"{_API}.STREAM.NAMES"]
        asks = [subjects.asks_of_all_jobs(what) for what in ASKS_OF_CLIENTS]
        return [*streams, subjects.commands_of_all_jobs_by_anyone(), *asks], [subjects.events_of_all_jobs()]
    streams = [*_reading(subjects.log_stream(job)), *_reading(subjects.blob_stream(job))]
    asks = [subjects.query_subject(job, what) for what in ASKS_OF_CLIENTS]
    return [*streams, subjects.commands_by_anyone(job), *asks], [subjects.events_of(job)]


def _reading(stream: str) -> list[str]:
    """Return what it takes to follow a stream, and to look up single messages of it."""
    return [
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.DIRECT.GET.{stream}",
    ]


def users_conf(users: Mapping[User, str]) -> str:
    """Return the file for these users, by their public keys; it holds no secret."""
    entries = "\n".join(_entry(user, key) for user, key in sorted(users.items(), key=_order))
    return f"""\
# Written by TensorHub; changes are lost. Public keys and what each may do: docs/operate/security.md says why.
authorization {{
  users: [
{entries}
  ]
}}
"""


def _order(entry: tuple[User, str]) -> tuple[str, str]:
    return (entry[0].role, entry[0].name or "")


def _entry(user: User, key: str) -> str:
    permissions = permissions_of(user, inbox_of(key))
    return f"""\
    # {user}
    {{ nkey: {key}, permissions: {{
      publish: {{ allow: {_listed(permissions.publish)} }}
      subscribe: {{ allow: {_listed(permissions.subscribe)} }}
    }} }}"""


def _listed(subjects: Iterable[str]) -> str:
    # NATS's configuration takes JSON's strings.
    return json.dumps(list(subjects))
