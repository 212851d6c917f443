"""An agent of `tensorhub up` that stands in one of two sites, by the number of the host that it pretends."""

import os
from typing import Final

from tensorhub_agent.app.main import main

NEAR_HOSTS: Final = "TESTS_NEAR_HOSTS"
"""Names the variable that tells how many hosts, from the first one on, stand in the trainer's site."""

if __name__ == "__main__":
    host = int(os.environ["TENSORHUB_HOST"].rpartition("-")[2])
    os.environ["TENSORHUB_SITE"] = "near" if host < int(os.environ[NEAR_HOSTS]) else "far"
    main()
