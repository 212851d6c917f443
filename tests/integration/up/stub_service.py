"""Stands in for a registry, a planner or an agent: says that it is ready, and stops at SIGTERM."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection.ping import answer_pings


def tell_environment(process: str) -> None:
    seen = {name: value for name, value in os.environ.items() if name.startswith("TENSORHUB_")}
    Path(os.environ["TENSORHUB_DIR"], f"{process}.env.json").write_text(json.dumps(seen))


async def main(role: str) -> None:
    process = os.environ[f"TENSORHUB_{role.upper()}_ID"]
    if process in sys.argv[2:]:
        sys.exit(f"{process} has no GPU")
    tell_environment(process)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    url = os.environ["TENSORHUB_NATS"]
    async with await connect(url, name=process, credentials=os.environ["TENSORHUB_CREDENTIALS"]) as bus:
        await answer_pings(bus, process, role)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
