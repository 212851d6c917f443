"""Snapshots and trimming: a restart folds the snapshot and what came after, and no outcome is lost or said twice."""

import asyncio
import contextlib
import random
import re
import signal
from collections import deque
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from tests.integration.registry.conftest import Stage, WatchedJob, commands, say_all
from tests.integration.registry.hasty_registry import ENTRIES, HELD_UNTIL, KEEP, UNTRIMMED_UNTIL
from tests.kit.services import RunningService
from tests.kit.waiting import until, until_answer

from tensorhub_common.bus.errors import LogFull, LogGap
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_reader import BATCH
from tensorhub_common.jetstream.snapshot_store import SnapshotIndex, SnapshotStore
from tensorhub_common.log_follower import restore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import Command
from tensorhub_common.protocol.queries import Outcome, OutcomeAsk, QueryError

HASTY = "tests.integration.registry.hasty_registry"
BEHIND = ENTRIES - KEEP
"""The log is trimmed beyond this entry once two snapshots stand, wherever a slow machine made the second of them."""
FULL_BYTES = 64 * 1024


async def first_of(watched: WatchedJob) -> int:
    return (await watched.log.extent()).first


async def wait_trimmed(watched: WatchedJob, said: list[Command]) -> int:
    await say_all(watched, said, 0.0)
    await watched.wait_settled()
    return await until_answer(lambda: first_of(watched), lambda first: first > BEHIND, "the log is trimmed")


async def trimmed(stage: Stage, count: int = 200) -> tuple[RunningService, WatchedJob, int]:
    """Have a registry make snapshots of so many commands; return where the log begins then, too."""
    registry = await stage.started(module=HASTY)
    watched = await stage.open()
    return registry, watched, await wait_trimmed(watched, commands(count))


async def limit(watched: WatchedJob) -> None:
    stream = watched.log.stream
    config = (await api.api(watched.bus, f"STREAM.INFO.{stream}"))["config"]
    await api.api(watched.bus, f"STREAM.UPDATE.{stream}", {**config, "max_bytes": FULL_BYTES})


async def say_some(watched: WatchedJob, said: deque[Command]) -> bool:
    with contextlib.suppress(LogFull):
        while said:
            await watched.say(said[0])
            said.popleft()
    return not said


async def index_of(watched: WatchedJob) -> SnapshotIndex:
    found = await SnapshotStore(watched.bus, watched.name).index((await watched.log.extent()).created)
    assert found is not None
    return found


async def outcome_of(watched: WatchedJob, seq: int) -> Outcome | QueryError:
    found: Outcome | QueryError = await watched.ask(
        "outcome", Outcome | QueryError, msgspec.json.encode(OutcomeAsk(seq=seq))
    )
    return found


@pytest.mark.long
async def test_a_restart_goes_on_from_the_snapshot(stage: Stage) -> None:
    registry, watched, first = await trimmed(stage)
    index = await index_of(watched)
    assert index.older is not None
    assert first <= index.older.seq - KEEP + 1, "the log must reach back behind the older of the two"
    await registry.kill()
    index = await index_of(watched)
    late = [await watched.say(command) for command in commands(40)[2:]]
    await registry.start()
    await watched.wait_settled()
    assert re.findall(r"restored .* seq=(\d+)", registry.log.read_text()) == [str(index.newer.seq)]
    for entry in watched.entries:
        if ".cmd." in entry.subject and entry.seq > index.newer.seq - KEEP:
            answer = await outcome_of(watched, entry.seq)
            assert isinstance(answer, Outcome), answer
            assert list(answer.events) == [event for event in watched.events if event.cmd == entry.seq]
    assert late[-1] <= watched.events[-1].cmd
    assert isinstance(await outcome_of(watched, 1), QueryError)
    with pytest.raises(LogGap, match=f"no entry {first - 1} any more"):
        await anext(watched.log.follow(first - 1))


@pytest.mark.long
async def test_a_snapshot_that_falls_due_at_rest_needs_no_further_entry(stage: Stage, tmp_path: Path) -> None:
    """The first one is being kept until all is said, and the next can't be kept: the log is trimmed all the same."""
    go_on = tmp_path / "go-on"
    registry = await stage.started(module=HASTY, **{HELD_UNTIL: str(go_on)})
    watched = await stage.open()
    await say_all(watched, commands(200), 0.0)
    await watched.wait_settled()
    go_on.touch()
    await registry.wait_says("could not be kept")
    assert (await index_of(watched)).older is None, "only the one that was held is kept by now"
    last = (await watched.log.extent()).last
    await until_answer(lambda: index_of(watched), lambda index: index.newer.seq == last, "the whole log is summed up")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_registries_are_killed_among_snapshots(seed: int, stage: Stage) -> None:
    chance = random.Random(seed)
    names = ("registry-0", "registry-1")
    pair = [await stage.started(name, module=HASTY, TENSORHUB_LEADER_TTL_S="1") for name in names]
    watched = await stage.open()
    saying = asyncio.create_task(say_all(watched, commands(1_000), 0.003))
    kills = 0
    while not saying.done() or kills < 4:
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        registry = chance.choice(pair)
        await registry.kill()
        kills += 1
        await registry.start()
    await saying
    await wait_trimmed(watched, [])
    assert (await index_of(watched)).older is not None


@pytest.mark.slow
async def test_a_standby_that_was_away_for_long_loads_a_snapshot(stage: Stage) -> None:
    leader = await stage.started(module=HASTY)
    await leader.wait_ready(stage.bus)
    watched = await stage.open()
    standby = await stage.started("registry-1", module=HASTY)
    await standby.wait_ready(stage.bus)
    await watched.answered(commands(1)[0])
    standby.signal(signal.SIGSTOP)
    said = iter(commands(4_000)[1:])

    async def is_trimmed_beyond_what_it_was_sent() -> bool:
        await say_all(watched, list(islice(said, 100)), 0.0)
        return await first_of(watched) > BATCH

    await until(is_trimmed_beyond_what_it_was_sent, "the log is trimmed beyond what the standby was sent")
    await watched.wait_settled()
    standby.signal(signal.SIGCONT)
    await standby.wait_says("restored")
    await leader.kill()
    await watched.answered()
    await watched.wait_settled()


@pytest.mark.long
async def test_a_full_log_is_trimmed_behind_a_snapshot(stage: Stage) -> None:
    registry = await stage.started()
    watched = await stage.open()
    await watched.answered(commands(1)[0])
    await limit(watched)
    await registry.kill()
    await registry.start()
    said = deque(commands(300)[1:])
    await until(lambda: say_some(watched, said), "all is said")
    last = await watched.log.last_command()
    assert last is not None
    await until_answer(
        lambda: outcome_of(watched, last.seq), lambda found: getattr(found, "events", ()), "the last one is answered"
    )
    assert await first_of(watched) > 1
    lines = [line for line in registry.log.read_text().splitlines() if stage.job in line]
    assert any("snapshot" in line for line in lines)
    assert [line for line in lines if "[info" in line] == [], "a job that gets on is no line for anyone"


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_full_log_is_trimmed_though_its_snapshot_stood_before(
    stage: Stage, tmp_path: Path, *, is_killed: bool
) -> None:
    """The trim failed, or its registry was killed before it: the log takes no entry that a new snapshot could be of."""
    go_on = tmp_path / "go-on"
    registry = await stage.started(module=HASTY, **{UNTRIMMED_UNTIL: str(go_on)})
    watched = await stage.open()
    await watched.answered(commands(1)[0])
    await limit(watched)
    said = deque(commands(1_000)[1:])

    async def is_full_and_summed_up() -> bool:
        await say_some(watched, said)
        with contextlib.suppress(AssertionError):
            return (await index_of(watched)).newer.seq == (await watched.log.extent()).last
        return False

    await until(is_full_and_summed_up, "a snapshot sums up all of the full log")
    assert await first_of(watched) == 1
    if is_killed:
        await registry.kill()
    go_on.touch()
    if is_killed:
        await registry.start()
    one = deque([said[0]])
    await until(lambda: say_some(watched, one), "the log takes a command again")
    await watched.wait_settled()


@pytest.mark.long
async def test_a_broken_snapshot_is_passed_over(stage: Stage) -> None:
    """The older one and the log behind it serve; with both broken the job stops with an error that says so."""
    registry, watched, _ = await trimmed(stage, 300)
    await registry.kill()
    index = await index_of(watched)
    assert index.older is not None
    await api.store(stage.bus, subjects.snapshot(stage.job, index.newer.digest, 0), b"something else")
    snapshot, _ = await restore.newest_snapshot(stage.bus, stage.job, 0)
    assert snapshot is not None
    assert snapshot.seq == index.older.seq
    await registry.start()
    await watched.answered()
    await watched.wait_settled()
    await registry.kill()
    purge = {"filter": subjects.snapshots_of(stage.job).replace(">", "*.*")}
    await api.api(stage.bus, f"STREAM.PURGE.{subjects.snapshot_stream(stage.job)}", purge)
    with pytest.raises(LogGap, match=r"no snapshot leads there: .*part 0 of 1 is missing"):
        await restore.newest_snapshot(stage.bus, stage.job, 0)
    await registry.start()
    await registry.wait_says("the job is set aside")


@pytest.mark.long
async def test_snapshots_of_a_log_that_was_made_anew_are_none_of_its_own(stage: Stage) -> None:
    registry, watched, _ = await trimmed(stage)
    await registry.kill()
    await watched.close()
    await api.api(stage.bus, f"STREAM.DELETE.{watched.log.stream}")
    await registry.start()
    anew = await stage.open()
    assert (await restore.newest_snapshot(stage.bus, stage.job, 0))[0] is None
    await wait_trimmed(anew, commands(200))
