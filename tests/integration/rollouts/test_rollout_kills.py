"""Real processes of a job of rollouts are killed or stopped: every response comes once, token for token."""

import asyncio
from pathlib import Path

import pytest
from tests.chaos.rollout_kills import RolloutJob, rollout_job, struck

ONE, OTHER = "runner-0", "runner-1"


async def kill(job: RolloutJob, *names: str) -> None:
    for name in names:
        job.hub.kill(name)


@pytest.mark.long
@pytest.mark.parametrize(
    "killed",
    [
        ("runner-0",),
        ("rollout-0",),
        ("rollout-0", "runner-0"),
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (("runner-0", "runner-1", "runner-2"), ("registry-0",), ("nats",), ("agent-0",))
        ),
    ],
    ids="+".join,
)
async def test_what_is_killed_costs_no_response(tmp_path: Path, killed: tuple[str, ...]) -> None:
    async with rollout_job(tmp_path) as job:
        await struck(job, lambda: kill(job, *killed))


@pytest.mark.long
@pytest.mark.parametrize("killed", [("runner-0",), ("rollout-0", "runner-0")], ids="+".join)
async def test_what_is_killed_costs_no_response_where_the_longest_have_instances_of_their_own(
    tmp_path: Path, killed: tuple[str, ...]
) -> None:
    """The next manager knows of no length but by what has ended and is not done."""
    async with rollout_job(tmp_path) as job:
        await struck(job, lambda: kill(job, *killed), policy="streamrl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runner-0", "rollout-0", "agent-0", "nats"])
async def test_what_is_stopped_costs_no_response(tmp_path: Path, name: str) -> None:
    async with rollout_job(tmp_path) as job:

        async def stop() -> None:
            with job.hub.stopped(name):
                await asyncio.sleep(3)

        await struck(job, stop)
