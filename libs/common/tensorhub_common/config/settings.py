"""Every `TENSORHUB_*` environment variable: its name, default, unit and meaning, in one table.

The table is the class `Settings` itself: a field is a variable (`beat_s` is `TENSORHUB_BEAT_S`) and carries its parser,
its default and what docs/operate/settings.md says of it. So no setting can be parsed and not documented, or the other
way round.

Always true of loaded settings: each value passed its parser, also a default, which is written as a user would write it.
"""

import difflib
import re
import socket
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args

from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.config import parsers as values
from tensorhub_common.config.parsers import RunnerInstall
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.plans import SHARES_MAX
from tensorhub_common.protocol.rollout.entries import ArrivalTerm

PREFIX: Final = "TENSORHUB_"
HOST_CHARS_MAX: Final = 48
"""The real host name is cut to this, so that names made from it stay within `NAME_CHARS_MAX`."""

BEATS_MISSED: Final = 6
"""By default an agent is lost once it has not said so often that it lives."""

UNKNOWN_NAMED_MAX: Final = 8
"""A warning names this many variables that are no settings."""

NEAR: Final = 0.8
"""How alike (0 to 1) two names must be for the one to be taken for a slip of the other."""

_OF_OTHERS: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT(_\d+_\w+)?)$")
_VARIABLE: Final = "variable"

Value = TypeVar("Value")


class InvalidSetting(TensorHubError):
    """An environment variable holds what it can't hold; the message names it and gives an example."""

    __module__ = "tensorhub"


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table. `default` is text as in the environment; `$OTHER` is the value of another variable."""

    parse: Callable[[str], object]
    default: str
    unit: str
    example: str
    meaning: str
    secret: bool


def _variable(
    parse: Callable[[str], Value], default: str, *, unit: str, example: str, meaning: str, secret: bool = False
) -> Value:
    """Make a field of `Settings`. The result type is the parser's, so mypy compares it with the field's annotation."""
    row = Variable(parse=parse, default=default, unit=unit, example=example, meaning=meaning, secret=secret)
    return cast("Value", field(metadata={_VARIABLE: row}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A process's configuration, from its environment. Make it with `load`; a default may refer to fields above it."""

    nats: str | None = _variable(
        values.nats_urls,
        "",
        unit="URLs",
        example="nats://127.0.0.1:4222",
        meaning="The NATS server, or several nodes of a cluster with commas between. Without it: `hub.json` in "
        "`TENSORHUB_DIR`.",
        secret=True,
    )
    credentials: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/etc/tensorhub/agent-0.nk",
        meaning="File with the credentials for NATS: a key of `tensorhub credentials`, `.creds`, or user:password.",
    )
    worker_credentials: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/etc/tensorhub/client.nk",
        meaning="The credentials that an agent names to its workers, which use them where they are given none.",
    )
    nats_ca: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/etc/tensorhub/ca.pem",
        meaning="Whom to believe that a server is our NATS. With it, nothing is said to a server that has no TLS.",
    )
    nats_certificate: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/etc/tensorhub/agent.pem",
        meaning="The certificate that this process shows to NATS, where the server asks for one.",
    )
    nats_key: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/etc/tensorhub/agent.key",
        meaning="The private key of that certificate.",
    )
    dir: Path = _variable(
        values.path,
        ".tensorhub",
        unit="path",
        example="/var/lib/tensorhub",
        meaning="Where `tensorhub up` keeps its state and writes `hub.json`, and where commands look for it.",
    )
    job: str = _variable(
        values.name("job"),
        "default",
        unit="name",
        example="run-7",
        meaning="The job that `connect()` and the commands speak of.",
    )
    host: str = _variable(
        values.name("host"),
        "$HOSTNAME",
        unit="name",
        example="node-12",
        meaning="The host that this process pretends to be on. By default the real host name, made a valid name.",
    )
    site: str = _variable(
        values.name("site"),
        "site-0",
        unit="name",
        example="berlin",
        meaning="The datacenter of this host.",
    )
    rack: str = _variable(
        values.optional_name("rack"),
        "",
        unit="name",
        example="r07",
        meaning="The rack of this host; hosts of one rack are nearer to each other. By default none is known,"
        " and all hosts of a site are equally near. Set it once all registries and planners know of racks.",
    )
    agent: str | None = _variable(
        values.agent_name_or_socket,
        "",
        unit="name or path",
        example="node-12-0",
        meaning="The agent that the SDK uses, by id or socket. By default the first on this host.",
    )
    agent_id: str = _variable(
        values.name("agent"),
        "$TENSORHUB_HOST-0",
        unit="name",
        example="node-12-0",
        meaning="What an agent calls itself, a name of its own in the whole hub. A host has one, or one for each GPU.",
    )
    socket: Path = _variable(
        values.path,
        "$TENSORHUB_DIR/$TENSORHUB_AGENT_ID.sock",
        unit="path",
        example="/run/tensorhub/node-12-0.sock",
        meaning="The Unix socket on which an agent serves the workers of its host.",
    )
    state_dir: Path = _variable(
        values.path,
        "$TENSORHUB_DIR/$TENSORHUB_AGENT_ID",
        unit="path",
        example="/var/lib/tensorhub/node-12-0",
        meaning="What an agent keeps through a restart: its incarnation and the manifests of its segments.",
    )
    shm_dir: Path = _variable(
        values.path,
        "/dev/shm",  # noqa: S108 (shared memory has this one place on Linux)
        unit="path",
        example="/dev/shm",  # noqa: S108
        meaning="The memory file system that holds the segments.",
    )
    memory_bytes_max: int = _variable(
        values.byte_count(0),
        "0",
        unit="bytes",
        example="64GiB",
        meaning="How much memory an agent's segments may take together. 0: 80 % of what the file system has.",
    )
    device_bytes_max: int = _variable(
        values.byte_count(0),
        "0",
        unit="bytes",
        example="40GiB",
        meaning="How much memory of each GPU an agent's segments may take together. 0: 90 % of what the GPU has.",
    )
    cache_bytes: int = _variable(
        values.byte_count(0),
        "4GiB",
        unit="bytes",
        example="64GiB",
        meaning="How many bytes of copies of retained versions an agent takes in, within its memory. 0: none.",
    )
    cache_disk_bytes: int = _variable(
        values.byte_count(0),
        "0",
        unit="bytes",
        example="500GiB",
        meaning="How many bytes of them it keeps beyond that in files, in `copies` of its state folder. 0: none.",
    )
    encodings: bool = _variable(
        values.switch,
        "on",
        unit="on, off",
        example="off",
        meaning="Whether the reads of this agent take deltas and packed pieces where these should come sooner"
        " (docs/design/encodings.md). Off: every piece comes as it is.",
    )
    deltas: int = _variable(
        values.count,
        "0",
        unit="versions",
        example="4",
        meaning="For how many versions back an agent keeps exact deltas of what it publishes. Costs one more copy of it"
        " in the host's memory, and pays over lines below some 10 Gbit/s (docs/design/encodings.md). 0: it makes none.",
    )
    delta_bytes: int = _variable(
        values.byte_count(0),
        "1GiB",
        unit="bytes",
        example="16GiB",
        meaning="How many bytes of deltas an agent keeps, made or applied, to serve them to others.",
    )
    address: str | None = _variable(
        values.optional_ip,
        "",
        unit="IP",
        example="10.0.0.12",
        meaning="Where agents of other hosts reach this one. By default the IP from which it reaches NATS.",
    )
    ucxx: bool = _variable(
        values.switch,
        "on",
        unit="on, off",
        example="off",
        meaning="Whether an agent loads UCX, which brings bytes between hosts. UCX's own `UCX_*` variables hold.",
    )
    pipelining: bool = _variable(
        values.switch,
        "on",
        unit="on, off",
        example="off",
        meaning="Whether the planner names half-filled replicas as sources, so that readers form chains.",
    )
    wan_streams: int = _variable(
        values.count_between(1, SHARES_MAX),
        "8",
        unit="streams",
        example="16",
        meaning="The number of connections that bring one shard to another site, shared by its replicas there.",
    )
    copy_threads: int = _variable(
        values.count,
        "0",
        unit="threads",
        example="4",
        meaning="Threads with which an agent copies and hashes. 0: the number of cores, at most 4.",
    )
    window_bytes: int = _variable(
        values.byte_count(1 << 20),
        "64MiB",
        unit="bytes",
        example="256MiB",
        meaning="How much of one read is in flight at a time, shared by its sources; each has two batches in any case.",
    )
    digests: bool = _variable(
        values.switch,
        "on",
        unit="on, off",
        example="off",
        meaning="Whether pieces are digested. Off: each piece needs the source's word that its lease still held.",
    )
    beat_s: float = _variable(
        values.seconds(0, above=True),
        "0.5",
        unit="s",
        example="0.5",
        meaning="How often an agent says that it lives.",
    )
    lost_after_s: float = _variable(
        values.seconds(0, above=True),
        "3.0",
        unit="s",
        example="10",
        meaning="An agent silent for this long is lost. Must be longer than `TENSORHUB_BEAT_S`.",
    )
    leader_ttl_s: float = _variable(
        values.seconds(1),
        "2.0",
        unit="s",
        example="5",
        meaning="How long the lease of the leading registry lasts. NATS counts leases in seconds, so at least 1.",
    )
    stall_s: float = _variable(
        values.seconds(0, above=True),
        "5.0",
        unit="s",
        example="2",
        meaning="A source without progress for this long is left out of the read. One that was fast is left sooner.",
    )
    slow_read_s: float = _variable(
        values.seconds(0),
        "2.0",
        unit="s",
        example="10",
        meaning="A read of a shard that takes longer than this, and a second for each 100 MB on top, is logged as slow "
        "by its agent.",
    )
    refill_drain_s: float = _variable(
        values.seconds(0),
        "0.0",
        unit="s",
        example="1.5",
        meaning="How long a refill waits for readers of what it overwrites. 0: leases are broken at once.",
    )
    sources_lost_s: float = _variable(
        values.seconds(0),
        "1.2",
        unit="s",
        example="3",
        meaning="How long a read without a source goes on where no planner can say whether the log counts a holder.",
    )
    log_level: values.LogLevel = _variable(
        values.log_level,
        "info",
        unit="debug, info, warning, error",
        example="debug",
        meaning="The least severe log lines that are written.",
    )
    log_format: values.LogFormat = _variable(
        values.log_format,
        "console",
        unit="console, json",
        example="json",
        meaning="Log lines for people, or one JSON object a line.",
    )
    metrics: values.Listen | None = _variable(
        values.listen,
        "",
        unit="port or address:port",
        example="127.0.0.1:9464",
        meaning="Where a service shows its metrics to Prometheus. A port alone: for this machine; 0: a free one.",
    )
    spans_bytes_max: int = _variable(
        values.byte_count(64 << 10),
        "16MiB",
        unit="bytes",
        example="64MiB",
        meaning="How much of its finished spans a service keeps on disk, for `tensorhub trace`.",
    )
    registry_id: str = _variable(
        values.name("registry"),
        "registry-0",
        unit="name",
        example="registry-1",
        meaning="What a registry calls itself. Several may run, each with a name of its own.",
    )
    log_replicas: int = _variable(
        values.replicas,
        "1",
        unit="1, 3, 5",
        example="3",
        meaning="On how many nodes NATS keeps each log, snapshot and lease that a registry makes. 3 needs a cluster.",
    )
    new_job_level: int | None = _variable(
        values.optional_count,
        "",
        unit="level",
        example="0",
        meaning="The level at which a registry lets new jobs begin, at most; empty: the newest that all registries and "
        "planners know. 0 while one of a release before levels runs, or may be gone back to.",
    )
    planner_id: str = _variable(
        values.name("planner"),
        "planner-0",
        unit="name",
        example="planner-1",
        meaning="What a planner calls itself. Several may run, each with a name of its own.",
    )
    rollout_id: str = _variable(
        values.name("rollout manager"),
        "rollout-0",
        unit="name",
        example="rollout-1",
        meaning="What a rollout manager calls itself. Several may run, each with a name of its own.",
    )
    rollout_scale_window_s: float = _variable(
        values.seconds(1),
        "120",
        unit="seconds",
        example="600",
        meaning="A rollout manager wishes for fewer instances only once no more were needed for so long, or for two "
        "steps of the trainer where those are longer.",
    )
    rollout_terms_off: frozenset[ArrivalTerm] = _variable(
        values.arrival_terms,
        "",
        unit=", ".join(get_args(ArrivalTerm)),
        example="admission,migration",
        meaning="Terms of the policy `arrival` that a rollout manager does without, with commas between: `activation` "
        "(an instance stays on its version while requests may begin on it, and much runs), `admission` "
        "(requests wait for a version that arrives soon), `migration` (they move to an instance that is done sooner), "
        "`retention` (the hub holds versions that requests are for alone; with every policy), "
        "`seeding` (it says when a trainer's own engine has generated enough).",
    )
    runner_id: str = _variable(
        values.name("runner"),
        "$TENSORHUB_HOST-runner",
        unit="name",
        example="node-12-runner-0",
        meaning="What a runner calls itself. One runner beside each engine, each with a name of its own in the hub.",
    )
    runner_replica: str = _variable(
        values.optional_name("replica"),
        "",
        unit="name",
        example="runner-0",
        meaning="The replica that a runner's engine is. By default the runner's own name.",
    )
    runner_engine: str = _variable(
        values.engine,
        "torch",
        unit="torch, vllm, sglang, or module:function",
        example="my_engine:load",
        meaning="The engine of a runner: that of this package, vLLM at TENSORHUB_RUNNER_URL or else in the "
        "runner's process, or a function that takes the settings and returns one.",
    )
    runner_model: Path | None = _variable(
        values.optional_path,
        "",
        unit="path",
        example="/models/policy",
        meaning="The folder with the `config.json` of a runner's model, as Hugging Face writes it. Its weights come "
        "through the hub.",
    )
    runner_hub_model: str = _variable(
        values.name("model"),
        "policy",
        unit="name",
        example="policy",
        meaning="The model of the hub whose versions a runner follows.",
    )
    runner_spot: bool = _variable(
        values.switch,
        "off",
        unit="on, off",
        example="on",
        meaning="Whether a runner's machine may be taken away at any moment. SIGUSR1 tells the runner that it will be.",
    )
    runner_install: RunnerInstall = _variable(
        values.runner_install,
        "staged",
        unit="staged, mapped",
        example="mapped",
        meaning="How a runner's engine gets weights: into memory of its own beside those in use, or mapped from a "
        "holder on its host.",
    )
    runner_slots: int = _variable(
        values.count_between(1, 4096),
        "16",
        unit="requests",
        example="64",
        meaning="How many requests a runner's engine runs at once.",
    )
    runner_device: str = _variable(
        values.device,
        "cpu",
        unit="cpu, cuda, cuda:N",
        example="cuda",
        meaning="What the torch engine computes on. On a GPU it is in fast mode alone.",
    )
    runner_url: str = _variable(
        values.loopback_url,
        "",
        unit="address",
        example="http://127.0.0.1:8000",
        meaning="The server that generates, where TENSORHUB_RUNNER_ENGINE is one. It is on this host.",
    )
    runner_vllm_args: str = _variable(
        str,
        "",
        unit="text",
        example="--tensor-parallel-size 2 --max-model-len 8192",
        meaning="Options of vLLM in a runner's process, as `vllm serve` takes them.",
    )
    runner_exact: bool = _variable(
        values.switch,
        "on",
        unit="on, off",
        example="off",
        meaning="Whether the torch engine computes in float64, so that a response is the same bit for bit in any batch "
        "and on any instance. Off: in the weights' own dtype, all requests at once, which is faster.",
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The files for TLS to NATS, or None: then it goes in the clear. Raises `InvalidSetting`."""
        if self.nats_ca is not None:
            return TlsFiles(self.nats_ca, self.nats_certificate, self.nats_key)
        if self.nats_certificate is None and self.nats_key is None:
            return None
        raise InvalidSetting(
            "TENSORHUB_NATS_CERTIFICATE or TENSORHUB_NATS_KEY is set, and TENSORHUB_NATS_CA is not, so NATS would be "
            "spoken to in the clear: name the CA too, for example TENSORHUB_NATS_CA=/etc/tensorhub/ca.pem"
        )


VARIABLES: Final[Mapping[str, Variable]] = {
    PREFIX + each.name.upper(): each.metadata[_VARIABLE] for each in fields(Settings)
}
"""Every variable by its name in the environment, in the order of the table."""


def load(environ: Mapping[str, str]) -> Settings:
    """Read the settings out of an environment; empty means not given. Raise `InvalidSetting` at the first bad value."""
    texts = {"HOSTNAME": host_name(socket.gethostname())}
    parsed: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        texts[name] = environ.get(name, "").strip() or string.Template(variable.default).substitute(texts)
        parsed[name.removeprefix(PREFIX).lower()] = _parse(name, variable, texts[name])
    settings = Settings(**parsed)
    if settings.lost_after_s <= settings.beat_s:
        raise InvalidSetting(
            f"TENSORHUB_LOST_AFTER_S is {settings.lost_after_s:g} and TENSORHUB_BEAT_S {settings.beat_s:g}, so agents"
            " would be lost between two beats: make the first longer, for example TENSORHUB_LOST_AFTER_S="
            f"{BEATS_MISSED * settings.beat_s:g}, or the second shorter"
        )
    return settings


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence about each variable that begins as ours do and is none, which a slip of the pen may be.

    Where other programs put such variables (as Kubernetes does, for each service whose name begins with ours) they are
    none of our business.
    """
    found = sorted(
        name for name in environ if name.startswith(PREFIX) and name not in VARIABLES and not _OF_OTHERS.search(name)
    )
    return [f"{name} is set, which is no setting of TensorHub{_meant(name)}" for name in found[:UNKNOWN_NAMED_MAX]]


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=NEAR)
    return f": is {near[0]} meant?" if near else ""


def _parse(name: str, variable: Variable, text: str) -> object:
    try:
        return variable.parse(text)
    except ValueError as error:
        shown = "" if variable.secret else f" is {text:.80} and"
        raise InvalidSetting(f"{name}{shown} {error}, for example {name}={variable.example}") from None


def host_name(real: str) -> str:
    """Make a host's real name valid in a subject."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", real).lstrip("_-")[:HOST_CHARS_MAX] or "host"
