"""An agent of `tensorhub up` that moves into its namespace first: agents of host-1 live there, all others here."""

import os

from tests.partition.namespaces import LINKS, enter

from tensorhub_agent.app.main import main

FAR_HOST = "host-1"

if __name__ == "__main__":
    side = int(os.environ["TENSORHUB_HOST"] == FAR_HOST)
    if side:
        enter(os.environ["PARTITION_THERE"])
    # Bytes have a link of their own.
    os.environ["TENSORHUB_ADDRESS"] = LINKS["bytes"].address(side)
    main()
