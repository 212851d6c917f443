"""What happens to the hub itself: who leads, which agents and jobs there are, and what became of a command."""

from tensorhub_common.protocol.log.commands import Holding
from tensorhub_common.protocol.log.events import HUB_MODEL, Event


class RegistryLeads(Event, frozen=True, kw_only=True, tag="registry.leads"):
    """From here on this registry's word counts, and none of a lower term. `level` is the job's from here on."""

    registry: str
    term: int
    level: int = 0


class AgentJoined(Event, frozen=True, kw_only=True, tag="agent.joined"):
    """The agent's new incarnation counts.

    `kept` are its shards as the log takes them to be: `root` None means empty, `version` None that not all of the
    replica holds one. `dropped` stood in its memory but is not, or no longer, its own.
    """

    agent: str
    incarnation: int
    host: str
    site: str
    kept: tuple[Holding, ...] = ()
    dropped: tuple[Holding, ...] = ()
    rack: str = ""


class AgentLost(Event, frozen=True, kw_only=True, tag="agent.lost"):
    """The agent was expired: its shards hold nothing until a higher incarnation states what it has."""

    agent: str
    incarnation: int
    term: int


class AgentForgotten(Event, frozen=True, kw_only=True, tag="agent.forgotten"):
    """The agent was lost long ago, and the log knows it no more. Its shards are released."""

    agent: str
    incarnation: int
    term: int


class AgentDraining(Event, frozen=True, kw_only=True, tag="agent.draining"):
    """The agent takes no new shard, and no copy on it counts; `on` False: it takes part again."""

    agent: str
    on: bool


class AgentDrained(Event, frozen=True, kw_only=True, tag="agent.drained"):
    """No retained version has its last counting copy on this agent: it may stop."""

    agent: str


class CommandRejected(Event, frozen=True, kw_only=True, tag="command.rejected"):
    """The command changed nothing. `error` is the name of the error class, `message` says what to do."""

    verb: str
    error: str
    message: str
    model: str = HUB_MODEL


class CommandRepeated(Event, frozen=True, kw_only=True, tag="command.repeated"):
    """The same command stood in the log before, at sequence `of`, and this was its outcome."""

    of: int
    outcome: str
    error: str | None = None
    message: str | None = None
    model: str = HUB_MODEL


class JobQuota(Event, frozen=True, kw_only=True, tag="job.quota"):
    """All shards of the job together take at most so many bytes; 0 means no bound."""

    nbytes: int


class JobDeleted(Event, frozen=True, kw_only=True, tag="job.deleted"):
    """The last event of a job that counts: nothing stands in it any more, and its log is removed soon after."""

    job: str
