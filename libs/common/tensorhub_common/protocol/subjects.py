"""Every NATS subject and stream name of the hub, and the rules for names in them.

All subjects are built in this module. Each token of a subject has been checked, so that no name from outside can widen
into a wildcard or reach another job's subjects. `parse_subject` is the inverse of the functions that build subjects,
and accepts exactly their results.

    tensorhub.v1.<job>.cmd.<verb>[.<agent>]          in the job's log
    tensorhub.v1.<job>.event.<model>.<noun>.<what>   in the job's log
    tensorhub.v1.<job>.blob.<digest>.<i>             in the job's blob stream
    tensorhub.v1.<job>.snapshot.<digest>.<i>         in the job's snapshot stream
    tensorhub.v1.<job>.snapshot.index                in the job's snapshot stream: the list of snapshots
    tensorhub.v1.<job>.ask.<what>                    request and reply: the registry or the planner answers
    tensorhub.v1.<job>.rollout.<verb>                in the job's rollout log
    tensorhub.v1.<job>.rollout.payload.<digest>.<i>  in the job's payload stream
    tensorhub.v1.<job>.rollout.snapshot.<digest>.<i> in the job's payload stream: of the fold of the rollout log
    tensorhub.v1.<job>.rollout.snapshot.index        in the job's payload stream: the list of these snapshots
    tensorhub.v1.<job>.rollout.<message>.<runner>    request and reply: between the rollout manager and that runner
    tensorhub.v1.<job>.rollout.ask.<what>            request and reply: the job's rollout manager answers
    tensorhub.v1._hub.ask.<what>                     the same, of the hub as a whole
    tensorhub.v1._hub.agent.<agent>.<what>.<asker>   request and reply: that agent answers, and knows which one asks
    tensorhub.v1._hub.beat.<agent>                   an agent lives

Names of jobs, models, replicas, agents, runners and sites are subject tokens. A name with a character other than
letters, digits, `_` and `-` is refused before it reaches NATS. Names that begin with `_` are reserved for the hub.
"""

import re
from typing import Final

import msgspec

from tensorhub_common.errors import InvalidName

NAME_CHARS_MAX: Final = 64
_CACHE: Final = re.compile(r"_cache-(0|[1-9][0-9]{0,15})-[0-9]{1,20}", re.ASCII)
_NAME: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{NAME_CHARS_MAX}}}", re.ASCII)


def is_name(text: object) -> bool:
    """Tell whether `text` is valid in a subject, the hub's own names included."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def cache_name(version: int, seq: int) -> str:
    """Return the name of the cache replica of a version that was placed by the command at `seq`: used once."""
    return f"_cache-{version}-{seq}"


def cached_version(replica: str) -> int | None:
    """Return the version that a cache replica is for, or None for any other replica."""
    found = _CACHE.fullmatch(replica)
    return None if found is None else int(found[1])


def check_name(what: str, text: object) -> str:
    """Return `text` if users may call a `what` ("model", "replica") so; raise `InvalidName` otherwise."""
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        raise InvalidName(
            f"{what} name {text!r:.80} can't be used: take 1 to {NAME_CHARS_MAX} letters, digits, '_' or '-'"
        )
    if text.startswith("_"):
        raise InvalidName(f"{what} name {text!r} begins with '_', which is kept for the hub itself: choose another")
    return text


PREFIX: Final = "tensorhub.v1"
HUB: Final = "_hub"
"""The job token of what belongs to the hub as a whole, and the model token of what belongs to no model."""
REGISTRY: Final = "_registry"
"""The sender token of a registry's commands; no agent can have this name."""

INBOX: Final = "_INBOX"
"""The first token of all inboxes."""
INBOX_CHARS_MAX: Final = 512

LOG_STREAM_PREFIX: Final = "TENSORHUB_"
BLOB_STREAM_PREFIX: Final = "TENSORHUB_BLOBS_"
SNAPSHOT_STREAM_PREFIX: Final = "TENSORHUB_SNAPSHOTS_"
ROLLOUT_STREAM_PREFIX: Final = "TENSORHUB_ROLLOUTS_"
PAYLOAD_STREAM_PREFIX: Final = "TENSORHUB_PAYLOADS_"
_TAKEN: Final = ("BLOBS_", "SNAPSHOTS_", "ROLLOUTS_", "PAYLOADS_")
"""How no job's name may begin: its log would be called as another stream of another job."""

SDK_VERBS: Final = ("attach", "submit", "cancel", "done")
"""The entries of a job's rollout log that its trainer appends."""
MANAGER_VERBS: Final = ("lead", "checkpoint", "end", "scale")
"""The entries that the rollout manager appends."""
ROLLOUT_VERBS: Final = (*SDK_VERBS, *MANAGER_VERBS)
MANAGER_MESSAGES: Final = ("assign", "abort")
"""What the rollout manager asks a runner for."""
RUNNER_MESSAGES: Final = ("tokens", "report", "beat")
"""What a runner tells the rollout manager."""
LOCAL_RUNNER: Final = "trainer"
"""The instance that a trainer's own engine is while it seeds: one of a job, which a client may speak as."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)


class CommandSubject(msgspec.Struct, frozen=True):
    """What the subject of a command says. `agent` is the process that alone may publish on it, or None: anyone."""

    job: str
    verb: str
    agent: str | None = None


class EventSubject(msgspec.Struct, frozen=True):
    """What the subject of an event says."""

    job: str
    model: str
    noun: str
    what: str


class BlobSubject(msgspec.Struct, frozen=True):
    """What the subject of one chunk of a blob says."""

    job: str
    digest: str
    index: int


class SnapshotSubject(msgspec.Struct, frozen=True):
    """What the subject of one part of a snapshot says; without a digest it is the index of all."""

    job: str
    digest: str | None = None
    index: int = 0


class RolloutEntrySubject(msgspec.Struct, frozen=True):
    """What the subject of an entry of the rollout log says."""

    job: str
    verb: str


class PayloadSubject(msgspec.Struct, frozen=True):
    """What the subject of one chunk of a payload says."""

    job: str
    digest: str
    index: int


class RolloutSnapshotSubject(msgspec.Struct, frozen=True):
    """The same as `SnapshotSubject`, of a snapshot of the rollout log's fold."""

    job: str
    digest: str | None = None
    index: int = 0


class RunnerSubject(msgspec.Struct, frozen=True):
    """What the subject of a message between the rollout manager and a runner says. `what` is "assign" or "tokens"."""

    job: str
    what: str
    runner: str


class RolloutAskSubject(msgspec.Struct, frozen=True):
    """What the subject of a question to the job's rollout manager says."""

    job: str
    what: str


class AskSubject(msgspec.Struct, frozen=True):
    """What the subject of a question says. `job` is None where the hub as a whole is asked."""

    job: str | None
    what: str


class AgentAskSubject(msgspec.Struct, frozen=True):
    """What the subject of a question to one agent says. `asker` is the agent that alone may publish on it."""

    agent: str
    what: str
    asker: str


class BeatSubject(msgspec.Struct, frozen=True):
    """What the subject of a beat says."""

    agent: str


RolloutSubject = RolloutEntrySubject | PayloadSubject | RolloutSnapshotSubject | RunnerSubject | RolloutAskSubject
Subject = (
    CommandSubject
    | EventSubject
    | BlobSubject
    | SnapshotSubject
    | AskSubject
    | AgentAskSubject
    | BeatSubject
    | RolloutSubject
)


def command_subject(job: str, verb: str, agent: str | None = None) -> str:
    """Return the subject of a command; with `agent`, the one on which that process alone may publish."""
    subject = f"{_job(job)}.cmd.{_token('verb', verb)}"
    return subject if agent is None else f"{subject}.{check_name('agent', agent)}"


def registry_command_subject(job: str, verb: str) -> str:
    """Return the subject of a registry's own command, on which no agent may publish."""
    return f"{command_subject(job, verb)}.{REGISTRY}"


def commands_of(job: str) -> str:
    """Return the wildcard over all commands of a job."""
    return f"{_job(job)}.cmd.>"


def commands_by_anyone(job: str) -> str:
    """Return the wildcard over a job's commands that no single process is the sender of."""
    return f"{_job(job)}.cmd.*"


def commands_of_all_jobs_by_anyone() -> str:
    """Return the same, of every job."""
    return f"{PREFIX}.*.cmd.*"


def commands_of_all_jobs_to(verb: str) -> str:
    """Return the subjects of one verb in every job, for who is no agent."""
    return f"{PREFIX}.*.cmd.{_token('verb', verb)}"


def commands_of_all_jobs_by(process: str) -> str:
    """Return the wildcard over what one agent, or the registries, may command in every job."""
    return f"{PREFIX}.*.cmd.*.{process if process == REGISTRY else check_name('agent', process)}"


def event(job: str, model: str, noun: str, what: str) -> str:
    """Return the subject of an event; `model` is `HUB` where the event belongs to no model."""
    token = model if model == HUB else check_name("model", model)
    return f"{_job(job)}.event.{token}.{_token('noun', noun)}.{_token('event', what)}"


def events_of(job: str, model: str | None = None) -> str:
    """Return the wildcard over all events of a job, or of one of its models."""
    if model is None:
        return f"{_job(job)}.event.>"
    return f"{_job(job)}.event.{check_name('model', model)}.>"


def events_of_all_jobs() -> str:
    """Return the wildcard over all events there are."""
    return f"{PREFIX}.*.event.>"


def blob(job: str, digest: str, index: int) -> str:
    """Return the subject of chunk number `index` of the blob with this digest."""
    return f"{_job(job)}.blob.{check_digest(digest)}.{index:d}"


def blobs_of(job: str) -> str:
    """Return the wildcard over all chunks of all blobs of a job."""
    return f"{_job(job)}.blob.>"


def blobs_of_all_jobs() -> str:
    """Return the wildcard over all chunks of all blobs there are."""
    return f"{PREFIX}.*.blob.>"


def snapshot(job: str, digest: str, index: int) -> str:
    """Return the subject of part number `index` of the snapshot with this digest."""
    return f"{_job(job)}.snapshot.{check_digest(digest)}.{index:d}"


def snapshot_index(job: str) -> str:
    """Return the subject of the word that says which snapshots a job has."""
    return f"{_job(job)}.snapshot.index"


def snapshots_of(job: str) -> str:
    """Return the wildcard over all that is kept of a job's snapshots."""
    return f"{_job(job)}.snapshot.>"


def snapshots_of_all_jobs() -> str:
    """Return the wildcard over what is kept of the snapshots of every job."""
    return f"{PREFIX}.*.snapshot.>"


def rollout_entry(job: str, verb: str) -> str:
    """Return the subject of an entry of the job's rollout log. Raises `InvalidName` for another verb than theirs."""
    return f"{_rollout(job)}.{_one_of('entry', verb, ROLLOUT_VERBS)}"


def rollout_entries_of(job: str) -> str:
    """Return the wildcard over all entries of a job's rollout log."""
    return f"{_rollout(job)}.*"


def rollout_entries_of_all_jobs(verb: str) -> str:
    """Return the wildcard over the entries with this verb in the rollout log of every job."""
    return f"{PREFIX}.*.rollout.{_one_of('entry', verb, ROLLOUT_VERBS)}"


def payload(job: str, digest: str, index: int) -> str:
    """Return the subject of chunk number `index` of the payload with this digest."""
    return f"{_rollout(job)}.payload.{check_digest(digest)}.{index:d}"


def chunks_of_payload(job: str, digest: str) -> str:
    """Return the wildcard over all chunks of one payload."""
    return f"{_rollout(job)}.payload.{check_digest(digest)}.*"


def first_chunks_of_payloads(job: str) -> str:
    """Return the wildcard over the first chunk of each payload of a job."""
    return f"{_rollout(job)}.payload.*.0"


def payloads_of(job: str) -> str:
    """Return the wildcard over all chunks of all payloads of a job."""
    return f"{_rollout(job)}.payload.>"


def payloads_of_all_jobs() -> str:
    """Return the wildcard over all chunks of all payloads there are."""
    return f"{PREFIX}.*.rollout.payload.>"


def rollout_snapshot(job: str, digest: str, index: int) -> str:
    """Return the subject of part number `index` of the snapshot of the rollout log with this digest."""
    return f"{_rollout(job)}.snapshot.{check_digest(digest)}.{index:d}"


def rollout_snapshot_index(job: str) -> str:
    """Return the subject of the word that says which snapshots there are of a job's rollout log."""
    return f"{_rollout(job)}.snapshot.index"


def rollout_snapshots_of(job: str) -> str:
    """Return the wildcard over all that is kept of the snapshots of a job's rollout log."""
    return f"{_rollout(job)}.snapshot.>"


def rollout_snapshots_of_all_jobs() -> str:
    """Return the wildcard over what is kept of the snapshots of the rollout log of every job."""
    return f"{PREFIX}.*.rollout.snapshot.>"


def to_runner(job: str, what: str, runner: str) -> str:
    """Return the subject on which the rollout manager asks a runner of the job: "assign" or "abort"."""
    return f"{_rollout(job)}.{_one_of('message', what, MANAGER_MESSAGES)}.{check_name('runner', runner)}"


def to_runners_of_all_jobs(what: str, runner: str | None = None) -> str:
    """Return the wildcard over what the rollout manager asks one runner, or any, in every job."""
    token = "*" if runner is None else check_name("runner", runner)
    return f"{PREFIX}.*.rollout.{_one_of('message', what, MANAGER_MESSAGES)}.{token}"


def from_runner(job: str, what: str, runner: str) -> str:
    """Return the subject on which a runner of the job speaks: "tokens", "report" or "beat"."""
    return f"{_rollout(job)}.{_one_of('message', what, RUNNER_MESSAGES)}.{check_name('runner', runner)}"


def from_runners_of(job: str, what: str) -> str:
    """Return the wildcard under which a job's rollout manager hears all runners of the job."""
    return f"{_rollout(job)}.{_one_of('message', what, RUNNER_MESSAGES)}.*"


def from_runners_of_all_jobs(what: str, runner: str | None = None) -> str:
    """Return the wildcard over what one runner, or any, says in every job."""
    token = "*" if runner is None else check_name("runner", runner)
    return f"{PREFIX}.*.rollout.{_one_of('message', what, RUNNER_MESSAGES)}.{token}"


def rollout_ask(job: str, what: str) -> str:
    """Return the subject of a question to the job's rollout manager."""
    return f"{_rollout(job)}.ask.{_token('question', what)}"


def rollout_asks_of_all_jobs(what: str) -> str:
    """Return the wildcard over one question to the rollout manager of every job."""
    return f"{PREFIX}.*.rollout.ask.{_token('question', what)}"


def query_subject(job: str, what: str) -> str:
    """Return the subject of a question about a job; `what` is one name or several with dots between."""
    return f"{_job(job)}.ask.{_dotted(what)}"


def asks_of_all_jobs(what: str) -> str:
    """Return the wildcard under which one service answers `ask(job, what)` for every job."""
    return f"{PREFIX}.*.ask.{_dotted(what)}"


def hub_ask(what: str) -> str:
    """Return the subject of a question to the hub as a whole."""
    return f"{PREFIX}.{HUB}.ask.{_dotted(what)}"


def ping(process: str) -> str:
    """Return the subject on which the process with this id answers that it lives."""
    return hub_ask(f"ping.{check_name('process', process)}")


def log_followers() -> str:
    """Return the subject on which every registry and planner answers what it is. No process has that name."""
    return hub_ask("ping") + "._folders"


def pings() -> str:
    """Return the wildcard over the pings of all processes."""
    return hub_ask("ping") + ".*"


def agent_ask(agent: str, what: str, asker: str) -> str:
    """Return the subject on which one agent asks another; `asker` alone may publish on it."""
    return f"{PREFIX}.{HUB}.agent.{check_name('agent', agent)}.{_token('question', what)}.{check_name('agent', asker)}"


def agent_asks(agent: str, what: str) -> str:
    """Return the wildcard under which an agent answers one question from any sender."""
    return f"{PREFIX}.{HUB}.agent.{check_name('agent', agent)}.{_token('question', what)}.*"


def asks_to_agent(agent: str) -> str:
    """Return the wildcard over all questions to an agent."""
    return f"{PREFIX}.{HUB}.agent.{check_name('agent', agent)}.*.*"


def asks_by_agent(asker: str) -> str:
    """Return the wildcard over all questions of an agent to others."""
    return f"{PREFIX}.{HUB}.agent.*.*.{check_name('agent', asker)}"


def beat(agent: str) -> str:
    """Return the subject of an agent's beats."""
    return f"{PREFIX}.{HUB}.beat.{check_name('agent', agent)}"


def beats() -> str:
    """Return the wildcard over the beats of all agents."""
    return f"{PREFIX}.{HUB}.beat.*"


def is_inbox(subject: str) -> bool:
    """Tell whether an answer may be sent there: only to inboxes, so that no request redirects it."""
    if not subject.startswith(f"{INBOX}.") or len(subject) > INBOX_CHARS_MAX:
        return False
    if not subject.isascii() or not subject.isprintable() or any(c in subject for c in " *>"):
        return False
    return all(subject.split("."))


def log_stream(job: str) -> str:
    """Return the name of the stream that is the job's log."""
    return f"{LOG_STREAM_PREFIX}{check_job(job)}"


def blob_stream(job: str) -> str:
    """Return the name of the stream that holds the job's blobs."""
    return f"{BLOB_STREAM_PREFIX}{check_job(job)}"


def snapshot_stream(job: str) -> str:
    """Return the name of the stream that holds the job's snapshots."""
    return f"{SNAPSHOT_STREAM_PREFIX}{check_job(job)}"


def rollout_stream(job: str) -> str:
    """Return the name of the stream that is the log of the job's rollouts."""
    return f"{ROLLOUT_STREAM_PREFIX}{check_job(job)}"


def payload_stream(job: str) -> str:
    """Return the name of the stream that holds the payloads of the job's rollouts, and the snapshots of their log."""
    return f"{PAYLOAD_STREAM_PREFIX}{check_job(job)}"


def job_of_log(stream: str) -> str | None:
    """Return the job whose log this stream is, or None when it is something else."""
    job = stream.removeprefix(LOG_STREAM_PREFIX)
    if job == stream or job.startswith((*_TAKEN, "_")) or not is_name(job):
        return None
    return job


def check_job(job: str) -> str:
    """Return `job` if a job may be called so; raise `InvalidName` otherwise."""
    if check_name("job", job).startswith(_TAKEN):
        taken = next(beginning for beginning in _TAKEN if job.startswith(beginning))
        raise InvalidName(f"job name {job!r} begins with {taken!r}, which names a stream of the hub: choose another")
    return job


def check_digest(digest: str) -> str:
    """Return `digest` if it is 64 lower-case hexadecimal digits; raise `InvalidName` otherwise."""
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidName(f"{digest!r:.80} is no digest: take the 64 lower-case hexadecimal digits that `put` returned")
    return digest


def parse_subject(subject: str) -> Subject:
    """Say what a subject means. Raises `InvalidName` for what the functions above can't have made."""
    root = f"{PREFIX}."
    if subject.startswith(root):
        job, _, rest = subject.removeprefix(root).partition(".")
        match rest.split("."):
            case ["agent", agent, what, asker] if job == HUB:
                return AgentAskSubject(check_name("agent", agent), _token("question", what), check_name("agent", asker))
            case ["beat", agent] if job == HUB:
                return BeatSubject(check_name("agent", agent))
            case ["ask", *what]:
                return AskSubject(None if job == HUB else check_job(job), _dotted(".".join(what)))
            case ["cmd", verb]:
                return CommandSubject(check_job(job), _token("verb", verb))
            case ["cmd", verb, agent]:
                return CommandSubject(check_job(job), _token("verb", verb), check_name("agent", agent))
            case ["event", model, noun, what]:
                token = model if model == HUB else check_name("model", model)
                return EventSubject(check_job(job), token, _token("noun", noun), _token("event", what))
            case ["rollout", *tokens] if (found := _rollout_subject_of(job, tokens)) is not None:
                return found
            case [*stored] if (part := _part_of(job, stored)) is not None:
                return part
    raise InvalidName(f"{subject!r:.200} is no subject of the hub: they begin with {root!r} and a job's name")


def _part_of(job: str, tokens: list[str]) -> BlobSubject | SnapshotSubject | None:
    match tokens:
        case ["blob", digest, index] if _INDEX.fullmatch(index):
            return BlobSubject(check_job(job), check_digest(digest), int(index))
        case ["snapshot", digest, index] if _INDEX.fullmatch(index):
            return SnapshotSubject(check_job(job), check_digest(digest), int(index))
        case ["snapshot", "index"]:
            return SnapshotSubject(check_job(job))
    return None


def _rollout_subject_of(job: str, tokens: list[str]) -> RolloutSubject | None:
    match tokens:
        case [verb] if verb in ROLLOUT_VERBS:
            return RolloutEntrySubject(check_job(job), verb)
        case ["payload", digest, index] if _INDEX.fullmatch(index):
            return PayloadSubject(check_job(job), check_digest(digest), int(index))
        case ["snapshot", digest, index] if _INDEX.fullmatch(index):
            return RolloutSnapshotSubject(check_job(job), check_digest(digest), int(index))
        case ["snapshot", "index"]:
            return RolloutSnapshotSubject(check_job(job))
        case ["ask", what]:
            return RolloutAskSubject(check_job(job), _token("question", what))
        case [what, runner] if what in MANAGER_MESSAGES or what in RUNNER_MESSAGES:
            return RunnerSubject(check_job(job), what, check_name("runner", runner))
    return None


def _job(job: str) -> str:
    return f"{PREFIX}.{check_job(job)}"


def _rollout(job: str) -> str:
    return f"{_job(job)}.rollout"


def _one_of(what: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise InvalidName(f"{text!r:.80} is no {what} of rollouts: take {', '.join(known)}")
    return text


def _token(what: str, text: str) -> str:
    if not is_name(text):
        raise InvalidName(f"{what} {text!r:.80} is not valid in a subject: take letters, digits, '_' or '-'")
    return text


def _dotted(what: str) -> str:
    for token in what.split("."):
        _token("question", token)
    return what
