"""The bus as an AsyncAPI 3 document, made from the structs themselves, so that it can't say anything else than they do.

The document speaks as the hub (registry, planner and agents): it receives commands and questions, and sends events and
answers. `python -m tools.docs.asyncapi` prints it; docs/reference/asyncapi.json is a copy that a test compares.

Always true: every command, every event and every entry of rollouts has a channel, and every message an example that
reads as what it shows.
"""

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from tensorhub_common.protocol import activity, heartbeat, leases, plans, queries, spans
from tensorhub_common.protocol.log import commands
from tensorhub_common.protocol.log.events import HUB_MODEL, AnyEvent, Event
from tensorhub_common.protocol.rollout import entries, messages, questions
from tensorhub_common.protocol.subjects import SDK_VERBS
from tools.docs.rollout_examples import ROLLOUT_EXAMPLES

Json = dict[str, Any]
Kind = type[msgspec.Struct]

COMMANDS: Final[tuple[type[commands.Command], ...]] = get_args(commands.AnyCommand)
EVENTS: Final[tuple[type[Event], ...]] = get_args(AnyEvent)
ENTRIES: Final[tuple[Kind, ...]] = (*get_args(entries.AnyEntry),)

_JOB: Final = "tensorhub.v1.{job}"
_HUB: Final = "tensorhub.v1._hub"
_ROLLOUT: Final = f"{_JOB}.rollout"
_JSON: Final = "application/json"
_MSGPACK: Final = "application/msgpack"

_RENAMED: Final[dict[Kind, str]] = {entries.Lead: "RolloutLead"}
"""The names here of structs that are called as others are."""

_PARAMETERS: Final = {
    "job": "An isolated namespace: one training run.",
    "model": f"A model of the job, or `{HUB_MODEL}` for what belongs to no model.",
    "process": "The agent or registry that alone may publish here, by NATS permissions.",
    "agent": "An agent's id.",
    "runner": "A runner's id. It alone may publish its own tokens, reports and beats, and hear what it is asked.",
    "asker": "The agent that asks, and alone may publish here, by NATS permissions.",
    "digest": "BLAKE2b-256 of the whole blob, as 64 hexadecimal digits.",
    "index": "The number of the chunk.",
}

_SOURCE: Final = ["node-1-0", 1763692800123, "trainer", 0]
_VALUES: Final[Json] = {
    "again_at": 1763692830.25,
    "agent": "node-1-0",
    "agents": [],
    "ailing": 1,
    "at_seq": 4711,
    "is_held": True,
    "wrong": False,
    "attempt": 1,
    "attributes": {"tensorhub.version": 12, "tensorhub.replica": "rollout-3", "tensorhub.bytes": 1073741824},
    "avoid": [],
    "begins": "5f2c",
    "cache_bytes": 8589934592,
    "awaits_patches": True,
    "base": "99aa06d3014798d86001c324468d497f",
    "by": {"lane": "node-1-0/3", "incarnation": 1763692800123, "n": 17},
    "bytes_per_s": 2_900_000_000,
    "cmd": 4711,
    "done_bytes": 536870912,
    "digests": "MDEyMzQ1Njc4OWFiY2RlZg==",
    "dropped": [],
    "end_ns": 1763692800612000000,
    "endpoint": "/run/tensorhub/node-1-0.transport",
    "error": "VersionUnavailable",
    "events": [],
    "faults": 0,
    "filling": False,
    "first": 16384,
    "held": [1],
    "holders": ["trainer", "rollout-3"],
    "holds": [],
    "holder": "rollouts",
    "host": "node-1",
    "jobs": [],
    "i": 1,
    "id": "registry-0",
    "incarnation": 1763692800123,
    "instance": "node-2-0",
    "job": "run-7",
    "k": 1,
    "kept": [],
    "last": 12,
    "layout": "b996adfe1be9b807ff5a7052fc4dc57188bc9aab0bd886f2b51d9443400730af",
    "lease": "run-7:bGVhc2U",
    "left_out": 0,
    "limit": 20,
    "lasts_s": 60,
    "lines": ["  4711.1/2  version.published    version=12 replica=trainer  by node-1-0/3"],
    "link": "site/node-3",
    "links": [{"trace": "0af7651916cd43dd8448eb211c80319c", "span": "b7ad6b7169203331"}],
    "live": True,
    "members": [],
    "message": "version 12 of model 'policy' has no live holder; available now: none",
    "missing": [1],
    "model": "policy",
    "models": [],
    "n": 17,
    "nats_lost": 1,
    "nats_s": 86400.0,
    "name": "transfer",
    "nbytes": 1073741824,
    "of": 4705,
    "on": True,
    "outcome": "version.published",
    "patches_coming": False,
    "patch_sizes": "AKgAAA==",
    "parent": "00f067aa0ba902b7",
    "patient": True,
    "staged": False,
    "mapped": False,
    "units": False,
    "promises": True,
    "packs": True,
    "hold_s": 0.0,
    "again": "",
    "is_early": False,
    "crossers": [],
    "uncrossed": [],
    "far": False,
    "streams": 1,
    "crosses": False,
    "stands": True,
    "pid": 4242,
    "plan_s": None,
    "planner_silent_s": None,
    "pieces": [[0, 256]],
    "process": "node-2-0",
    "program": None,
    "unregistered": [],
    "unregistered_count": 0,
    "protocol": commands.PROTOCOL,
    "published_at": 1763692800.25,
    "publisher": "trainer",
    "rack": "r07",
    "reads": [],
    "reads_left_out": 0,
    "rates": [["site/node-3", "ucxx", 2_900_000_000, 14, 3.5]],
    "reader": ["node-2-0", 1763692800456, "rollout-3", 0],
    "reason": "unpublished",
    "registry": "registry-0",
    "release": "0.1.0",
    "replica": "trainer",
    "replicas": [],
    "role": "registry",
    "root": "6c78e0e3bd51d358d01e758642b85fb8",
    "roots": ["6c78e0e3bd51d358d01e758642b85fb8", "99aa06d3014798d86001c324468d497f"],
    "round": 4699,
    "seq": 4711,
    "serving": [["ucxx", 2, 2147483648, [["run-7", "policy", "rollout-3", 0, 4711, 1073741824]]]],
    "service": "tensorhub-agent",
    "since": 1763692800.25,
    "shard": 0,
    "shards": 2,
    "shares": [],
    "siblings": [[1, "b996adfe1be9b807ff5a7052fc4dc57188bc9aab0bd886f2b51d9443400730af"]],
    "site": "berlin",
    "source": _SOURCE,
    "span": "5f2c9a1b7d3e4f60",
    "spans": [],
    "spot": False,
    "start_ns": 1763692800250000000,
    "state": "available",
    "troubles": [],
    "up_s": 86410.5,
    "term": 3,
    "level": 1,
    "supersede": True,
    "ticket": "run-7:dGlja2V0",
    "ticket_s": 5.0,
    "time": 1763692800.25,
    "to": 8,
    "trace": "0af7651916cd43dd8448eb211c80319c",
    "transport": "local",
    "turn": [4702, 4699],
    "verb": "publish",
    "until": 1763692860.25,
    "version": 12,
    "versions": [],
    "void": False,
    "waits": True,
    "want": "latest",
    "why": "the nearest holder: same host",
    "wish": 4700,
}
"""What a field of this name holds in an example."""

_SPECIAL: Final[Json] = {
    "AgentJoined.kept": [{"model": "policy", "replica": "trainer", "shard": 0, "version": 12, "root": _VALUES["root"]}],
    "CopyPlaced.members": [[0, "node-2-0", _VALUES["layout"], 1073741824]],
    "CopyPlaced.replica": "_cache-12-4711",
    "Demand.pieces": None,
    "Join.by": {"lane": "node-1-0", "incarnation": 1763692800123, "n": 1},
    "Join.holds": [{"model": "policy", "replica": "trainer", "shard": 0, "version": 12, "root": _VALUES["root"]}],
    "Expire.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "EndHold.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "HoldEnded.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "Hold.versions": [11, 12],
    "HoldStated.versions": [11, 12],
    "ForgetAgent.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "AgentForgotten.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "AgentLost.by": {"lane": "_registry", "incarnation": 3, "n": 1},
    "Lead.by": {"lane": "_registry", "incarnation": 3, "n": 0},
    "RegistryLeads.by": {"lane": "_registry", "incarnation": 3, "n": 0},
    "Activity.role": "agent",
    "Activity.reads": [
        {
            "model": "policy",
            "replica": "rollout-3",
            "shard": 0,
            "want": "latest",
            "version": 12,
            "stage": "filling",
            "done_bytes": 536870912,
            "total_bytes": 1073741824,
            "bytes_per_s": 2_900_000_000,
            "for_s": 0.25,
            "still_s": 0.001,
            "trace": "0af7651916cd43dd8448eb211c80319c",
            "sources": [
                {"agent": "node-1-0", "transport": "ucxx", "phase": "open", "nbytes": 536870912, "silent_s": 0.001}
            ],
        }
    ],
    "Span.error": None,
    "CommandRepeated.error": None,
    "CommandRepeated.message": None,
    "LeaseGrant.pieces": 256,
    "LeaseRefusal.reason": "the shard is not published here, or it is draining",
    "Decline.error": "ReplicaConflict",
    "Decline.message": "shard 0 of policy/trainer has a call under way: wish again",
    "PublishDeclined.error": "ReplicaConflict",
    "PublishDeclined.message": "shard 0 of policy/trainer has a call under way: wish again",
    "Publish.by": None,
    "PublishFailed.error": "VersionConflict",
    "PublishFailed.message": "the shards name versions [12, 13]; all shards must publish one",
    "PublishFailed.shards": [0, 1],
    "PublishWished.by": None,
    "Refusal.reason": "no live holder of version 12 has the layout of this shard",
    "ReplicaReady.round": None,
    "RoundFailed.error": "RoundTimeout",
    "RoundFailed.message": "shard 1: agent 'node-2-0', which owns shard 1, was lost",
    "Health.jobs": [
        {
            "job": "run-7",
            "state": "waiting",
            "why": "JetStream gave no answer about the log for 12 s",
            "advice": "look whether more than half of the nodes of NATS run",
            "seq": 4711,
            "since": 1763692800.25,
            "again_at": 0.0,
        }
    ],
    "GiveUp.error": "RoundTimeout",
    "GiveUp.message": "shards [1] of the replica did not join the round within the bound",
}


def name_of(kind: Kind) -> str:
    """Return what a struct is called in the document."""
    return _RENAMED.get(kind, kind.__name__)


def example(kind: type[msgspec.Struct]) -> Any:  # noqa: ANN401 (an instance of whatever struct was asked for)
    """Return an example of a struct; a field without an example has its default. Raises KeyError where it has none."""
    if kind in ROLLOUT_EXAMPLES:
        return ROLLOUT_EXAMPLES[kind]
    body: Json = {}
    for field in msgspec.structs.fields(kind):
        known = _SPECIAL.get(f"{kind.__name__}.{field.name}", _VALUES.get(field.name, field.default))
        if known is msgspec.NODEFAULT:
            raise KeyError(f"give {kind.__name__}.{field.name} an example in {Path(__file__).name}")
        body[field.name] = msgspec.to_builtins(known)
    config = kind.__struct_config__
    if config.tag_field is not None:
        body[config.tag_field] = config.tag
    return msgspec.convert(list(body.values()) if config.array_like else body, kind)


def _message(kind: Kind, content_type: str = _JSON) -> Json:
    shown = example(kind)
    message = {
        "name": name_of(kind),
        "summary": (kind.__doc__ or kind.__name__).strip().splitlines()[0],
        "contentType": content_type,
        "payload": {"$ref": f"#/components/schemas/{name_of(kind)}"},
        "examples": [{"name": "example", "payload": msgspec.to_builtins(shown)}],
    }
    if issubclass(kind, commands.Command):
        message["headers"] = {"$ref": "#/components/schemas/CommandHeaders"}
    return message


def _channel(address: str | None, description: str, kinds: Iterable[Kind]) -> Json:
    channel: Json = {
        "address": address,
        "description": description,
        "messages": {name_of(kind): {"$ref": f"#/components/messages/{name_of(kind)}"} for kind in kinds},
    }
    named = {name: {"description": text} for name, text in _PARAMETERS.items() if f"{{{name}}}" in (address or "")}
    if named:
        channel["parameters"] = named
    return channel


def _operation(action: str, channel: str, summary: str, kinds: Iterable[Kind]) -> Json:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "summary": summary,
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name_of(kind)}"} for kind in kinds],
    }


class _Book:
    """The document while it is written."""

    def __init__(self) -> None:
        self.channels: Json = {}
        self.operations: Json = {}
        self.messages: Json = {}
        self.kinds: dict[str, Kind] = {}

    def take(self, kinds: Iterable[Kind], content_type: str = _JSON) -> None:
        for kind in kinds:
            self.kinds[name_of(kind)] = kind
            self.messages[name_of(kind)] = _message(kind, content_type)

    def command(self, kind: type[commands.Command]) -> None:
        verb = str(kind.__struct_config__.tag)
        said = (kind.__doc__ or "").strip().splitlines()[0]
        self.take([kind])
        self.channels[f"cmd.{verb}"] = _channel(f"{_JOB}.cmd.{verb}.{{process}}", said, [kind])
        self.operations[f"take.{verb}"] = _operation("receive", f"cmd.{verb}", said, [kind])
        if verb in commands.OUTSIDE_VERBS:
            outside = f"cmd.{verb}.outside"
            self.channels[outside] = _channel(
                f"{_JOB}.cmd.{verb}", f"From anyone with the job's credentials: {said}", [kind]
            )
            self.operations[f"take.{verb}.outside"] = _operation("receive", outside, said, [kind])

    def event(self, kind: type[Event]) -> None:
        tag = str(kind.__struct_config__.tag)
        said = (kind.__doc__ or "").strip().splitlines()[0]
        self.take([kind])
        self.channels[f"event.{tag}"] = _channel(f"{_JOB}.event.{{model}}.{tag}", said, [kind])
        self.operations[f"say.{tag}"] = _operation("send", f"event.{tag}", said, [kind])

    def entry(self, kind: Kind) -> None:
        verb = str(kind.__struct_config__.tag)
        said = (kind.__doc__ or "").strip().splitlines()[0]
        self.take([kind])
        self.channels[f"rollout.{verb}"] = _channel(f"{_ROLLOUT}.{verb}", said, [kind])
        action = "receive" if verb in SDK_VERBS else "send"
        self.operations[f"append.{verb}"] = _operation(action, f"rollout.{verb}", said, [kind])

    def ask(
        self, name: str, address: str, question: Kind | None, answers: Iterable[Kind], content: str = _JSON
    ) -> None:
        """Add a question with its answers; no question means an empty body."""
        asked, said = ([question] if question is not None else []), list(answers)
        text = (said[0].__doc__ or "").strip().splitlines()[0]
        self.take(asked, content)
        self.take(said, content)
        self.channels[f"ask.{name}"] = _channel(address, f"Request and reply. The answer: {text}", asked)
        self.channels[f"answer.{name}"] = _channel(
            None, "The asker's inbox, named in the request's reply subject.", said
        )
        self.operations[f"answer.{name}"] = {
            **_operation("receive", f"ask.{name}", text, asked),
            "reply": {
                "channel": {"$ref": f"#/channels/answer.{name}"},
                "messages": [{"$ref": f"#/channels/answer.{name}/messages/{name_of(kind)}"} for kind in said],
            },
        }


def _fill(book: _Book) -> None:
    for command in COMMANDS:
        book.command(command)
    for event in EVENTS:
        book.event(event)
    no = queries.QueryError
    book.ask("open", f"{_JOB}.ask.open", queries.OpenAsk, [queries.JobOpened, no])
    book.ask("outcome", f"{_JOB}.ask.outcome", queries.OutcomeAsk, [queries.Outcome, no])
    book.ask("versions", f"{_JOB}.ask.versions", queries.ModelAsk, [queries.Versions, no])
    book.ask("replicas", f"{_JOB}.ask.replicas", queries.ModelAsk, [queries.Replicas, no])
    book.ask("status", f"{_JOB}.ask.status", None, [queries.Status, no])
    book.ask("forget", f"{_JOB}.ask.forget", None, [queries.JobForgotten, no])
    for role in ("registry", "planner"):
        book.ask(f"health.{role}", f"{_JOB}.ask.health.{role}", None, [queries.Health, no])
        book.ask(f"health.{role}.hub", f"{_HUB}.ask.health.{role}", None, [queries.Health, no])
    book.ask("story", f"{_JOB}.ask.story", queries.StoryAsk, [queries.Story, no])
    book.ask("plan", f"{_JOB}.ask.plan", plans.PlanRequest, [plans.Plan, plans.Refusal, no])
    book.ask("transfers", f"{_JOB}.ask.transfers", spans.TransfersAsk, [spans.Spans, no])
    book.ask("spans", f"{_JOB}.ask.spans", spans.SpansAsk, [spans.Spans, no])
    book.ask("activity", f"{_JOB}.ask.activity", None, [activity.Activity, no])
    book.ask("ping", f"{_HUB}.ask.ping.{{process}}", None, [queries.Pong])
    book.ask("folders", f"{_HUB}.ask.ping._folders", None, [queries.Pong])
    lease, digests = (f"{_HUB}.agent.{{agent}}.{what}.{{asker}}" for what in ("lease", "digests"))
    book.ask("lease", lease, leases.LeaseRequest, [leases.LeaseGrant, leases.LeaseRefusal], _MSGPACK)
    book.ask("digests", digests, leases.DigestsRequest, [leases.DigestsPage], _MSGPACK)
    book.take([heartbeat.Heartbeat])
    book.channels["beat"] = _channel(
        f"{_HUB}.beat.{{agent}}", "An agent lives, in all its jobs at once.", [heartbeat.Heartbeat]
    )
    book.operations["hear.beat"] = _operation("receive", "beat", "Note that an agent is alive.", [heartbeat.Heartbeat])
    book.messages["Outcomes"] = {
        "name": "Outcomes",
        "summary": "A command's whole group of events.",
        "contentType": _JSON,
        "payload": {"type": "array", "items": {"$ref": "#/components/schemas/AnyEvent"}},
    }
    book.channels["outcome.inbox"] = {
        "address": None,
        "description": "The inbox that a command's header `Tensorhub-Reply-To` names; only `_INBOX.` subjects.",
        "messages": {"Outcomes": {"$ref": "#/components/messages/Outcomes"}},
    }
    book.operations["say.outcome"] = {
        "action": "send",
        "channel": {"$ref": "#/channels/outcome.inbox"},
        "summary": "Send a command's outcome to the inbox that it named.",
        "messages": [{"$ref": "#/channels/outcome.inbox/messages/Outcomes"}],
    }
    book.messages["Chunk"] = {
        "name": "Chunk",
        "summary": "A part of a blob, compressed by itself with zstd.",
        "contentType": "application/zstd",
        "headers": {"type": "object", "properties": {"Tensorhub-Blob-Bytes": {"type": "string"}}},
        "payload": {"type": "string", "contentEncoding": "binary"},
    }
    book.channels["blob"] = _channel(f"{_JOB}.blob.{{digest}}.{{index}}", "Large things by digest: layouts.", [])
    book.channels["blob"]["messages"] = {"Chunk": {"$ref": "#/components/messages/Chunk"}}
    _fill_rollouts(book)


def _fill_rollouts(book: _Book) -> None:
    for kind in ENTRIES:
        book.entry(kind)
    between: dict[str, tuple[Kind, Kind]] = {
        "assign": (messages.AssignRequest, messages.AssignAnswer),
        "abort": (messages.AbortRequest, messages.AbortAnswer),
        "tokens": (messages.Frame, messages.FrameResult),
        "report": (messages.Report, messages.ReportResult),
        "beat": (messages.RunnerHeartbeat, messages.HeartbeatResult),
    }
    for what, (asked, answer) in between.items():
        book.ask(f"rollout.{what}", f"{_ROLLOUT}.{what}.{{runner}}", asked, [answer], _MSGPACK)
    asks: dict[str, tuple[Kind | None, Kind]] = {
        "follow": (questions.FollowQuestion, questions.FollowAnswer),
        "outcome": (questions.OutcomeQuestion, questions.OutcomeAnswer),
        "ready": (questions.ReadyQuestion, questions.ReadyAnswer),
        "seeding": (questions.SeedingQuestion, questions.SeedingAnswer),
        "status": (None, questions.RolloutStatus),
        "why": (questions.WhyQuestion, questions.WhyAnswer),
    }
    for what, (question, said) in asks.items():
        book.ask(f"rollout.{what}", f"{_ROLLOUT}.ask.{what}", question, [said, queries.QueryError])
    chunks = "Prompts and tokens of rollouts, by digest."
    book.channels["rollout.payload"] = _channel(f"{_ROLLOUT}.payload.{{digest}}.{{index}}", chunks, [])
    book.channels["rollout.payload"]["messages"] = {"Chunk": {"$ref": "#/components/messages/Chunk"}}


_COMMAND_HEADERS: Final[Json] = {
    "type": "object",
    "properties": {
        "Nats-Msg-Id": {"type": "string", "description": "A UUID; a repeat within the duplicate window is dropped."},
        "Tensorhub-Reply-To": {"type": "string", "description": "An `_INBOX.` subject that gets the outcome."},
        "traceparent": {"type": "string", "description": "W3C trace context; it goes over to the events."},
    },
}


def _dedented(schema: object) -> object:
    """Take the indentation of the source out of descriptions: they are docstrings, and Python 3.13 does so itself."""
    if isinstance(schema, dict):
        return {
            name: inspect.cleandoc(value) if name == "description" and isinstance(value, str) else _dedented(value)
            for name, value in schema.items()
        }
    return [_dedented(each) for each in schema] if isinstance(schema, list) else schema


def document() -> Json:
    """Return the whole document."""
    book = _Book()
    _fill(book)
    _, schemas = msgspec.json.schema_components(book.kinds.values(), ref_template="#/components/schemas/{name}")
    named = {f"{kind.__module__}.{kind.__qualname__}": name for name, kind in book.kinds.items()}
    # Of two structs of one name msgspec calls both by their modules.
    schemas = {named.get(name, name): _dedented(schema) for name, schema in schemas.items()}
    schemas["AnyEvent"] = {"oneOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in EVENTS]}
    schemas["CommandHeaders"] = _COMMAND_HEADERS
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "TensorHub",
            "version": str(commands.PROTOCOL),
            "description": "What stands on the bus. The states and flows behind it: docs/design/protocol/.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": _JSON,
        "servers": {"nats": {"host": "localhost:4222", "protocol": "nats", "description": "With JetStream."}},
        "channels": book.channels,
        "operations": book.operations,
        "components": {"schemas": dict(sorted(schemas.items())), "messages": dict(sorted(book.messages.items()))},
    }


def text() -> str:
    """Return the document as it stands in docs/reference/asyncapi.json."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
