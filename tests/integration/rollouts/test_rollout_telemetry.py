"""What real processes tell of rollouts: a response's trace, `tensorhub trace`, `rollouts why`, and pages of metrics."""

import os
import re
import signal
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest
import pytest_asyncio
from tests.bounds import WAIT_S
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_trainer import MODEL
from tests.chaos.rollout_verdict import SEED
from tests.kit.fake_engine import token_of
from tests.kit.scraping import Samples, scraped
from tests.kit.waiting import until_answer
from tools.docs.metrics_page import prometheus_name

import tensorhub
from tensorhub import Prompt, Sampling, Staleness
from tensorhub_common.introspection.span_query import CollectedSpans, collect_spans
from tensorhub_common.observability.metrics import METRICS
from tensorhub_common.protocol.rollout.payloads import request_seed
from tensorhub_common.protocol.rollout.questions import WhyAnswer
from tensorhub_common.protocol.spans import SpansAsk, TransfersAsk

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutJob]:
    """One hub with two runners, whose processes show their metrics."""
    directory = tmp_path_factory.mktemp("telemetry")
    async with rollout_job(directory, runners=2, managers=1, step_s=0.002, TENSORHUB_METRICS="0") as running:
        yield running


async def generated(job: RolloutJob, name: str, *prompts: Prompt) -> None:
    """Have four responses of each prompt generated, and say that they are done."""
    rollouts = await job.trainer.rollouts(MODEL, name=name, group_size=4, staleness=9)
    await rollouts.submit(prompts, sampling=Sampling(max_tokens=TOKENS, seed=SEED))
    async for batch in rollouts.batches(4, wait_s=WAIT_S):
        await batch.done()
    await rollouts.close()


async def spans_of(job: RolloutJob, group: str, index: int) -> CollectedSpans:
    """Return the spans of one response, once it has all of them."""
    async with await job.hub.bus() as bus:

        async def look() -> CollectedSpans:
            found = (await collect_spans(bus, job.name, TransfersAsk(kind="response", group=group, index=index))).spans
            trace = found[0].trace if found else "f" * 32
            return await collect_spans(bus, job.name, SpansAsk(trace=trace))

        return await until_answer(
            look, lambda found: "delivery" in {each.name for each in found.spans}, "a response is told to its delivery"
        )


@pytest.mark.long
async def test_a_response_is_one_trace_from_its_submission_to_done(job: RolloutJob) -> None:
    await generated(job, "traced", Prompt([1, 2], id="p-1"))
    spans = (await spans_of(job, "p-1", 2)).spans
    (root,) = [each for each in spans if each.parent is None]
    below = [each for each in spans if each.parent == root.span]
    assert {root.trace} == {each.trace for each in spans}
    assert {each.name for each in below} - {"queue"} == {"attempt", "store", "delivery"}
    assert len(below) == len(spans) - 1
    assert (root.service, root.instance, root.error) == ("tensorhub-rollout", "rollout-0", None)
    expected = {"job": job.name, "model": MODEL, "consumer": "traced", "group": "p-1", "index": 2, "tokens": TOKENS}
    assert {name: root.attributes[f"tensorhub.{name}"] for name in expected} == expected
    (attempt,) = [each for each in below if each.name == "attempt"]
    assert attempt.attributes["tensorhub.instance"] in {"runner-0", "runner-1"}
    assert attempt.attributes["tensorhub.versions"] == ("1",)
    assert attempt.attributes["tensorhub.why"], "the policy says why it placed it there"
    assert (attempt.attributes["tensorhub.tokens"], attempt.attributes["tensorhub.end"]) == (TOKENS, "completed")
    # The trainer's call is a trace of its own, which its agent keeps.
    (link,) = root.links
    async with await job.hub.bus() as bus:
        caused = await until_answer(
            lambda: collect_spans(bus, job.name, SpansAsk(trace=link.trace)),
            lambda found: any(each.span == link.span for each in found.spans),
            "the trainer's call is kept",
        )
    (submit,) = [each for each in caused.spans if each.span == link.span]
    assert (submit.name, submit.service, submit.parent) == ("submit", "tensorhub-sdk", None)
    assert submit.attributes["tensorhub.groups"] == 1


@pytest.mark.long
async def test_a_response_is_listed_and_drawn_by_the_command(job: RolloutJob) -> None:
    await generated(job, "drawn", Prompt([1, 2], id="p-2"))
    wanted = {("p-2", str(index)) for index in range(4)}
    # On a busy machine a process may not answer in time, and is told on stderr.
    await until_answer(
        lambda: job.hub.command("trace", "--responses", "--job", job.name),
        lambda ended: {tuple(line.split()[:2]) for line in ended[1].splitlines()} >= wanted,
        "the responses are listed",
    )
    code, drawn, _ = await until_answer(
        lambda: job.hub.command("trace", "--response", "p-2/0", "--job", job.name),
        lambda ended: all(name in ended[1] for name in ("submit", "delivery")),
        "the response is drawn",
    )
    assert code == 0
    names = [line.split()[0] for line in drawn.splitlines()]
    assert (names[0], names[1]) == ("response", "SPAN")
    assert {"submit", "response", "attempt", "store", "delivery"} <= set(names)
    assert f"tokens 0 to {TOKENS} on version 1" in drawn
    assert "  placed: " in drawn, "the policy says why"


async def test_each_process_of_rollouts_shows_what_the_documentation_says_that_it_has(job: RolloutJob) -> None:
    """Responses of both kinds bring all figures about, but those of what goes wrong."""
    manager, runners = "rollout-0", ("runner-0", "runner-1")
    before = await scraped(job.hub, manager)
    await generated(job, "counted", Prompt([1, 2], id="p-3"), Prompt([3], id="p-4"))
    rollouts = await job.trainer.rollouts(MODEL, name="cancelled")
    (group,) = await rollouts.submit([Prompt([7])], sampling=Sampling(max_tokens=100_000))
    await rollouts.cancel(group)
    async for batch in rollouts.batches(1, wait_s=WAIT_S):
        await batch.done()
    after = await scraped(job.hub, manager)
    shown = {process: await scraped(job.hub, process) for process in runners}
    wrong = {"tensorhub_rollout_tokens_discarded_total"}
    for metric in METRICS.values():
        pages = {"rollout": [after], "runner": list(shown.values())}.get(metric.role, [])
        name = prometheus_name(metric)
        for page in pages:
            names = {each for each, _ in page}
            assert (f"{name}_count" if metric.kind == "histogram" else name) in names | wrong, name

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset({"job": job.name, **labels}.items()))
        return after[key] - before.get(key, 0.0)

    assert after["tensorhub_rollout_leads", frozenset()] == 1
    assert grown("tensorhub_rollout_responses_total", reason="length") == 8
    assert grown("tensorhub_rollout_responses_total", reason="cancelled") == 1
    assert grown("tensorhub_rollout_response_tokens_total") == 8 * TOKENS
    assert grown("tensorhub_rollout_tokens_total") >= 8 * TOKENS
    assert grown("tensorhub_rollout_tokens_done_total", age="0") == 8 * TOKENS
    assert (grown("tensorhub_rollout_response_age_count"), grown("tensorhub_rollout_response_age_sum")) == (8, 0)
    assert (grown("tensorhub_rollout_group_age_count"), grown("tensorhub_rollout_group_age_sum")) == (2, 0)
    assert after[instances(job, "serving")] == 2
    assert after[requests(job, "ended")] == after[requests(job, "waiting")] == 0
    made = sum(page["tensorhub_runner_tokens_total", frozenset()] for page in shown.values())
    assert made >= after["tensorhub_rollout_response_tokens_total", frozenset({("job", job.name)})]
    for process, page in shown.items():
        assert page["tensorhub_runner_version", frozenset()] == 1
        assert page["tensorhub_runner_load_pause_seconds_count", frozenset()] == 1
        await until_answer(
            partial(scraped, job.hub, process),
            lambda page: sum_of(page, "tensorhub_runner_attempts") == 0,
            "a runner forgets what has ended",
        )


def instances(job: RolloutJob, state: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return "tensorhub_rollout_instances", frozenset({("job", job.name), ("model", MODEL), ("state", state)})


def requests(job: RolloutJob, state: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return "tensorhub_rollout_requests", frozenset({("job", job.name), ("state", state)})


def sum_of(page: Samples, name: str) -> float:
    return sum(value for (each, _), value in page.items() if each == name)


@pytest.mark.long
async def test_responses_that_begin_anew_are_counted_with_what_that_costs(job: RolloutJob) -> None:
    """New weights come while a response is generated that asks to begin anew then."""
    # With a rule that allows older versions an instance may stay on its own until the response is made.
    rollouts = await job.trainer.rollouts(MODEL, name="anew", staleness=0, on_update="restart")
    await rollouts.submit([Prompt([5], id="p-5")], sampling=Sampling(max_tokens=3000, seed=SEED))
    await job.until_tokens(rollouts)
    term = (await rollouts.status()).term
    await job.publish()
    (batch,) = [each async for each in rollouts.batches(1, wait_s=WAIT_S)]
    (response,) = batch.responses
    await batch.done()
    assert set(response.versions) == {2}
    # It is as new as can be, and its group is of a step before.
    count = len(response.token_ids)
    assert batch.staleness == Staleness({0: count}, {0: 1}, {0: 1}, since_submit={1: 1})
    page = await scraped(job.hub, "rollout-0")
    key = ("tensorhub_rollout_tokens_discarded_total", frozenset({("job", job.name), ("why", "restart")}))
    assert page[key] > 0
    spans = (await spans_of(job, "p-5", 0)).spans
    ends = [str(each.attributes["tensorhub.end"]) for each in spans if each.name == "attempt"]
    assert ends[-1] == "completed"
    # A manager that led anew meanwhile does not know the attempts before.
    assert "restart" in ends or (await rollouts.status()).term > term


@pytest.mark.long
async def test_a_response_that_is_too_old_begins_anew_and_has_the_same_tokens(job: RolloutJob) -> None:
    """A version is published while it is generated. It goes on by itself, but for `max_age`."""
    rollouts = await job.trainer.rollouts(MODEL, name="aged", staleness=9, max_age=0)
    await rollouts.submit([Prompt([6], id="p-8")], sampling=Sampling(max_tokens=2000, seed=SEED))
    await job.until_tokens(rollouts)
    newest = job.version
    await job.publish()
    (batch,) = [each async for each in rollouts.batches(1, wait_s=WAIT_S)]
    (response,) = batch.responses
    await batch.done()
    seed = request_seed(SEED, "p-8", 0)
    assert response.token_ids.tolist() == [token_of(seed, position) for position in range(2000)]
    assert {run.version for run in response.runs} == {newest + 1}
    assert (response.age, batch.staleness.tokens, batch.staleness.since_submit) == (0, {0: 2000}, {1: 1})
    page = await scraped(job.hub, "rollout-0")
    key = ("tensorhub_rollout_tokens_discarded_total", frozenset({("job", job.name), ("why", "age")}))
    assert page[key] > 0
    await rollouts.close()


@pytest.mark.long
async def test_a_runner_that_is_told_to_end_does_so_orderly_and_comes_back_with_what_it_held(job: RolloutJob) -> None:
    """Its wait for a newer version goes on at its agent for a while: that is no error, and no reason to be in it."""
    pid = job.hub.pid("runner-1")
    os.kill(pid, signal.SIGTERM)
    await job.hub.until_back("runner-1", pid)
    log = job.hub.log("runner-1")
    assert re.search(r"\] ended ", log)
    assert "tensorhub-runner: " not in log
    await generated(job, "after", Prompt([1, 2], id="p-6"))


async def asked_why(job: RolloutJob, *arguments: str) -> WhyAnswer:
    """Return what `tensorhub rollouts why` says of a group to programs."""
    code, out, err = await job.hub.command("rollouts", "why", *arguments, "--json", "--job", job.name)
    assert code == 0, err
    return msgspec.json.decode(out, type=WhyAnswer)


@pytest.mark.long
async def test_why_tells_of_an_open_and_of_an_ended_response_until_it_is_done(job: RolloutJob) -> None:
    rollouts = await job.trainer.rollouts(MODEL, name="why", group_size=2)
    (group,) = await rollouts.submit([Prompt([7], id="p-5")], sampling=Sampling(max_tokens=100_000))
    answer = await until_answer(
        lambda: asked_why(job, "p-5"),
        lambda found: all((each.state, each.waits_for) == ("executing", None) for each in found.requests),
        "both responses are generated",
    )
    assert [(each.consumer, each.index) for each in answer.requests] == [("why", 0), ("why", 1)]
    for each in answer.requests:
        assert all(before.end == "stopped" and before.withdrawn_why for before in each.attempts[:-1])
        assert all(attempt.reason for attempt in each.attempts), "the policy says why it placed it there"
        attempt = each.attempts[-1]
        assert attempt.instance in {"runner-0", "runner-1"}
        assert (attempt.end, attempt.withdrawn_why, attempt.tokens_to) == (None, "", each.tokens)
        assert attempt.first_token_s is not None
        assert 0 <= attempt.first_token_s <= attempt.lasted_s == attempt.placed_s_ago
        assert each.expected is not None
        assert 0 < each.tokens <= each.expected.median <= each.expected.p90
    asked = await rollouts.why("p-5", 1)
    assert isinstance(asked, tensorhub.WhyAnswer)
    assert [(each.consumer, each.index, each.state) for each in asked.requests] == [("why", 1, "executing")]
    assert asked.requests[0].attempts[0].reason == answer.requests[1].attempts[0].reason
    assert len((await rollouts.why("p-5")).requests) == 2
    with pytest.raises(tensorhub.BadCommand, match="has no group 'p-77': not done yet are p-5"):
        await rollouts.why("p-77")
    with pytest.raises(tensorhub.BadCommand, match="responses 0 to 1, and no 2"):
        await rollouts.why("p-5", 2)
    with pytest.raises(tensorhub.BadCommand, match="index=-1 is not possible: take a whole number from 0"):
        await rollouts.why("p-5", -1)
    reasons = {each.index: each.attempts[0].reason for each in answer.requests}
    code, shown, _ = await job.hub.command("rollouts", "why", "p-5", "1", "--job", job.name)
    assert code == 0
    assert reasons[1] in shown
    code, _, said = await job.hub.command("rollouts", "why", "p-77", "--job", job.name)
    assert (code, "has no group 'p-77': not done yet are p-5" in said) == (1, True)
    await rollouts.cancel(group)
    answer = await until_answer(
        lambda: asked_why(job, "p-5", "1"), lambda found: found.requests[0].state == "ended", "it has ended"
    )
    (ended,) = answer.requests
    assert (ended.index, ended.ended_by, ended.expected) == (1, "cancelled", None)
    assert (ended.attempts[0].reason, ended.attempts[-1].end) == (reasons[1], "closed")
    async for batch in rollouts.batches(2, wait_s=WAIT_S):
        await batch.done()
    await until_answer(lambda: asked_why(job, "p-5"), lambda found: found.is_done, "all is done")
    await rollouts.close()
