"""An agent with faults of its own, for the models that are named here: when a shard is to be published.

Of `MODEL` the job's core fails; of `NOBODYS` a part of the agent fails that no job owns, once.
"""

import os
from pathlib import Path
from typing import Final

from tensorhub_agent.app.main import main
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import AnyCall, AnyEffect, CallPublish
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.runtime.supervision import Supervisor

MODEL: Final = "fault"
NOBODYS: Final = "fault-of-nobody"


def _is_first_life() -> bool:
    mark = Path(os.environ["TENSORHUB_STATE_DIR"]) / "failed"
    if mark.exists():
        return False
    mark.touch()
    return True


def _fail() -> None:
    raise ArithmeticError("a planted fault")


def _plant() -> None:
    called = AgentCore.called

    def fails(self: AgentCore, key: ShardKey, call: AnyCall, now: float) -> list[AnyEffect]:
        if key.model == MODEL and isinstance(call, CallPublish):
            raise ArithmeticError("a planted fault")
        if key.model == NOBODYS and isinstance(call, CallPublish) and _is_first_life():
            Supervisor("a part").call_soon(_fail, what="its work")
        return called(self, key, call, now)

    AgentCore.called = fails  # type: ignore[method-assign]


if __name__ == "__main__":
    _plant()
    main()
