"""How long a hub's log has become."""

from benchmarks.fleet import JOB
from tensorhub._control.hub_file import HubFile
from tensorhub_common.bus.connection import connect
from tensorhub_common.jetstream.job_log import JobLog


async def end_of_log(hub: HubFile) -> int:
    """Return the number of the log's last entry."""
    async with await connect(hub.nats, name="bench", credentials=hub.credentials) as bus:
        return await JobLog(bus, JOB).last_seq()
