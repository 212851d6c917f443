"""An agent whose second life never begins: it stands in for a machine that does not come back.

Only the agent named in CHAOS_MORTAL is mortal; all others are as always.
"""

import os
import signal
from pathlib import Path

from tensorhub_agent.app.main import main


def _was_here_before() -> bool:
    mark = Path(os.environ["TENSORHUB_STATE_DIR"]) / "lived"
    if mark.exists():
        return True
    mark.touch()
    return False


if __name__ == "__main__":
    if os.environ["TENSORHUB_AGENT_ID"] == os.environ["CHAOS_MORTAL"] and _was_here_before():
        signal.pause()
    main()
