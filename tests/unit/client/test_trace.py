"""`tensorhub trace`: which transfers are listed and chosen, and how it ends."""

import json
from collections.abc import Callable, Collection
from typing import Any

import pytest
from msgspec import structs
from tests.unit.client.given_spans import ABOUT, LOST, TRACE, Story, one_lost_source, span_id
from typer.testing import CliRunner

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli.commands import trace
from tensorhub.cli.main import app
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.introspection.span_query import CollectedSpans
from tensorhub_common.protocol.queries import AgentInfo, Status
from tensorhub_common.protocol.spans import TRANSFER, Attribute, FinishedSpan, SpanLink, SpansAsk, TransfersAsk

EVERYBODY = frozenset({"registry-0", "planner-0", "agent-0", "agent-1"})


class Hub:
    """Answers as all processes of a hub together."""

    def __init__(self) -> None:
        self.spans = one_lost_source()
        self.processes = EVERYBODY
        self.left_out = 0
        self.known = {"agent-0", "agent-1", "registry-0"}
        self.asked: list[TransfersAsk | SpansAsk] = []

    async def gather(self, _: object, job: str, ask: TransfersAsk | SpansAsk, known: Collection[str]) -> CollectedSpans:
        self.asked.append(ask)
        assert known == self.known
        wanted = self.spans if self.processes else []
        if isinstance(ask, TransfersAsk):
            wanted = [each for each in wanted if each.name == TRANSFER and each.span.startswith(ask.begins)]
            wanted = [each for each in wanted if ask.replica in {None, each.attributes.get("tensorhub.replica")}]
        else:
            wanted = [each for each in wanted if ask.trace in {each.trace, *(link.trace for link in each.links)}]
        return CollectedSpans(spans=tuple(wanted), processes=self.processes, left_out=self.left_out)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    async def status(*_: Any) -> Status:
        agents = [
            AgentInfo(agent=f"agent-{n}", host="h", site="s", live=n < 2, incarnation=1, shards=0) for n in range(3)
        ]
        return Status(job="run-7", seq=1, registry="registry-0", term=1, models=(), agents=tuple(agents))

    async def bus(*_: Any) -> None:
        return None

    monkeypatch.setattr(RegistryClient, "status", status)
    monkeypatch.setattr(RegistryClient, "bus", bus)
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    answering = Hub()
    monkeypatch.setattr(trace, "collect_spans", answering.gather)
    return answering


@pytest.fixture
def run(hub: Hub) -> Callable[..., Any]:
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["trace", *arguments, "--job", "run-7"])


def test_the_table_has_the_latest_first(run: Callable[..., Any]) -> None:
    head, first, second = run().stdout.splitlines()
    assert " ".join(head.split()) == (
        "ID MODEL VERSION REPLICA SHARD WHEN TOOK BYTES GB/S TRANSPORTS SOURCES RETRIES END"
    )
    assert "rollout-1" in first
    cells = second.split()
    assert span_id(16).startswith(cells[0])
    assert cells[1:5] == ["policy", "12", "rollout-0", "0"]
    assert cells[7:] == ["200", "ms", "256.0", "MiB", "1.34", "local,ucxx", "2", "3", "done"]


def test_the_wait_for_a_version_is_no_part_of_what_its_transfer_took(hub: Hub, run: Callable[..., Any]) -> None:
    about = {**ABOUT, "bytes": 10**9, "round_s": 59.5, "GBps": 4.25}
    hub.spans = [Story().add(16, None, "transfer", "agent agent-1", 0, 60_000, about=about)]
    assert " 500 ms  953.7 MiB  4.25 " in run().stdout


def test_an_id_is_as_long_as_it_must_be_to_be_the_only_one() -> None:
    story = Story()
    spans = [story.add(number << 8, None, "transfer", "agent a", 0, 1) for number in (0x1000_0000_0000_00, 0x1000_0001)]
    assert trace.short_id(spans[0], spans) == span_id(0x1000_0000_0000_0000)[:8]
    spans.append(structs.replace(spans[0], span=span_id(0x1000_0000_0000_0001)))
    assert trace.short_id(spans[0], spans) == span_id(0x1000_0000_0000_0000)


def test_a_transfer_that_failed_says_so_at_the_end_of_its_line(hub: Hub, run: Callable[..., Any]) -> None:
    hub.spans = [
        Story().add(16, None, "transfer", "agent agent-1", 0, 1, error="VersionUnavailable: gone", about=ABOUT)
    ]
    assert run().stdout.splitlines()[1].endswith("VersionUnavailable: gone")


def test_a_registry_that_does_not_answer_is_told_beside_what_the_others_know(
    hub: Hub, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> Status:
        raise RegistryUnavailable("no registry answered about job 'run-7' within 1 s: see 'tensorhub doctor'")

    hub.known = set()
    monkeypatch.setattr(RegistryClient, "status", silent)
    ended = run()
    assert (ended.exit_code, ended.stdout.count("\n")) == (0, 3)
    assert ended.stderr.count("\n") == 1
    assert "no registry answered about job 'run-7' within 1 s" in ended.stderr


def test_a_job_without_transfers_is_no_error(hub: Hub, run: Callable[..., Any]) -> None:
    hub.spans = []
    ended = run()
    assert (ended.exit_code, ended.stdout.count("\n")) == (0, 1)
    assert "run-7" in ended.stdout


def test_one_transfer_is_drawn_by_the_beginning_of_its_id(hub: Hub, run: Callable[..., Any]) -> None:
    ended = run(span_id(16))
    assert ended.exit_code == 0, ended.stderr
    assert f"transfer {span_id(16)}  policy version 12 to rollout-0, shard 0" in ended.stdout
    assert LOST in ended.stdout
    assert "agent-3" not in ended.stdout
    assert "\x1b" not in ended.stdout
    assert hub.asked[-1] == SpansAsk(trace=TRACE)


def test_a_trace_is_drawn_by_its_whole_id_as_the_log_names_it(run: Callable[..., Any]) -> None:
    whole = run(TRACE)
    assert whole.exit_code == 0, whole.stderr
    assert whole.stdout == run("--version", "12").stdout
    one = run(TRACE, "--replica", "rollout-0")
    assert f"transfer {span_id(16)}  policy version 12 to rollout-0, shard 0" in one.stdout
    assert "agent-3" not in one.stdout


def test_a_trace_without_a_transfer_is_drawn_as_what_there_is(hub: Hub, run: Callable[..., Any]) -> None:
    """A read that failed before a version was decided: the log names its trace."""
    hub.spans = []
    about: dict[str, Attribute] = {"job": "run-7", "model": "policy", "replica": "rollout-9", "shard": 3}
    story = Story("e" * 32, hub.spans)
    error = "VersionUnavailable: no version was to be had"
    story.add(80, None, "wait", "agent agent-1", 0, 10_000, about=about, error=error)
    story.add(81, 80, "update", "sdk 77", 0, 10_001, about=about, error=error)
    ended = run("E" * 32)
    assert ended.exit_code == 0, ended.stderr
    title, *drawn = ended.stdout.splitlines()
    assert title.startswith(f"wait {span_id(80)}  policy to rollout-9, shard 3")
    assert title.endswith(f"failed, trace {'e' * 32}")
    firsts = [line.split()[0] for line in drawn]
    assert firsts == ["SPAN", "wait", "VersionUnavailable:", "update", "VersionUnavailable:"]
    assert drawn[1].endswith("10.0 s")


def test_a_version_is_drawn_with_all_its_transfers(run: Callable[..., Any]) -> None:
    assert "agent-3" in run("--version", "12").stdout
    assert "agent-3" not in run("--version", "12", "--replica", "rollout-0").stdout


def test_what_a_transfer_is_linked_to_is_drawn_too(hub: Hub, run: Callable[..., Any]) -> None:
    published = Story()
    publish = published.add(1, None, "publish", "sdk 1", 0, 1)
    later = Story(trace="f" * 32)
    link = SpanLink(trace=publish.trace, span=publish.span)
    later.add(0xABC, None, "transfer", "agent agent-1", 50, 60, links=(link,), about=ABOUT)
    hub.spans = published.spans + later.spans
    drawn = run(span_id(0xABC)).stdout
    assert "publish" in drawn
    assert drawn.index("publish") < drawn.index("  0  ") or "before" in drawn


@pytest.mark.parametrize("arguments", [["--json"], ["--version", "12", "--json"]])
def test_json_is_one_span_a_line_with_the_same_keys(run: Callable[..., Any], arguments: list[str]) -> None:
    objects = [json.loads(line) for line in run(*arguments).stdout.splitlines()]
    assert {tuple(each) for each in objects} == {FinishedSpan.__struct_fields__}
    assert len(objects) == (2 if arguments == ["--json"] else len(one_lost_source()))


def test_who_did_not_answer_and_what_did_not_fit_is_told_beside_the_picture(hub: Hub, run: Callable[..., Any]) -> None:
    hub.processes, hub.left_out = EVERYBODY - {"agent-1"}, 7
    ended = run("--version", "12")
    assert ended.exit_code == 0
    assert "agent-1 did not answer" in ended.stderr
    assert "7 spans are left out" in ended.stderr


def two_models(hub: Hub) -> None:
    Story(spans=hub.spans).add(77, None, "transfer", "agent a", 0, 1, about={**ABOUT, "model": "critic"})


def without_spans(hub: Hub) -> None:
    hub.processes = frozenset()


LISTED = "'tensorhub trace --job run-7' lists those that are kept"


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (None, ["f" * 32], f"trace {'f' * 32}"),
        (None, [TRACE, "--replica", "nobody"], f"trace {TRACE}"),
        (None, ["beef"], LISTED),
        (None, ["zz/.."], LISTED),
        (None, ["--version", "12", "--replica", "nobody"], LISTED),
        (None, ["0000"], "give more of the id"),
        (two_models, ["--version", "12"], "critic, policy"),
        (without_spans, [], "doctor"),
    ],
)
def test_what_can_not_be_drawn_is_one_line(
    hub: Hub, run: Callable[..., Any], change: Callable[[Hub], None] | None, arguments: list[str], said: str
) -> None:
    if change is not None:
        change(hub)
    ended = run(*arguments)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert said in ended.stderr
