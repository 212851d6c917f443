"""One job of a world: its surroundings, and everything outside of its processes that they meet."""

from collections import deque

from tensorhub_agent.core.shard_state import ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_simulator.drivers.planner import Layouts
from tensorhub_simulator.engine.clock import Clock
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.config import WorldConfig
from tensorhub_simulator.faultsim.env import Env
from tensorhub_simulator.faultsim.models.build import first_level
from tensorhub_simulator.faultsim.models.catalog_view import CatalogView
from tensorhub_simulator.faultsim.models.host import AgentHost, Session
from tensorhub_simulator.faultsim.models.job_log import JobLogModel
from tensorhub_simulator.faultsim.models.leadership_lease import Lease
from tensorhub_simulator.faultsim.models.network import Network


class Job(Env):
    """A node gets its job, and nothing of the world that made it."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        streams: Streams,
        config: WorldConfig,
        transcript: deque[str],
        network: Network,
        lease: Lease,
    ) -> None:
        """Begin with an empty log. The network and the lease are those of all jobs of a world."""
        super().__init__(name, clock, streams, config, transcript)
        self.network, self.nats, self.lease = network, network.nats, lease
        self.log = JobLogModel(clock, config.window_s, network.nats)
        network.logs.append(self.log)
        self.layouts = Layouts()
        self.first_level = first_level(is_upgraded=config.upgrade)
        self.view = CatalogView(self, self.first_level)
        self.log.watchers.append(self.view.entry)
        self.hosts: dict[str, AgentHost] = {}
        self.sessions: dict[str, Session] = {}
        """By lease, each source of a read."""
        self.specs: dict[ShardKey, ShardSpec] = {}
        self.raise_to = 0
        """The level to which the leading registry is to raise the job."""
