"""An agent with a fault of its own: its core fails when a shard of the model named `MODEL` is to be published."""

from typing import Final

from tensorhub_agent.core import AgentCore
from tensorhub_agent.effects import AnyCall, AnyEffect, CallPublish, Key
from tensorhub_agent.main import main

MODEL: Final = "fault"


def _plant() -> None:
    called = AgentCore.called

    def fails(self: AgentCore, key: Key, call: AnyCall, now: float) -> list[AnyEffect]:
        if key.model == MODEL and isinstance(call, CallPublish):
            raise ArithmeticError("a planted fault")
        return called(self, key, call, now)

    AgentCore.called = fails  # type: ignore[method-assign]


if __name__ == "__main__":
    _plant()
    main()
