"""A program need not close its hub: the spans of its last calls are kept by its agent, and exported, all the same."""

import asyncio
import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.integration.hubs import RunningHub, new_job
from tests.integration.otlp_receiver import receiving
from tests.integration.programs import run_program

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.introspection.span_query import collect_spans
from tensorhub_common.protocol.spans import SpansAsk, TransfersAsk

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]
WAIT_S = 20.0

SYNC = """
import sys, tensorhub, torch
trainer = tensorhub.connect(sys.argv[1]).register("policy", {"w": torch.zeros(1000)}, replica="trainer")
engine = tensorhub.connect(sys.argv[1]).register("policy", {"w": torch.zeros(1000)}, replica="engine")
trainer.publish(1)
engine.replicate(1)
"""
ASYNC = """
import asyncio, sys, tensorhub, torch
async def main():
    trainer_hub, engine_hub = [await tensorhub.connect_async(sys.argv[1]) for _ in range(2)]
    trainer = await trainer_hub.register("policy", {"w": torch.zeros(1000)}, replica="trainer")
    engine = await engine_hub.register("policy", {"w": torch.zeros(1000)}, replica="engine")
    await trainer.publish(1)
    await engine.replicate(1)
%s
"""
CHILD = """
import multiprocessing, sys
import tensorhub
def child():
%s
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
"""
PROGRAMS = {
    "sync": SYNC,
    "a function": f"def main():\n{textwrap.indent(SYNC, '    ')}\nmain()",
    "a forked child": CHILD % textwrap.indent(SYNC, "    "),
    "asyncio.run in a forked child": CHILD % textwrap.indent(ASYNC % "asyncio.run(main())", "    "),
    "asyncio.run": ASYNC % "asyncio.run(main())",
    "a loop that was left": ASYNC % "asyncio.new_event_loop().run_until_complete(main())",
}


@pytest_asyncio.fixture(loop_scope="session")
async def bus(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as connected:
        yield connected


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_program_that_ends_without_close_leaves_its_spans(
    hub: RunningHub, bus: Bus, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job()
    with receiving() as receiver:
        for name, value in receiver.environ.items():
            monkeypatch.setenv(name, value)
        # So that nothing but the end of the program exports.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
        ended = await asyncio.to_thread(run_program, hub, program, job)
        assert ended.returncode == 0, ended.stderr
        assert {span.name for span in receiver.spans(job)} == {"publish", "replicate"}
    async with asyncio.timeout(WAIT_S):
        while True:
            transfers = (await collect_spans(bus, job, TransfersAsk())).spans
            found = {
                span.name
                for transfer in transfers
                for span in (await collect_spans(bus, job, SpansAsk(trace=transfer.trace))).spans
            }
            if {"publish", "replicate"} <= found:
                break
