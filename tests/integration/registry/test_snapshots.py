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
from tests.integration.registry.conftest import MakeRegistry, OpenJob, WatchedJob, commands, say_all, until
from tests.integration.registry.hasty_registry import ENTRIES, HELD_UNTIL, KEEP, UNTRIMMED_UNTIL
from tests.kit.nats import RunningNats

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogFull, LogGap
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.log_reader import BATCH
from tensorhub_common.jetstream.snapshot_store import SnapshotIndex, SnapshotStore
from tensorhub_common.log_follower import restore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.queries import Outcome, OutcomeAsk, QueryError

HASTY = "tests.integration.registry.hasty_registry"
BEHIND = ENTRIES - KEEP
"""The log is trimmed beyond this entry once two snapshots stand, wherever a slow machine made the second of them."""
WISH = Publish(model="policy", replica="nobody")


async def first_of(watched: WatchedJob) -> int:
    return (await watched.log.extent()).first


async def wait_trimmed(watched: WatchedJob, beyond: int) -> int:
    """Wait until the log begins after this entry; where it begins."""

    async def is_trimmed() -> bool:
        return await first_of(watched) > beyond

    await until(is_trimmed, f"the log is trimmed beyond entry {beyond}")
    return await first_of(watched)


async def limit(bus: Bus, watched: WatchedJob, nbytes: int) -> None:
    """Give the job's log no more room than this."""
    stream = watched.log.stream
    config = (await api.api(bus, f"STREAM.INFO.{stream}"))["config"]
    await api.api(bus, f"STREAM.UPDATE.{stream}", {**config, "max_bytes": nbytes})


async def index_of(bus: Bus, watched: WatchedJob) -> SnapshotIndex:
    found = await SnapshotStore(bus, watched.name).index((await watched.log.extent()).created)
    assert found is not None
    return found


async def asked(bus: Bus, job: str, seq: int) -> Outcome | QueryError:
    ask = msgspec.json.encode(OutcomeAsk(seq=seq))
    return msgspec.json.decode(
        await bus.request(subjects.query_subject(job, "outcome"), ask), type=Outcome | QueryError
    )


async def restored(bus: Bus, job: str, beyond: int = 0) -> Snapshot:
    snapshot, _ = await restore.newest_snapshot(bus, job, beyond)
    assert snapshot is not None
    return snapshot


@pytest.mark.long
async def test_a_restart_goes_on_from_the_snapshot(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    registry = registry_on(own_nats_server.url, module=HASTY)
    await registry.start()
    watched = await open_job(own_bus, job)
    await say_all(watched, commands(200), 0.0)
    await watched.wait_settled()
    first = await wait_trimmed(watched, BEHIND)
    index = await index_of(own_bus, watched)
    assert index.older is not None
    assert first <= index.older.seq - KEEP + 1, "the log must reach back behind the older of the two"
    await registry.kill()
    index = await index_of(own_bus, watched)
    late = [await watched.say(command) for command in commands(40)[2:]]
    await registry.start()
    await watched.wait_settled()
    assert re.findall(r"restored .* seq=(\d+)", registry.log.read_text()) == [str(index.newer.seq)]
    for entry in watched.entries:
        if ".cmd." in entry.subject and entry.seq > index.newer.seq - KEEP:
            answer = await asked(own_bus, job, entry.seq)
            assert isinstance(answer, Outcome), answer
            assert list(answer.events) == [event for event in watched.events if event.cmd == entry.seq]
    assert late[-1] <= watched.events[-1].cmd
    answer = await asked(own_bus, job, 1)
    assert isinstance(answer, QueryError)
    with pytest.raises(LogGap, match=f"no entry {first - 1} any more"):
        await anext(watched.log.follow(first - 1))


@pytest.mark.long
async def test_a_snapshot_that_falls_due_at_rest_needs_no_further_entry(
    own_nats_server: RunningNats,
    own_bus: Bus,
    registry_on: MakeRegistry,
    open_job: OpenJob,
    job: str,
    tmp_path: Path,
) -> None:
    """The first one is being kept until all is said, and the next can't be kept: the log is trimmed all the same."""
    go_on = tmp_path / "go-on"
    registry = registry_on(own_nats_server.url, module=HASTY, **{HELD_UNTIL: str(go_on)})
    await registry.start()
    watched = await open_job(own_bus, job)
    await say_all(watched, commands(200), 0.0)
    await watched.wait_settled()
    go_on.touch()
    await registry.wait_says("could not be kept")
    index = await index_of(own_bus, watched)
    assert index.older is None, "only the one that was held is kept by now"
    last = (await watched.log.extent()).last

    async def sums_up_all() -> bool:
        return (await index_of(own_bus, watched)).newer.seq == last

    await until(sums_up_all, "a snapshot of the whole log is kept")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_registries_are_killed_among_snapshots(
    seed: int, own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """Two of them, at random moments: whatever was under way, each command has its group exactly once."""
    chance = random.Random(seed)
    pair = [
        registry_on(own_nats_server.url, name, module=HASTY, TENSORHUB_LEADER_TTL_S="1")
        for name in ("registry-0", "registry-1")
    ]
    for registry in pair:
        await registry.start()
    watched = await open_job(own_bus, job)
    saying = asyncio.create_task(say_all(watched, commands(1_000), 0.003))
    kills = 0
    while not saying.done() or kills < 4:
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        registry = chance.choice(pair)
        await registry.kill()
        kills += 1
        await registry.start()
    await saying
    await watched.wait_settled()
    await wait_trimmed(watched, BEHIND)
    assert (await index_of(own_bus, watched)).older is not None


@pytest.mark.slow
async def test_a_standby_that_was_away_for_long_loads_a_snapshot(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """The log is trimmed beyond what it had folded; it takes over all the same."""
    leader, standby = (registry_on(own_nats_server.url, name, module=HASTY) for name in ("registry-0", "registry-1"))
    await leader.start()
    await leader.wait_ready(own_bus)
    watched = await open_job(own_bus, job)
    await standby.start()
    await standby.wait_ready(own_bus)
    await watched.outcome(await watched.say(commands(1)[0]))
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
    await watched.outcome(await watched.say(WISH))
    await watched.wait_settled()


async def test_a_full_log_is_trimmed_behind_a_snapshot(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """A log with a low limit: snapshots come as often as it needs them, and commands are taken again."""
    registry = registry_on(own_nats_server.url)
    await registry.start()
    watched = await open_job(own_bus, job)
    await watched.outcome(await watched.say(commands(1)[0]))
    await limit(own_bus, watched, 64 * 1024)
    await registry.kill()
    await registry.start()
    said = deque(commands(300)[1:])

    async def all_is_said() -> bool:
        with contextlib.suppress(LogFull):
            while said:
                await watched.say(said[0])
                said.popleft()
        return not said

    await until(all_is_said, "all is said")
    last = await watched.log.last_command()
    assert last is not None

    async def is_answered() -> bool:
        answer = await asked(own_bus, job, last.seq)
        return isinstance(answer, Outcome) and bool(answer.events)

    await until(is_answered, "the last command is answered")
    assert await first_of(watched) > 1
    lines = registry.log.read_text().splitlines()
    assert any("snapshot" in line and job in line for line in lines)
    assert [line for line in lines if "[info" in line and job in line] == [], "a job that gets on is no line for anyone"


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_full_log_is_trimmed_though_its_snapshot_stood_before(
    own_nats_server: RunningNats,
    own_bus: Bus,
    registry_on: MakeRegistry,
    open_job: OpenJob,
    job: str,
    tmp_path: Path,
    *,
    is_killed: bool,
) -> None:
    """The trim failed, or its registry was killed before it: the log takes no entry that a new snapshot could be of."""
    go_on = tmp_path / "go-on"
    registry = registry_on(own_nats_server.url, module=HASTY, **{UNTRIMMED_UNTIL: str(go_on)})
    await registry.start()
    watched = await open_job(own_bus, job)
    await watched.outcome(await watched.say(commands(1)[0]))
    await limit(own_bus, watched, 64 * 1024)
    said = deque(commands(1_000)[1:])

    async def is_full_and_summed_up() -> bool:
        with contextlib.suppress(LogFull):
            while said:
                await watched.say(said[0])
                said.popleft()
        with contextlib.suppress(AssertionError):
            return (await index_of(own_bus, watched)).newer.seq == (await watched.log.extent()).last
        return False

    await until(is_full_and_summed_up, "a snapshot sums up all of the full log")
    assert await first_of(watched) == 1
    if is_killed:
        await registry.kill()
        go_on.touch()
        await registry.start()
    else:
        go_on.touch()

    async def takes_one() -> bool:
        with contextlib.suppress(LogFull):
            await watched.say(said[0])
            return True
        return False

    await until(takes_one, "the log takes a command again")
    await watched.wait_settled()


@pytest.mark.long
async def test_a_broken_snapshot_is_passed_over(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """The older one and the log behind it serve; with both broken the job stops with an error that says so."""
    registry = registry_on(own_nats_server.url, module=HASTY)
    await registry.start()
    watched = await open_job(own_bus, job)
    await say_all(watched, commands(300), 0.0)
    await watched.wait_settled()
    await wait_trimmed(watched, BEHIND)
    await registry.kill()
    index = await index_of(own_bus, watched)
    assert index.older is not None
    await api.store(own_bus, subjects.snapshot(job, index.newer.digest, 0), b"something else")
    assert (await restored(own_bus, job)).seq == index.older.seq
    await registry.start()
    await watched.outcome(await watched.say(WISH))
    await watched.wait_settled()
    await registry.kill()
    index = await index_of(own_bus, watched)
    purge = {"filter": subjects.snapshots_of(job).replace(">", "*.*")}
    await api.api(own_bus, f"STREAM.PURGE.{subjects.snapshot_stream(job)}", purge)
    with pytest.raises(LogGap, match=r"no snapshot leads there: .*part 0 of 1 is missing"):
        await restored(own_bus, job)
    await registry.start()
    await registry.wait_says("the job is set aside")


@pytest.mark.long
async def test_snapshots_of_a_log_that_was_made_anew_are_none_of_its_own(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    registry = registry_on(own_nats_server.url, module=HASTY)
    await registry.start()
    watched = await open_job(own_bus, job)
    await say_all(watched, commands(200), 0.0)
    await watched.wait_settled()
    await wait_trimmed(watched, BEHIND)
    await registry.kill()
    await watched.close()
    await api.api(own_bus, f"STREAM.DELETE.{watched.log.stream}")
    await registry.start()
    anew = await open_job(own_bus, job)
    assert (await restore.newest_snapshot(own_bus, job, 0))[0] is None
    await say_all(anew, commands(200), 0.0)
    await anew.wait_settled()
    await wait_trimmed(anew, BEHIND)
