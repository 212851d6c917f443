"""The NATS permissions of each user of a hub, as allow lists and as nats-server configuration. Pure.

The server refuses every subject that a user's allow lists do not name. `users_conf` renders all users for nats-server,
in the server's own configuration format: their public keys and their allow lists.

Invariants:
- A user subscribes to no inbox but its own, so no user reads another user's replies.
- An agent publishes commands, beats and questions under its own id only.
- A runner publishes tokens, reports and beats under its own id only, hears what the manager asks it, and reads nothing.
- Events, snapshots of jobs' logs, their lease and streams belong to the registry.
- An agent reads neither the rollout log of a job nor its payloads: it can make consumers of events alone, and these
  streams give single messages only through `STREAM.MSG.GET`.
- A client appends what a trainer says of rollouts. What their manager says is the manager's alone. Of a job's commands
  the manager has `hold` alone.
- A client speaks as one runner, the trainer's own engine, and answers what it was asked as that, into no other inbox.
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

from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.subjects import LOCAL_RUNNER, check_name

_API: Final = "$JS.API"
ANSWER_EXPIRY: Final = '"5s"'
"""So long a message may be answered by who may write into no inbox; askers wait for less."""
_LEASES: Final = "$KV.tensorhub.>"
ROLLOUT_BUCKET: Final = "tensorhub-rollouts"
"""The bucket with the leases of rollout managers. That of registries is out of their reach."""

ASKS_OF_REGISTRY: Final = ("open", "versions", "replicas", "status", "outcome", "story", "forget", "health.registry")
"""What anybody with a job's credentials may ask the leading registry about the job; with those of all, of the hub."""
ASKS_OF_PLANNER: Final = ("health.planner",)
"""The same, of the planner."""
ASKS_OF_AGENTS: Final = ("open", "plan")
ASKS_OF_ALL_PROCESSES: Final = ("transfers", "spans", "activity")
"""What every process answers for itself."""
ASKS_OF_ROLLOUTS: Final = ("follow", "outcome", "ready", "seeding", "status", "why")
"""What anybody with a job's credentials may ask the job's rollout manager."""
ASKS_OF_CLIENTS: Final = (*ASKS_OF_REGISTRY, *ASKS_OF_PLANNER, *ASKS_OF_ALL_PROCESSES)


class Role(StrEnum):
    """What a user is in the hub."""

    ADMIN = "admin"
    """May everything: for operators, at a terminal."""
    REGISTRY = "registry"
    PLANNER = "planner"
    ROLLOUT = "rollout"
    """The manager of all jobs' rollouts."""
    AGENT = "agent"
    RUNNER = "runner"
    CLIENT = "client"
    """A trainer, an engine or a command, of one job or of all."""


class User(msgspec.Struct, frozen=True, order=True):
    """Who logs in. `name` is an agent's or a runner's id, or a client's job; a client without one has every job."""

    role: Role
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the name, which becomes part of subjects."""
        if self.role in (Role.AGENT, Role.RUNNER):
            check_name(self.role, self.name or "")
            if self.name == LOCAL_RUNNER and self.role is Role.RUNNER:
                raise InvalidName(f"no runner can be called {LOCAL_RUNNER!r}: that is a trainer's own engine")
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
    answers: bool = False
    """Whether the user may answer each message that it got, once, whatever its inbox."""


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
        case Role.ROLLOUT:
            publish, subscribe = _rollout()
        case Role.AGENT:
            publish, subscribe = _agent(user.name or "")
        case Role.RUNNER:
            publish, subscribe = _runner(user.name or "")
        case Role.CLIENT:
            publish, subscribe = _client(user.name)
    # Into its own inbox it writes to learn that the server has read what it sent before; health checks ping.
    return Permissions(
        (f"{_API}.INFO", subjects.pings(), f"{inbox}.>", *publish),
        (f"{inbox}.>", *subscribe),
        answers=user.role is Role.CLIENT,
    )


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


def _rollout() -> tuple[list[str], list[str]]:
    publish = [
        f"{_API}.STREAM.NAMES",
        *_reading("*"),
        f"{_API}.STREAM.MSG.GET.*",
        # It trims the rollout log, and removes payloads. Streams can't be told apart by a part of their names.
        f"{_API}.STREAM.PURGE.*",
        f"{_API}.STREAM.CREATE.KV_{ROLLOUT_BUCKET}",
        f"$KV.{ROLLOUT_BUCKET}.>",
        *(subjects.rollout_entries_of_all_jobs(verb) for verb in subjects.MANAGER_VERBS),
        subjects.payloads_of_all_jobs(),
        subjects.rollout_snapshots_of_all_jobs(),
        *(subjects.to_runners_of_all_jobs(what) for what in subjects.MANAGER_MESSAGES),
        # Versions that requests are for alone have a copy meanwhile.
        subjects.commands_of_all_jobs_to("hold"),
        f"{subjects.INBOX}.>",
    ]
    asks = [
        *(subjects.rollout_asks_of_all_jobs(what) for what in ASKS_OF_ROLLOUTS),
        *(subjects.asks_of_all_jobs(what) for what in ASKS_OF_ALL_PROCESSES),
    ]
    said = [subjects.from_runners_of_all_jobs(what) for what in subjects.RUNNER_MESSAGES]
    return publish, [*asks, *said, subjects.pings()]


def _runner(runner: str) -> tuple[list[str], list[str]]:
    said = [subjects.from_runners_of_all_jobs(what, runner) for what in subjects.RUNNER_MESSAGES]
    asked = [subjects.to_runners_of_all_jobs(what, runner) for what in subjects.MANAGER_MESSAGES]
    asks = [subjects.asks_of_all_jobs(what) for what in ASKS_OF_ALL_PROCESSES]
    # It answers what the manager asks, and as every process what it did lately.
    return [*said, f"{subjects.INBOX}.>"], [*asked, *asks, subjects.ping(runner)]


def _agent(agent: str) -> tuple[list[str], list[str]]:
    publish = [
        *_reading("*", f"*.{subjects.events_of_all_jobs()}"),
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
        streams = [*_reading("*"), f"{_API}.STREAM.NAMES", f"{_API}.STREAM.MSG.GET.*"]
        asks = [
            *(subjects.asks_of_all_jobs(what) for what in ASKS_OF_CLIENTS),
            *(subjects.rollout_asks_of_all_jobs(what) for what in ASKS_OF_ROLLOUTS),
        ]
        said = [
            subjects.commands_of_all_jobs_by_anyone(),
            *(subjects.rollout_entries_of_all_jobs(verb) for verb in subjects.SDK_VERBS),
            subjects.payloads_of_all_jobs(),
            *(subjects.from_runners_of_all_jobs(what, LOCAL_RUNNER) for what in subjects.RUNNER_MESSAGES),
        ]
        asked = [subjects.to_runners_of_all_jobs(what, LOCAL_RUNNER) for what in subjects.MANAGER_MESSAGES]
        return [*streams, *said, *asks], [subjects.events_of_all_jobs(), *asked]
    streams = [
        *_reading(subjects.log_stream(job)),
        *_reading(subjects.blob_stream(job)),
        # It learns whether there is a rollout log, and reads payloads.
        f"{_API}.STREAM.INFO.{subjects.rollout_stream(job)}",
        f"{_API}.STREAM.INFO.{subjects.payload_stream(job)}",
        f"{_API}.STREAM.MSG.GET.{subjects.payload_stream(job)}",
    ]
    asks = [
        *(subjects.query_subject(job, what) for what in ASKS_OF_CLIENTS),
        *(subjects.rollout_ask(job, what) for what in ASKS_OF_ROLLOUTS),
    ]
    said = [
        subjects.commands_by_anyone(job),
        *(subjects.rollout_entry(job, verb) for verb in subjects.SDK_VERBS),
        subjects.payloads_of(job),
        *(subjects.from_runner(job, what, LOCAL_RUNNER) for what in subjects.RUNNER_MESSAGES),
    ]
    asked = [subjects.to_runner(job, what, LOCAL_RUNNER) for what in subjects.MANAGER_MESSAGES]
    return [*streams, *said, *asks], [subjects.events_of(job), *asked]


def _reading(stream: str, consumers: str = ">") -> list[str]:
    """Return what it takes to follow a stream, and to look up single messages of it.

    `consumers`: the names, and behind them the one subject, of the consumers that may be made.
    """
    return [
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.CONSUMER.CREATE.{stream}.{consumers}",
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
    answers = f"\n      allow_responses: {{ max: 1, expires: {ANSWER_EXPIRY} }}" if permissions.answers else ""
    return f"""\
    # {user}
    {{ nkey: {key}, permissions: {{
      publish: {{ allow: {_listed(permissions.publish)} }}
      subscribe: {{ allow: {_listed(permissions.subscribe)} }}{answers}
    }} }}"""


def _listed(subjects: Iterable[str]) -> str:
    # NATS's configuration takes JSON's strings.
    return json.dumps(list(subjects))
