"""`python -m tensorhub_common.introspection.ping`, which health checks run."""

import asyncio
import sys

import pytest
from tests.kit.nats import RunningNats
from tests.kit.processes import Run, clean_environment, executed

from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.ping import answer_pings


async def ping(*processes: str, **environ: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "tensorhub_common.introspection.ping", *processes)
    code, out, err = await asyncio.to_thread(Run(executed(command, clean_environment(**environ))).ended)
    return code, out + err


async def test_it_tells_who_serves_from_who_does_not(bus: Bus, nats_server: RunningNats) -> None:
    await answer_pings(bus, "agent-7", "agent")
    assert await ping("agent-7", TENSORHUB_NATS=nats_server.url) == (0, "")
    code, said = await ping("agent-8", TENSORHUB_NATS=nats_server.url)
    assert (code, said) == (1, "agent-8 does not answer within 1 s: look into its log\n")


@pytest.mark.parametrize(
    ("processes", "environ", "said"),
    [
        ((), {}, "name one process"),
        (("agent-7",), {}, "TENSORHUB_NATS is not set"),
        (("agent-7",), {"TENSORHUB_NATS": "nats://127.0.0.1:1"}, "can't be reached"),
        (("agent-7",), {"TENSORHUB_NATS": "http://somewhere"}, "must be the address of a NATS server"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    processes: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    code, out = await ping(*processes, **environ)
    assert code == 1
    assert said in out
    assert out.count("\n") == 1
