"""Interleavings of a job of rollouts, scripted on real processes: each response comes once, as it has to be."""

import asyncio
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RemoteTrainer, RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import SEED
from tests.kit.engine_records import BEGUN, repeats
from tests.kit.hubs import copies_of
from tests.kit.processes import WorkerError
from tests.kit.waiting import Missed, children_of, kill, met, stopped, until, until_answer

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub.local.hub import ServiceCommands
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.rollout.payloads import request_seed
from tensorhub_common.protocol.rollout.questions import RolloutStatus
from tensorhub_common.protocol.subjects import log_stream, payload_stream

pytestmark = pytest.mark.slow

A, B, C = "runner-0", "runner-1", "runner-2"
LONG = 1200
"""Tokens of a response that is still generated after ten seconds, at a hundredth of a second each."""
ENDLESS = 1_000_000
STEP_S = 0.01
PAUSE_S = 0.5
"""So long the manager sees no version: it waits for one that it was told of a second at most."""
ROOM_BYTES = 1 << 20


def runners_of(kind: str) -> ServiceCommands:
    return ServiceCommands(runner=(sys.executable, "-m", "tests.kit.runners", kind))


def child_of(job: RolloutJob, runner: str) -> int:
    """Return the one process that an unusual runner has started."""
    (child,) = children_of(job.hub.pid(runner))
    return child


async def until_versions(rollouts: tensorhub.AsyncRollouts, version: int) -> None:
    """Wait until all instances have a version."""
    await until_answer(
        rollouts.status, lambda found: {each.version for each in found.instances} == {version}, f"all have {version}"
    )


async def until_moved_from(rollouts: tensorhub.AsyncRollouts, runner: str) -> None:
    """Wait until a runner is taken for lost, and all of its requests are placed elsewhere."""
    await until_answer(
        rollouts.status,
        lambda found: runner not in {each.runner for each in found.instances} and not is_any_waiting(found),
        f"{runner} is lost, and what it had is elsewhere",
    )


def is_any_waiting(status: RolloutStatus) -> bool:
    return any(each.waiting for each in status.consumers)


async def test_a_leader_stopped_with_a_runner_cut_off_and_both_wake(tmp_path: Path) -> None:
    """What the runner made meanwhile, and what the old leader says, counts for nothing that others went on with."""
    commands = runners_of("cuttable")
    async with rollout_job(tmp_path, commands=commands, tokens_max=LONG, step_s=STEP_S) as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 3)
        await job.submit(rollouts, 9)
        await job.until_tokens_at(rollouts, A)
        before = await rollouts.status()
        leader = job.hub.pid(await job.leader(rollouts))
        with stopped(child_of(job, A), leader):
            cut_at = time.monotonic()
            await asyncio.sleep(10)
            healed_at = time.monotonic()
        records = job.records()
        records = records[records["pid"] == job.hub.pid(A)]
        assert np.any((records["at"] > cut_at + 1) & (records["at"] < healed_at)), "the runner went on while cut off"
        await job.take_all(rollouts)
        assert (await rollouts.status()).term > before.term
        went_on = {each.key for each in job.received.values() if each.runs[-1].instance != A}
        begun_there = {key for key in went_on if np.any(records["seed"] == request_seed(SEED, *key))}
        assert begun_there, "requests of the runner that was cut off went on elsewhere"
        job.check()


async def test_a_request_that_comes_back_to_a_runner_is_not_hit_by_the_abort_of_its_first_attempt(
    tmp_path: Path,
) -> None:
    """A → B → A, while each assign and abort that A has heard comes to it once more, two seconds late."""
    commands = runners_of("cuttable+echoing")
    async with rollout_job(
        tmp_path,
        commands=commands,
        runners=2,
        managers=1,
        tokens_max=LONG,
        step_s=STEP_S,
        ECHO_S="2",
        TENSORHUB_RUNNER_SLOTS="64",
    ) as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 2)
        await job.submit(rollouts, 6)
        await job.until_tokens_at(rollouts, A, 4)
        with stopped(child_of(job, A)):
            await until_moved_from(rollouts, A)
        await job.until_serving(rollouts, 2)
        with stopped(child_of(job, B)):
            await until_moved_from(rollouts, B)
            await job.until_tokens_at(rollouts, A, 4)
        await job.take_all(rollouts)
        begun = job.records()
        begun = begun[begun["token"] == BEGUN]
        places = [begun["pid"][begun["seed"] == seed].tolist() for seed in np.unique(begun["seed"])]
        first, second = job.hub.pid(A), job.hub.pid(B)
        assert any([first, second, first] == each[:3] for each in places), places
        job.check()


async def test_a_runner_that_restarts_within_its_silence_ends_its_attempts(tmp_path: Path) -> None:
    """The leader learns of the next process before it would have missed the one before."""
    commands = runners_of("respawning")
    async with rollout_job(tmp_path, commands=commands, managers=1, tokens_max=LONG, step_s=STEP_S) as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 3)

        async def restart(_: int) -> None:
            said = len(job.hub.log("rollout-0"))
            await job.submit(rollouts, 6)
            await job.until_tokens_at(rollouts, A)
            kill(child_of(job, A))
            await job.take_all(rollouts)
            lost = [line for line in job.hub.log("rollout-0")[said:].splitlines() if f"runner={A}" in line]
            assert lost, "the leader has lost the process before"
            if "it began anew" not in lost[0]:
                raise Missed

        await met(restart)
        job.check()


@pytest.mark.parametrize("is_publisher", [True, False])
async def test_what_is_submitted_after_a_publication_begins_on_it_though_the_manager_has_not_heard_of_it(
    tmp_path: Path, *, is_publisher: bool
) -> None:
    """Whether the process that submits is the one that publishes, or was told the version by it."""
    async with (
        rollout_job(tmp_path, managers=1, tokens_max=20, step_s=STEP_S) as job,
        job.hub.connected(job.name, 1) as (other,),
        await job.hub.bus(job.hub.admin_key) as bus,
    ):
        stream = log_stream(job.name)

        async def followers() -> set[str]:
            return {*(await api.api(bus, f"CONSUMER.NAMES.{stream}", {}))["consumers"]}

        others = await followers()
        killed = job.hub.kill("rollout-0")
        await job.hub.until_back("rollout-0", killed)
        submitter = job.trainer if is_publisher else other
        sampling = Sampling(max_tokens=20, seed=SEED)
        rollouts = await submitter.rollouts(MODEL, staleness=0, sampling=sampling)
        await job.until_serving(rollouts, 3)
        for _ in range(3):
            # Before it loads the version itself, a runner begins what its manager allows.
            until = datetime.now(UTC) + timedelta(seconds=PAUSE_S)
            for each in await followers() - others:
                await api.api(bus, f"CONSUMER.PAUSE.{stream}.{each}", {"pause_until": until.isoformat()})
            version = await job.publish()
            await rollouts.submit(
                [Prompt([1, number]) for number in range(6)], newest=None if is_publisher else version
            )
            begun_on = set[int]()
            async for batch in rollouts.batches(1, wait_s=WAIT_S):
                begun_on |= {int(each.versions[0]) for each in batch.responses}
                await batch.done()
            assert begun_on == {version}, "with staleness=0 none begins on an older one"


async def test_a_trainer_that_went_back_to_a_checkpoint_gets_nothing_of_the_steps_that_it_left(tmp_path: Path) -> None:
    """Its ids are free, also for other prompts, and the trainer before is told that it is over."""
    async with rollout_job(tmp_path, managers=1, tokens_max=LONG, step_s=STEP_S) as job:
        rollouts = await job.attach(name="watcher")
        await job.until_serving(rollouts, 3)
        old = RemoteTrainer(job, name="steps")
        await old.start()
        try:
            await old.submit(["a", "b", "c", "d"])
            received = await old.take()
            assert received
            await job.until_tokens(rollouts)
            job.verdict.received.clear()
            new = RemoteTrainer(job, name="steps", epoch=1, tokens_max=20)
            job.verdict.tokens_max = 20
            await new.start()
            try:
                # Other content under the ids of before: these responses have twenty tokens at most.
                await new.submit(["a", "b", "c", "d"])
                await new.take_all()
                with pytest.raises(WorkerError, match="another trainer has attached"):
                    await old.peer.ask("submit", [["e", 1]])
            finally:
                await new.close()
        finally:
            await old.close()
        assert not job.wrongs
        assert not job.missing


async def test_a_slow_trainer_at_the_bound_of_payloads_holds_new_groups_back_and_loses_none(tmp_path: Path) -> None:
    """What would not fit does not begin, what has begun ends, and once batches are done the rest is generated."""
    async with rollout_job(tmp_path, managers=1, tokens_max=1500, step_s=0.001) as job:
        async with await job.hub.bus(job.hub.admin_key) as bus:
            config = (await api.stream_info(bus, payload_stream(job.name)))["config"]
            await api.api(bus, f"STREAM.UPDATE.{config['name']}", {**config, "max_bytes": ROOM_BYTES})
        # The next leader looks at the limit at once.
        job.hub.kill("rollout-0")
        rollouts = await job.attach()
        await job.until_serving(rollouts, 3)
        await job.submit(rollouts, 60)
        held_back = await until_answer(rollouts.status, is_held_back, "no more groups begin")
        assert held_back.payload_bytes < ROOM_BYTES
        with pytest.raises(tensorhub.BadCommand, match=r"^min_responses=9999 can't be reached: \d+ finished responses"):
            await anext(rollouts.batches(9999, wait_s=WAIT_S))
        # One that is in use may be done at any time, so that is waited for.
        first = await anext(rollouts.batches(1))
        rest = await anext(rollouts.batches(9999, wait_s=1))
        assert len(rest.responses) > 1
        await job.take(first)
        await job.take(rest)
        await job.take_all(rollouts)
        job.check()


def is_held_back(status: RolloutStatus) -> bool:
    """Tell whether some responses have ended, others wait, and none is generated."""
    (consumer,) = status.consumers
    at_work = sum(each.pending + each.executing for each in status.instances)
    return bool(consumer.ended and consumer.waiting == consumer.open and consumer.open and not at_work)


async def test_versions_that_come_faster_than_prompts_are_computed_stop_no_response(tmp_path: Path) -> None:
    """A prompt takes longer than a version lasts, and each attempt gets on by a token between two versions."""
    async with rollout_job(tmp_path, managers=1, tokens_max=30, FAKE_PREFILL_STEPS="30") as job:
        # With `arrival` an instance leaves out versions, and computes its prompts meanwhile.
        rollouts = await job.attach(policy="rlboost")
        await job.until_serving(rollouts, 3)
        await job.submit(rollouts, 6)
        taking = asyncio.create_task(job.take_all(rollouts))
        while not taking.done():
            newest = await job.publish()
            # A version that goes before any engine has it is none that they would have to load.
            await until_answer(
                rollouts.status,
                lambda found: taking.done() or job.version in {each.version for each in found.instances},
                "an engine has the newest version",
            )
        await taking
        assert newest > 10
        assert any(len(set(each.versions)) > 2 for each in job.received.values())
        job.check()


@pytest.mark.parametrize(
    ("install", "trainer_install"), [("staged", "in-place"), ("mapped", "staged"), ("mapped", "in-place")]
)
async def test_a_trainer_overwrites_what_endless_responses_are_to_be_finished_on(
    tmp_path: Path, install: str, trainer_install: Literal["in-place", "staged"]
) -> None:
    """Its `unpublish` waits for no response, whatever `on_update` says; a mapped engine goes on with the next one.

    Engines that map the trainer's only memory let go of it. With two memories it waits for none.
    """
    async with rollout_job(
        tmp_path,
        managers=1,
        step_s=STEP_S,
        trainer_install=trainer_install,
        TENSORHUB_RUNNER_INSTALL=install,
    ) as job:
        rollouts = await job.attach(on_update="finish", sampling=Sampling(max_tokens=ENDLESS, seed=SEED))
        await job.until_serving(rollouts, 3)
        groups = await job.submit(rollouts, 3)
        await job.until_tokens(rollouts)
        for _ in range(3):
            # It raises `DrainTimeout` where it would have to wait.
            newest = await job.publish()
            if install == "mapped":
                await until_versions(rollouts, newest)
                await job.until_tokens(rollouts)
        busy = {each.runner: each.version for each in (await rollouts.status()).instances if each.executing}
        if install == "staged":
            assert set(busy.values()) == {1}
        await rollouts.cancel(groups)
        await until_versions(rollouts, newest)
        async for batch in rollouts.batches(1, wait_s=WAIT_S):
            assert {each.finish_reason for each in batch.responses} == {"cancelled"}
            await batch.done()


async def test_mapped_engines_make_no_token_while_the_only_memory_is_overwritten(tmp_path: Path) -> None:
    """Each publication takes the weights from all of them. What they made stays, and each response comes once."""
    async with rollout_job(
        tmp_path, managers=1, tokens_max=LONG // 2, step_s=STEP_S, TENSORHUB_RUNNER_INSTALL="mapped"
    ) as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 3)
        await job.submit(rollouts, 6)
        taking = asyncio.create_task(job.take_all(rollouts))
        for _ in range(4):
            await job.until_tokens(rollouts)
            await until_versions(rollouts, await job.publish())
        await taking
        assert any(len(set(each.versions)) > 2 for each in job.received.values())
        job.check()


@pytest.mark.parametrize("struck", [(), ("rollout-0",)], ids=["", "leader-killed"])
async def test_a_rewind_waits_for_no_response_and_none_keeps_tokens_of_what_is_retired(
    tmp_path: Path, struck: tuple[str, ...]
) -> None:
    """Open responses begin anew, also where the next version is published before the next leader looks."""
    async with rollout_job(tmp_path, managers=1, tokens_max=LONG, step_s=STEP_S) as job:
        await job.trainer.pin(MODEL, 1)
        await until(lambda: has_copy(job.trainer), "version 1 has a copy")
        assert await job.publish() == 2
        rollouts = await job.attach()
        await until_answer(
            rollouts.status, lambda found: [each.version for each in found.instances] == [2] * 3, "all have version 2"
        )
        await job.submit(rollouts, 6)
        await job.until_tokens(rollouts)
        for name in struck:
            job.hub.kill(name)
        assert await job.trainer.rewind(MODEL, to=1) == [2]
        rewound_at = time.monotonic()
        assert await job.publish() == 3
        await job.take_all(rollouts)
        records = job.records()
        last = dict(zip(records["seed"].tolist(), records["at"].tolist(), strict=True))
        # What had ended by then stays as it is.
        open_ = {key for key in job.received if last[request_seed(SEED, *key)] > rewound_at + 1}
        assert open_
        assert {version for key in open_ for version in job.received[key].versions} <= {1, 3}
        job.check()


async def has_copy(hub: tensorhub.AsyncHub) -> bool:
    return bool(await copies_of(hub, MODEL, 1))


@pytest.mark.parametrize("stop_s", [1, 10])
async def test_while_nats_is_gone_nothing_is_assigned_again(tmp_path: Path, stop_s: float) -> None:
    """Runners generate meanwhile; afterwards each response is still its first attempt's."""

    async def attempt(number: int) -> None:
        async with rollout_job(tmp_path / str(number), tokens_max=LONG, step_s=STEP_S) as job:
            rollouts = await job.attach()
            await job.until_serving(rollouts, 3)
            await job.submit(rollouts, 9)
            await job.until_tokens(rollouts)
            await until_answer(rollouts.status, lambda found: not is_any_waiting(found), "all are placed")
            if lost_in(job):
                raise Missed
            with job.hub.stopped("nats"):
                await asyncio.sleep(stop_s)
            await job.take_all(rollouts)
            job.check()
            again = repeats(job.records())
            moved = [each.key for each in job.received.values() if len(each.attempts) > 1]
            assert not moved, (moved, again, lost_in(job))

    await met(attempt, 3)


def lost_in(job: RolloutJob) -> list[str]:
    """Return what the managers have said of runners that they took for lost."""
    managers = sorted(path.stem for path in (job.hub.directory / "logs").glob("rollout-*.log"))
    said = [line for name in managers for line in job.hub.log(name).splitlines()]
    assert said, "a manager says at least that it leads"
    return [line for line in said if "an instance is lost" in line]


async def test_a_prompt_that_kills_each_engine_fails_alone(tmp_path: Path) -> None:
    """All that is generated beside it comes, and it fails once it was tried as often as may be."""
    async with rollout_job(tmp_path, managers=1, FAKE_DIES_OF="666") as job:
        rollouts = await job.attach()
        await job.until_serving(rollouts, 3)
        poison = Prompt([666], id="poison")
        given = [Prompt([1, number], id=f"p{number}") for number in range(8)]
        await rollouts.submit(given[:4])
        await rollouts.submit([poison], group_size=1)
        await rollouts.submit(given[4:])
        job.verdict.submitted |= {str(each.id): job.group_size for each in given} | {"poison": 1}
        job.verdict.may_fail.add("poison")
        await job.take_all(rollouts)
        failed = {key: each for key, each in job.received.items() if each.reason == "failed"}
        assert failed.keys() == {("poison", 0)}
        assert "5 attempts one after the other made no token" in str(failed["poison", 0].error)
        job.check()


async def test_after_a_notice_requests_go_on_elsewhere_and_make_one_token_again_a_move_at_most(tmp_path: Path) -> None:
    """What the machine that goes away has made is taken along, and nothing new begins there."""

    async def attempt(number: int) -> None:
        async with rollout_job(tmp_path / str(number), managers=1, tokens_max=LONG, step_s=STEP_S) as job:
            rollouts = await job.attach()
            await job.until_serving(rollouts, 3)
            await job.submit(rollouts, 6)
            await job.until_tokens_at(rollouts, A, 4)
            pid = job.hub.pid(A)
            os.kill(pid, signal.SIGUSR1)
            await until_answer(
                rollouts.status,
                lambda found: (
                    [(each.pending, each.executing) for each in found.instances if each.state == "leaving"] == [(0, 0)]
                ),
                "nothing is left there",
            )
            drained_at = time.monotonic()
            await job.submit(rollouts, 3)
            await job.take_all(rollouts)
            job.check()
            records = job.records()
            if lost_in(job):
                raise Missed
            # A step that is under way when the engine is told to leave an attempt makes a token that is dropped. What
            # went elsewhere may move once more, to an instance with less to do.
            moves_max = max(len(each.attempts) for each in job.received.values()) - 1
            again = [repeats(records[records["seed"] == seed]) for seed in np.unique(records["seed"])]
            assert max(again) <= moves_max, (again, moves_max)
            assert not len(records[(records["pid"] == pid) & (records["at"] > drained_at)])
            assert any({A, B} <= {run.instance for run in each.runs} for each in job.received.values())

    await met(attempt, 3)
