"""One job's trouble costs no other job anything: a hundred jobs in one registry, of which some can't go on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.registry.conftest import WISH, Passing, Stage, WatchedJob, asked
from tests.kit.nats import RunningNats
from tests.kit.waiting import until, until_answer

from tensorhub.cli.doctor import hub_checks
from tensorhub_common import errors
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer, NoResponder, SnapshotBroken
from tensorhub_common.catalog.handlers import membership
from tensorhub_common.config.settings import load
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.introspection import ping
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.job_log import JobLog, list_jobs
from tensorhub_common.jetstream.job_log import open_job as open_log
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.jetstream.snapshot_store import SnapshotStore
from tensorhub_common.log_follower import job_list, restore
from tensorhub_common.log_follower.set_aside import RetryLimits
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import DeleteJob, Join, Lead, Sender
from tensorhub_common.protocol.log.events import AgentForgotten, AgentLost, JobDeleted
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import Health, JobHealth, QueryError, Status
from tensorhub_common.runtime.supervision import fault_counts
from tensorhub_registry.app import release_survey, service
from tensorhub_registry.app.service import Registry
from tensorhub_registry.core import agent_forgetting, snapshot_policy
from tensorhub_registry.core.job_fold import JobFold
from tensorhub_registry.jobs import deletion
from tensorhub_registry.jobs import job as driven
from tensorhub_registry.jobs.deletion import JobDeletion
from tensorhub_registry.jobs.log_writer import LogWriter
from tensorhub_registry.jobs.snapshot_maker import SnapshotMaker
from tensorhub_registry.jobs.term_claim import TermClaim

JOBS = 100
LEADERLESS_AGENTS = 30
"""Each would hold up the words about all other jobs' agents for two seconds."""


class SilentStreams(Passing):
    """A registry's bus, on which the streams of some jobs have no leader: nobody answers what is asked of them."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.leaderless: set[str] = set()

    async def lose_leader(self, job: str) -> None:
        """From now on nobody answers about this job's streams, and nothing comes from them."""
        self.leaderless.add(job)
        stream = subjects.log_stream(job)
        for consumer in (await api.api(self._bus, f"CONSUMER.NAMES.{stream}", {}))["consumers"]:
            await api.api(self._bus, f"CONSUMER.DELETE.{stream}.{consumer}")

    async def _answer(self, ask: Callable[..., Awaitable[Any]], subject: str, *args: Any, **more: Any) -> Any:
        tokens = {token.rpartition("_")[2] for token in subject.split(".")}
        if tokens.isdisjoint(self.leaderless):
            return await ask(subject, *args, **more)
        timeout_s = args[1] if len(args) > 1 else more.get("timeout_s", 2.0)
        await asyncio.sleep(timeout_s)
        raise NoAnswer(f"no answer on {subject} within {timeout_s:g} s")

    async def request(self, *args: Any, **more: Any) -> Any:
        return await self._answer(self._bus.request, *args, **more)

    async def request_message(self, *args: Any, **more: Any) -> Any:
        return await self._answer(self._bus.request_message, *args, **more)


@dataclass
class InProcess:
    bus: SilentStreams
    registry: Registry
    faults_before: Mapping[str, int] = field(default_factory=fault_counts)


@asynccontextmanager
async def registry_in(url: str) -> AsyncIterator[InProcess]:
    settings = load({"TENSORHUB_NATS": url, "TENSORHUB_BEAT_S": "0.2", "TENSORHUB_LOST_AFTER_S": "1"})
    async with await connect(url, name="registry") as bus:
        silent = SilentStreams(bus)
        registry = Registry(silent, settings)  # type: ignore[arg-type]  # It passes all else on.
        running = asyncio.create_task(registry.run())
        try:
            await until(lambda: registry.leads, "the registry leads")
            yield InProcess(silent, registry)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await registry.close()


async def health(bus: Bus, job: str | None = None) -> Health:
    subject = subjects.hub_ask("health.registry") if job is None else subjects.query_subject(job, "health.registry")
    found: Health = await asked(bus, subject, Health)
    return found


async def states(bus: Bus) -> dict[str, str]:
    return {each.job: each.state for each in (await health(bus)).jobs}


async def wait_states(bus: Bus, expected: dict[str, str]) -> None:
    await until_answer(lambda: states(bus), lambda found: found == expected, f"these jobs are not well: {expected}")


async def made(bus: Bus, names: list[str]) -> None:
    for name in names:
        await BlobStore(bus).open(name)
        await open_log(bus, name)


async def spoil(bus: Bus, job: str) -> None:
    """Put an event into a job's log that no registry has decided."""
    said = b'{"kind":"agent.drained","cmd":1,"i":1,"k":1,"time":1.0,"by":null,"agent":"nobody"}'
    await bus.publish(f"tensorhub.v1.{job}.event._hub.agent.drained", said)


@pytest.mark.long
async def test_a_hundred_jobs_of_which_two_can_not_go_on(stage: Stage) -> None:
    """In the others every command has its outcome, questions are answered, and silent agents are lost meanwhile."""
    names = [f"job-{number}" for number in range(JOBS - 2)]
    await made(stage.bus, [*names, "spoilt", "leaderless"])
    leaderless = JobLog(stage.bus, "leaderless")
    for number in range(LEADERLESS_AGENTS):
        join = Join(by=Sender(f"agent-{number}", 1, 1), host="h", site="s")
        await leaderless.append(f"tensorhub.v1.leaderless.cmd.join.agent-{number}", encode(join), f"{number}")
    async with registry_in(stage.nats.url) as running:
        watched = [await stage.open(name) for name in names]
        jobs = running.registry.jobs
        await until(
            lambda: "leaderless" in jobs and len(jobs["leaderless"].fold.catalog.agents) >= LEADERLESS_AGENTS,
            "its agents are known",
        )
        await running.bus.lose_leader("leaderless")
        await spoil(stage.bus, "spoilt")
        await wait_states(stage.bus, {"spoilt": "set-aside", "leaderless": "waiting"})
        for job in watched:
            await job.say(Join(by=Sender("silent", 1, 1), host="h", site="s"))
        for job in watched:
            await job.answered()
            answer = await stage.bus.request(subjects.query_subject(job.name, "status"), b"", 2.0)
            assert msgspec.json.decode(answer, type=Status).job == job.name
        for job in watched:
            await job.wait_for(partial(_is_lost, job), f"the silent agent of {job.name} is lost")
        assert await states(stage.bus) == {"spoilt": "set-aside", "leaderless": "waiting"}
        running.bus.leaderless.clear()
        await wait_states(stage.bus, {"spoilt": "set-aside"})
        again = await stage.open("leaderless")
        await again.answered()


def _is_lost(job: WatchedJob) -> bool:
    return any(isinstance(event, AgentLost) for event in job.events)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what was set aside tried again at once, and less often by no means."""
    monkeypatch.setattr(service, "RETRY", RetryLimits(first_s=0.1, max_s=0.2))


FAULTS: list[tuple[type, str]] = [
    (JobFold, "handle"),
    (LogWriter, "store"),
    (TermClaim, "begin"),
    (SnapshotMaker, "learn"),
    (SnapshotMaker, "look"),
]
"""What folds, what publishes, what says who leads, what keeps snapshots."""
TAKE_LONG = FAULTS[0], FAULTS[3]


class Sabotage:
    def __init__(self, patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        self.tries = 0
        works = getattr(kind, name)

        def broken(part: Any, *args: Any) -> Any:
            if (part.job if isinstance(part, JobFold) else part._log.job) != "ailing":
                return works(part, *args)
            self.tries += 1
            raise RuntimeError("it is broken")

        patch.setattr(kind, name, broken)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind, name, id=f"{kind.__name__}.{name}", marks=[pytest.mark.long] if (kind, name) in TAKE_LONG else []
        )
        for kind, name in FAULTS
    ],
)
async def test_a_fault_sets_that_job_aside_until_it_is_mended(
    kind: type, name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever an error escapes in one job, its neighbour goes on; once it is mended the job does too."""
    await made(stage.bus, ["ailing"])
    newest, is_tried, may_go_on = restore.newest_snapshot, asyncio.Event(), asyncio.Event()

    async def held(bus: Bus, job: str, seq: int) -> Any:
        is_tried.set()
        await may_go_on.wait()
        return await newest(bus, job, seq)

    unanswered = await JobLog(stage.bus, "ailing").append(
        subjects.command_subject("ailing", "publish"), encode(WISH), "1"
    )
    with monkeypatch.context() as patch:
        sabotage = Sabotage(patch, kind, name)
        async with registry_in(stage.nats.url):
            neighbour = await stage.open("neighbour")
            await until(lambda: _is_told(stage.bus), "it is said that the job is set aside, why, and what to do")
            await until(lambda: _is_refused(stage.bus), "a question about it is refused")
            await neighbour.answered()
            tries = sabotage.tries
            await until(lambda: sabotage.tries >= tries + 2, "the job is tried again, and again")
            patch.setattr(restore, "newest_snapshot", held)
            async with asyncio.timeout(WAIT_S):
                await is_tried.wait()
            assert await _is_told(stage.bus)
            patch.undo()
            may_go_on.set()
            await wait_states(stage.bus, {})
            ailing = await stage.open("ailing")
            await ailing.outcome(unanswered)
            await ailing.answered()
            await ailing.wait_settled()


async def test_doctor_names_a_job_that_is_set_aside_and_says_what_to_do(
    own_nats_server: RunningNats, own_bus: Bus, tmp_path: Path
) -> None:
    await made(own_bus, ["spoilt"])
    settings = load({"TENSORHUB_DIR": str(tmp_path)})
    async with registry_in(own_nats_server.url):
        await spoil(own_bus, "spoilt")
        await wait_states(own_bus, {"spoilt": "set-aside"})
        for job in ("spoilt", "another"):
            said = [each async for each in hub_checks.hub(settings, job, own_nats_server.url) if each.check == "job"]
            assert [each.level for each in said] == ["fail"]
            assert said[0].found.startswith("job spoilt is set aside by registry-0: ")
            assert "it is tried again in" in said[0].found or "its next try is due" in said[0].found
            assert said[0].advice == (
                "run one release of the registry everywhere, and look who may write events (docs/operate/security.md)"
            )


async def _is_told(bus: Bus) -> bool:
    (found,) = (await health(bus, "ailing")).jobs
    is_aside = found.state == "set-aside" and 0 < found.since <= found.again_at
    return is_aside and "it is broken" in found.why and "report it" in found.advice


async def _is_refused(bus: Bus) -> bool:
    """Ask about the job; between two tries it may be answered for a moment."""
    with contextlib.suppress(NoAnswer, NoResponder):
        answer = await bus.request(subjects.query_subject("ailing", "status"), b"", 5.0)
        said = msgspec.json.decode(answer, type=QueryError | Status)
        return isinstance(said, QueryError) and said.error == "RegistryUnavailable" and "it is broken" in said.message
    return False


async def test_questions_about_a_job_that_can_not_be_read_keep_no_other_one_waiting(stage: Stage) -> None:
    """Each of them waits five seconds for the log, and hundreds of them could take up all that is answered at once."""
    await made(stage.bus, ["leaderless"])
    async with registry_in(stage.nats.url) as running:
        job = await stage.open("well")
        await running.bus.lose_leader("leaderless")
        running.registry.jobs["leaderless"].stand_down()
        running.registry.jobs["leaderless"].lead(running.registry.jobs["well"].term or 0)
        inbox = stage.bus.new_inbox()
        for _ in range(400):
            for what in ("status", "versions", "replicas", "story", "outcome", "open"):
                await stage.bus.publish(subjects.query_subject("leaderless", what), b"{}", reply=inbox)
        answer = await stage.bus.request(subjects.query_subject("well", "status"), b"", 2.0)
        assert msgspec.json.decode(answer, type=Status).job == job.name
        (found,) = (await health(stage.bus, "well")).jobs
        assert found == JobHealth(job="well", state="well", seq=found.seq)


async def test_two_deleted_jobs_are_forgotten_while_others_look_for_theirs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question about an unknown job looks at all jobs again, while the two are on their way out."""
    async with registry_in(stage.nats.url) as running:
        for name in ("one", "two"):
            job = await stage.open(name)
            deleted = await job.outcome(await job.say(DeleteJob()))
            assert isinstance(deleted[0], JobDeleted)
            await job.close()
        monkeypatch.setattr(deletion, "TOMBSTONES_MAX", 0)
        ask = subjects.query_subject("unknown", "status")
        answers = await asyncio.gather(*(stage.bus.request(ask, b"", 10.0) for _ in range(2)))
        assert {msgspec.json.decode(each, type=QueryError).error for each in answers} == {"VersionUnavailable"}
        await until_answer(lambda: list_jobs(stage.bus), lambda found: found == [], "the deleted jobs are forgotten")
        assert running.registry.jobs == {}
        assert fault_counts() == running.faults_before


async def test_an_index_of_snapshots_that_can_not_be_read_is_written_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log still reaches back to its beginning, so the job folds on, and a snapshot is kept again."""
    await made(stage.bus, ["ailing"])
    monkeypatch.setattr(snapshot_policy, "SNAPSHOT_ENTRIES_MAX", 4)
    snapshots = SnapshotStore(stage.bus, "ailing")
    await snapshots._open()
    await snapshots._store_index(b"no index")
    async with registry_in(stage.nats.url):
        ailing = await stage.open("ailing")
        for _ in range(10):
            await ailing.answered()

        async def is_kept() -> bool:
            with contextlib.suppress(SnapshotBroken):
                return await SnapshotStore(stage.bus, "ailing").index((await ailing.log.extent()).created) is not None
            return False

        await until(is_kept, "a snapshot is kept")
        assert await states(stage.bus) == {}


async def test_a_silent_agent_is_lost_and_by_and_by_forgotten(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is said in the job meanwhile: its leader forgets what was lost long ago, and so the list ends."""
    monkeypatch.setattr(membership, "SPOT_KEPT_S", 0.2)
    monkeypatch.setattr(agent_forgetting, "MARGIN_S", 0.1)
    monkeypatch.setattr(driven, "LOOK_S", 0.1)
    async with registry_in(stage.nats.url) as running:
        job = await stage.open("ailing")
        await job.say(Join(by=Sender("silent", 1, 1), host="h", site="s"))
        await job.wait_for(lambda: any(isinstance(event, AgentForgotten) for event in job.events), "it is forgotten")
        await job.wait_settled()
        assert [event.agent for event in job.events if isinstance(event, AgentLost | AgentForgotten)] == ["silent"] * 2
        assert running.registry.jobs["ailing"].fold.catalog.agents == {}


async def test_a_fault_while_a_deleted_job_is_cleared_up_leaves_it_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no job that is set aside; its questions are answered again once the registry has looked for it anew."""
    monkeypatch.setattr(job_list, "LIST_S", 0.2)
    broken: list[str] = []
    clear = JobDeletion._clear

    async def breaks_once(self: JobDeletion, fold: JobFold) -> None:
        if not broken:
            broken.append(fold.job)
            raise RuntimeError("it is broken")
        await clear(self, fold)

    monkeypatch.setattr(JobDeletion, "_clear", breaks_once)
    async with registry_in(stage.nats.url) as running:
        job = await stage.open("one")
        await job.say(DeleteJob())

        gone = errors.gone("one")
        told = QueryError(error=gone.code, message=str(gone))
        await until(lambda: fault_counts() != running.faults_before, "the clearing up fails")
        await until_answer(
            lambda: job.ask("status", QueryError | Status), lambda found: found == told, "it is told", 10.0
        )
        assert await states(stage.bus) == {}


@pytest.mark.long
async def test_the_lease_goes_to_a_newer_registry_that_can_lead_a_raised_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that can't fold a raised job blocked it for as long as it led, and a newer one stood by."""
    monkeypatch.setattr(release_survey, "LOOK_S", 0.1)
    monkeypatch.setattr(service, "GIVE_WAY_LOOK_S", 0.1)
    async with registry_in(stage.nats.url) as running:
        registry = running.registry
        raised = await stage.open("raised")
        lead = Lead(by=Sender("_registry", 99, 0), registry="registry-9", term=99, level=NEWEST_LEVEL + 1)
        await raised.log.append("tensorhub.v1.raised.cmd.lead._registry", encode(lead), "raise")
        await wait_states(stage.bus, {"raised": "set-aside"})
        assert registry.leads
        async with await connect(stage.nats.url, name="registry-9") as bus:
            newer = LeaderLease(bus, service.LEASE_KEY, "registry-9", 2)
            await newer.start()
            with monkeypatch.context() as patch:
                patch.setattr(ping, "NEWEST_LEVEL", NEWEST_LEVEL + 1)
                await ping.answer_follower_survey(bus, "registry-9", "registry")
            assert await newer.wait(held=True, timeout_s=20.0)
            await until(lambda: not registry.leads, "it is given away")
            await newer.close()
            await until(lambda: registry.leads, "the lease that nobody has is taken again")
            await asyncio.sleep(10 * service.GIVE_WAY_LOOK_S)
            assert registry.leads


async def test_a_process_that_is_stopped_counts_when_a_job_is_to_be_raised(
    own_nats_server: RunningNats, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows a lower level, and goes on with its jobs when it is woken; one that is gone counts no more."""
    found = release_survey.ReleaseSurvey(own_bus, None)
    async with await connect(own_nats_server.url, name="planner-7") as bus:
        with monkeypatch.context() as patch:
            patch.setattr(ping, "NEWEST_LEVEL", 0)
            service_of = await ping.answer_follower_survey(bus, "planner-7", "planner")
        await ping.answer_pings(bus, "planner-7", "planner")
        assert [pong.id for pong in await found.behind(NEWEST_LEVEL)] == ["planner-7"]
        await ping.answer_follower_survey(own_bus, "registry-0", "registry")
        await service_of.close()
        assert [pong.id for pong in await found.behind(NEWEST_LEVEL)] == ["planner-7"]
        assert await found.level_for_new_jobs() == 0
    assert await found.behind(NEWEST_LEVEL) == []
    assert await found.level_for_new_jobs() == NEWEST_LEVEL


@pytest.mark.long
async def test_no_job_is_raised_where_no_process_says_what_it_knows(own_bus: Bus) -> None:
    """The registry itself answers, so its question has been lost."""
    with pytest.raises(RegistryUnavailable, match="call again"):
        await release_survey.ReleaseSurvey(own_bus, None).behind(NEWEST_LEVEL)


@pytest.mark.long
async def test_a_fault_elsewhere_ends_the_process_with_one_line(stage: Stage) -> None:
    """The core that watches all jobs' agents fails: nothing can go on without it, and a new process can."""
    registry = await stage.started(module="tests.integration.registry.faulty_registry")
    async with asyncio.timeout(20):
        assert await registry.process.wait() == 1
    last = registry.log.read_text().splitlines()[-1]
    assert last.startswith(
        "tensorhub-registry: registry 'registry-0': looking for lost agents failed: ArithmeticError("
    )
    assert last.endswith("This is a fault of TensorHub: report it")
    after = await stage.started("registry-1")
    await after.wait_ready(stage.bus)
