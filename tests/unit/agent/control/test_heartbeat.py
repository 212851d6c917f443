"""The thread that says that the agent is alive: its end is the end of the process."""

import pytest
from tests.kit.fakes import LastResort

from tensorhub_agent.control import heartbeat
from tensorhub_agent.control.heartbeat import HeartbeatThread
from tensorhub_common.config.settings import load


@pytest.mark.long
async def test_a_beat_that_ends_ends_the_process(last_resort: LastResort, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(heartbeat, "connect", fails)
    thread = HeartbeatThread(load({"TENSORHUB_NATS": "nats://127.0.0.1:1", "TENSORHUB_AGENT_ID": "a"}))
    thread.start()
    assert "the beat: tensorhub-beat failed: ArithmeticError('planted')" in str(await last_resort.wait())
    thread.stop()
