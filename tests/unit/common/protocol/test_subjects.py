"""Subjects: what is built is what is parsed, and nothing widens into a wildcard or another job."""

from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.rollout.entries import AnyEntry, Attach, SdkEntry
from tensorhub_common.protocol.subjects import (
    NAME_CHARS_MAX,
    AgentAskSubject,
    AskSubject,
    BeatSubject,
    BlobSubject,
    CommandSubject,
    EventSubject,
    PayloadSubject,
    RolloutAskSubject,
    RolloutEntrySubject,
    RolloutSnapshotSubject,
    RunnerSubject,
    SnapshotSubject,
    check_name,
    is_name,
    parse_subject,
)

TAKEN = ("BLOBS_", "SNAPSHOTS_", "ROLLOUTS_", "PAYLOADS_")
names = st.from_regex(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,63}", fullmatch=True).filter(lambda n: not n.startswith(TAKEN))
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)

BAD = ["", "a.b", "*", ">", "a b", "a\r\nPUB x 0", "é", "x" * 65, "_x", "a\x00"]
DIGEST = "0123456789abcdef" * 4


V1 = "tensorhub.v1"
SUBJECTS = {
    f"{V1}.run-7.cmd.publish": subjects.command_subject("run-7", "publish"),
    f"{V1}.run-7.cmd.join.agent-0": subjects.command_subject("run-7", "join", "agent-0"),
    f"{V1}.run-7.event.policy.version.published": subjects.event("run-7", "policy", "version", "published"),
    f"{V1}.run-7.event._hub.agent.lost": subjects.event("run-7", "_hub", "agent", "lost"),
    f"{V1}.run-7.cmd.>": subjects.commands_of("run-7"),
    f"{V1}.run-7.event.>": subjects.events_of("run-7"),
    f"{V1}.run-7.event.policy.>": subjects.events_of("run-7", "policy"),
    f"{V1}.run-7.ask.outcome": subjects.query_subject("run-7", "outcome"),
    f"{V1}.*.ask.outcome": subjects.asks_of_all_jobs("outcome"),
    f"{V1}._hub.ask.ping.registry-0": subjects.ping("registry-0"),
    f"{V1}._hub.ask.ping.*": subjects.pings(),
    f"{V1}._hub.agent.agent-0.lease.agent-1": subjects.agent_ask("agent-0", "lease", "agent-1"),
    f"{V1}._hub.agent.agent-0.lease.*": subjects.agent_asks("agent-0", "lease"),
    f"{V1}._hub.agent.*.*.agent-1": subjects.asks_by_agent("agent-1"),
    f"{V1}._hub.agent.agent-0.*.*": subjects.asks_to_agent("agent-0"),
    f"{V1}.run-7.cmd.*": subjects.commands_by_anyone("run-7"),
    f"{V1}.*.cmd.*.agent-0": subjects.commands_of_all_jobs_by("agent-0"),
    f"{V1}.*.cmd.*._registry": subjects.commands_of_all_jobs_by("_registry"),
    f"{V1}._hub.beat.agent-0": subjects.beat("agent-0"),
    f"{V1}._hub.beat.*": subjects.beats(),
    f"{V1}.run-7.blob.{DIGEST}.3": subjects.blob("run-7", DIGEST, 3),
    f"{V1}.run-7.blob.>": subjects.blobs_of("run-7"),
    f"{V1}.run-7.snapshot.{DIGEST}.3": subjects.snapshot("run-7", DIGEST, 3),
    f"{V1}.run-7.snapshot.index": subjects.snapshot_index("run-7"),
    f"{V1}.run-7.snapshot.>": subjects.snapshots_of("run-7"),
    "TENSORHUB_SNAPSHOTS_run-7": subjects.snapshot_stream("run-7"),
    "TENSORHUB_run-7": subjects.log_stream("run-7"),
    "TENSORHUB_BLOBS_run-7": subjects.blob_stream("run-7"),
    "TENSORHUB_ROLLOUTS_run-7": subjects.rollout_stream("run-7"),
    "TENSORHUB_PAYLOADS_run-7": subjects.payload_stream("run-7"),
    f"{V1}.run-7.rollout.submit": subjects.rollout_entry("run-7", "submit"),
    f"{V1}.run-7.rollout.*": subjects.rollout_entries_of("run-7"),
    f"{V1}.*.rollout.lead": subjects.rollout_entries_of_all_jobs("lead"),
    f"{V1}.run-7.rollout.payload.{DIGEST}.3": subjects.payload("run-7", DIGEST, 3),
    f"{V1}.run-7.rollout.payload.{DIGEST}.*": subjects.chunks_of_payload("run-7", DIGEST),
    f"{V1}.run-7.rollout.payload.*.0": subjects.first_chunks_of_payloads("run-7"),
    f"{V1}.run-7.rollout.payload.>": subjects.payloads_of("run-7"),
    f"{V1}.*.rollout.payload.>": subjects.payloads_of_all_jobs(),
    f"{V1}.run-7.rollout.snapshot.{DIGEST}.3": subjects.rollout_snapshot("run-7", DIGEST, 3),
    f"{V1}.run-7.rollout.snapshot.index": subjects.rollout_snapshot_index("run-7"),
    f"{V1}.run-7.rollout.snapshot.>": subjects.rollout_snapshots_of("run-7"),
    f"{V1}.*.rollout.snapshot.>": subjects.rollout_snapshots_of_all_jobs(),
    f"{V1}.run-7.rollout.assign.runner-0": subjects.to_runner("run-7", "assign", "runner-0"),
    f"{V1}.*.rollout.abort.runner-0": subjects.to_runners_of_all_jobs("abort", "runner-0"),
    f"{V1}.*.rollout.abort.*": subjects.to_runners_of_all_jobs("abort"),
    f"{V1}.run-7.rollout.tokens.runner-0": subjects.from_runner("run-7", "tokens", "runner-0"),
    f"{V1}.run-7.rollout.tokens.*": subjects.from_runners_of("run-7", "tokens"),
    f"{V1}.*.rollout.beat.runner-0": subjects.from_runners_of_all_jobs("beat", "runner-0"),
    f"{V1}.*.rollout.beat.*": subjects.from_runners_of_all_jobs("beat"),
    f"{V1}.run-7.rollout.ask.ready": subjects.rollout_ask("run-7", "ready"),
    f"{V1}.*.rollout.ask.ready": subjects.rollout_asks_of_all_jobs("ready"),
}


def test_subjects_are_as_the_protocol_says() -> None:
    assert list(SUBJECTS) == list(SUBJECTS.values())


@given(job=names, one=names, two=names, three=names, digest=digests, index=st.integers(0, 999_999))
def test_parse_undoes_every_function(job: str, one: str, two: str, three: str, digest: str, index: int) -> None:
    assert parse_subject(subjects.command_subject(job, one)) == CommandSubject(job, one)
    assert parse_subject(subjects.command_subject(job, one, two)) == CommandSubject(job, one, two)
    assert parse_subject(subjects.event(job, one, two, three)) == EventSubject(job, one, two, three)
    assert parse_subject(subjects.event(job, subjects.HUB, two, three)) == EventSubject(job, "_hub", two, three)
    assert parse_subject(subjects.blob(job, digest, index)) == BlobSubject(job, digest, index)
    assert parse_subject(subjects.snapshot(job, digest, index)) == SnapshotSubject(job, digest, index)
    assert parse_subject(subjects.snapshot_index(job)) == SnapshotSubject(job)
    assert parse_subject(subjects.query_subject(job, f"{one}.{two}")) == AskSubject(job, f"{one}.{two}")
    assert parse_subject(subjects.hub_ask(one)) == AskSubject(None, one)
    assert parse_subject(subjects.ping(one)) == AskSubject(None, f"ping.{one}")
    assert parse_subject(subjects.agent_ask(one, two, three)) == AgentAskSubject(one, two, three)
    assert parse_subject(subjects.beat(one)) == BeatSubject(one)
    assert subjects.job_of_log(subjects.log_stream(job)) == job


@given(job=names, one=names, two=names, digest=digests, index=st.integers(0, 999_999))
def test_parse_undoes_every_function_of_rollouts(job: str, one: str, two: str, digest: str, index: int) -> None:
    for verb in subjects.ROLLOUT_VERBS:
        assert parse_subject(subjects.rollout_entry(job, verb)) == RolloutEntrySubject(job, verb)
    for what in subjects.MANAGER_MESSAGES:
        assert parse_subject(subjects.to_runner(job, what, one)) == RunnerSubject(job, what, one)
    for what in subjects.RUNNER_MESSAGES:
        assert parse_subject(subjects.from_runner(job, what, one)) == RunnerSubject(job, what, one)
    assert parse_subject(subjects.payload(job, digest, index)) == PayloadSubject(job, digest, index)
    assert parse_subject(subjects.rollout_snapshot(job, digest, index)) == RolloutSnapshotSubject(job, digest, index)
    assert parse_subject(subjects.rollout_snapshot_index(job)) == RolloutSnapshotSubject(job)
    assert parse_subject(subjects.rollout_ask(job, two)) == RolloutAskSubject(job, two)


@given(job=names)
def test_no_other_stream_of_a_job_is_taken_for_a_log(job: str) -> None:
    others = (subjects.blob_stream, subjects.snapshot_stream, subjects.rollout_stream, subjects.payload_stream)
    assert [subjects.job_of_log(stream(job)) for stream in others] == [None] * len(others)
    assert len({stream(job) for stream in (subjects.log_stream, *others)}) == 1 + len(others)


def test_the_verbs_of_the_rollout_log_are_those_of_its_entries() -> None:
    tags = [str(kind.__struct_config__.tag) for kind in get_args(AnyEntry)]
    assert sorted(tags) == sorted(subjects.ROLLOUT_VERBS)
    sdk = {str(kind.__struct_config__.tag) for kind in (Attach, *get_args(SdkEntry))}
    assert sdk == set(subjects.SDK_VERBS)


BUILDERS: list[Callable[[str], str]] = [
    lambda bad: subjects.command_subject(bad, "publish"),
    lambda bad: subjects.command_subject("j", "publish", bad),
    lambda bad: subjects.event("j", bad, "version", "published"),
    subjects.events_of,
    lambda bad: subjects.events_of("j", bad),
    subjects.commands_of,
    lambda bad: subjects.query_subject(bad, "outcome"),
    lambda bad: subjects.agent_ask(bad, "lease", "a"),
    lambda bad: subjects.agent_ask("a", bad, "a") if bad != "_x" else subjects.agent_ask("a", "lease", bad),
    lambda bad: subjects.agent_ask("a", "lease", bad),
    subjects.asks_by_agent,
    subjects.asks_to_agent,
    subjects.commands_by_anyone,
    subjects.commands_of_all_jobs_by,
    subjects.beat,
    subjects.ping,
    subjects.log_stream,
    subjects.blob_stream,
    subjects.blobs_of,
    lambda bad: subjects.blob("j", bad, 0),
    subjects.rollout_stream,
    subjects.payload_stream,
    subjects.payloads_of,
    lambda bad: subjects.rollout_entry(bad, "submit"),
    lambda bad: subjects.rollout_entry("j", bad),
    subjects.rollout_entries_of_all_jobs,
    lambda bad: subjects.payload("j", bad, 0),
    lambda bad: subjects.chunks_of_payload("j", bad),
    lambda bad: subjects.rollout_snapshot("j", bad, 0),
    lambda bad: subjects.to_runner("j", "assign", bad),
    lambda bad: subjects.to_runner("j", bad, "r"),
    lambda bad: subjects.to_runners_of_all_jobs("assign", bad),
    lambda bad: subjects.from_runner("j", "tokens", bad),
    lambda bad: subjects.from_runners_of_all_jobs("tokens", bad),
    lambda bad: subjects.rollout_ask(bad, "ready"),
]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("build", BUILDERS)
def test_names_that_could_reach_elsewhere_are_refused(build: Callable[[str], str], bad: str) -> None:
    with pytest.raises(InvalidName):
        build(bad)


@pytest.mark.parametrize("bad", [each for each in BAD if each not in {"a.b", "_x"}])
@pytest.mark.parametrize(
    "build", [lambda bad: subjects.query_subject("j", bad), lambda bad: subjects.hub_ask(f"ping.{bad}")]
)
def test_questions_may_have_dots_and_nothing_else(build: Callable[[str], str], bad: str) -> None:
    with pytest.raises(InvalidName):
        build(bad)


ELSEWHERE = ["", "tensorhub.v1", "tensorhub.v1.", "tensorhub.v2.j.cmd.publish", "_INBOX.x"]
OF_A_JOB = ["cmd", "cmd.publish.a.b", "cmd.>", "event.m.version", "beat.agent-0", "ask."]
OF_BLOBS = [f"{V1}.j.blob.{DIGEST}.01", f"{V1}.j.blob.{DIGEST[1:]}.1"]
ROLLOUT_WORDS = [
    "",
    "publish",
    "submit.r",
    "assign",
    "assign._r",
    "payload.r",
    "snapshot.0",
    "snapshot.index.0",
    "beat.*",
]
OF_ROLLOUTS = [
    *(f"{V1}.j.rollout.{what}" for what in (*ROLLOUT_WORDS, f"payload.{DIGEST}.01", f"payload.{DIGEST}", "ask.a.b")),
    f"{V1}._hub.rollout.submit",
    f"{V1}.ROLLOUTS_j.rollout.submit",
]
OF_THE_HUB = [f"{V1}.{what}" for what in ("*.cmd.publish", "_hub.cmd.publish", "_hub.event.m.a.b", "_hub.beat._x")]


@pytest.mark.parametrize(
    "subject", [*ELSEWHERE, *(f"{V1}.j.{what}" for what in OF_A_JOB), *OF_BLOBS, *OF_ROLLOUTS, *OF_THE_HUB]
)
def test_what_the_hub_never_says_is_not_parsed(subject: str) -> None:
    with pytest.raises(InvalidName):
        parse_subject(subject)


@pytest.mark.parametrize("stream", ["KV_tensorhub", "TENSORHUB_", "TENSORHUB__x", "TENSORHUB_BLOBS_j", "TENSORHUB_é"])
def test_other_streams_are_no_logs(stream: str) -> None:
    assert subjects.job_of_log(stream) is None


@pytest.mark.parametrize("taken", TAKEN)
def test_no_job_is_called_as_another_stream_of_another_job(taken: str) -> None:
    with pytest.raises(InvalidName, match=taken):
        subjects.log_stream(f"{taken}j")


GOOD = ["a", "A-9_z", "7", "-", "x" * NAME_CHARS_MAX]
NO_NAMES: list[object] = [None, 7, b"a", ["a"], "\n", "a\n", "/", "$SYS", "x" * (NAME_CHARS_MAX + 1)]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert is_name(name)
    assert check_name("model", name) == name


@pytest.mark.parametrize("name", [*NO_NAMES, *(each for each in BAD if each != "_x")])
def test_anything_else_is_refused_before_it_reaches_nats(name: object) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidName, match=r"^model name .* can't be used: take 1 to 64"):
        check_name("model", name)
    with pytest.raises(InvalidName) as told:
        check_name("model", "x" * 100_000)
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("name", ["_", "_hub", "_registry"])
def test_names_of_the_hub_may_stand_in_a_subject_and_users_may_not_give_them(name: str) -> None:
    assert is_name(name)
    with pytest.raises(InvalidName, match="kept for the hub"):
        check_name("replica", name)
