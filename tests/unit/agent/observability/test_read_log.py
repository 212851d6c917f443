"""Reads that fail, stand still or are slow have one line each, which names sources and trace."""

from collections import Counter

from tests.unit.agent.core.scene import OneAgent

from tensorhub_agent.core.effects import CompleteCall, FailCall
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.observability.read_log import SLOW_BYTES_PER_S, ReadLog
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.worker import ReadReport, ReadStages, SourceReport

KEY = ShardKey("policy", "rollout", 0)
STALL_S, SLOW_S = 5.0, 2.0
ZERO = ReadStages(round_s=0.0, plan_s=0.0, lease_s=0.0, start_s=0.0, first_s=0.0, wire_s=0.0, verify_s=0.0, ready_s=0.0)


def watch() -> tuple[ReadLog, Counter[str]]:
    late: Counter[str] = Counter()
    return ReadLog(STALL_S, SLOW_S, late), late


def trace_of(call: int) -> str:
    return f"7ace{call}"


def reads(agent: OneAgent) -> list[ReadOperation]:
    return [core.operation for core in agent.core.shards.values() if isinstance(core.operation, ReadOperation)]


def reader() -> tuple[OneAgent, ShardKey]:
    """An agent that reads version 1, which is decided; no plan has come."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    trainer.publish(trainer.key("trainer"), "a")
    trainer.log()
    agent = OneAgent("agent-1", catalog=trainer.catalog)
    agent.join()
    agent.register("rollout")
    agent.read(agent.key("rollout"))
    agent.log()
    return agent, agent.key("rollout")


def test_a_read_that_stands_still_is_told_once() -> None:
    agent, key = reader()
    watching, late = watch()
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    assert watching.look(reads(agent), agent.now + STALL_S - 0.1, trace_of) == []
    (line,) = watching.look(reads(agent), agent.now + STALL_S, trace_of)
    assert line == (
        "the read of shard 0 of policy/rollout stands still: nothing of version 1 has come for 5.0 s, after 0.0 MiB of "
        "0.0 MiB; it waits for elsewhere (local) (trace 7ace2)"
    )
    assert watching.look(reads(agent), agent.now + 2 * STALL_S, trace_of) == []
    assert late == {"stalled": 1}
    agent.brought(key, "a")
    agent.log()
    assert watching.look(reads(agent), agent.now, trace_of) == []


def test_a_disk_that_stands_still_is_told() -> None:
    agent, key = reader()
    watching, _ = watch()
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    agent.keeps = False
    agent.brought(key, "a")
    agent.closed(key)
    assert watching.look(reads(agent), agent.now + STALL_S - 0.1, trace_of) == []
    (line,) = watching.look(reads(agent), agent.now + STALL_S, trace_of)
    assert line == (
        "the read of shard 0 of policy/rollout stands still: all of version 1 has come, and its manifest is not "
        "written for 5.0 s: see whether the disk under the agent's state answers (trace 7ace2)"
    )


def test_a_read_without_a_plan_says_that_the_planner_is_silent() -> None:
    agent, _ = reader()
    watching, _ = watch()
    (line,) = watching.look(reads(agent), agent.now + STALL_S, lambda _: None)
    assert line.endswith("stands still: version 1 is decided, and for 5.0 s it has no lease on a source")
    agent.tick(1.5)
    other, _ = watch()
    (line,) = other.look(reads(agent), agent.now + STALL_S, lambda _: None)
    assert "it has no lease on a source: the planner does not answer (nothing came within 1 s)" in line


def report(**rest: object) -> ReadReport:
    sources = (
        SourceReport(agent="agent-2", replica="trainer", transport="local", nbytes=1 << 20, pieces=1, why=""),
        SourceReport(
            agent="agent-3", replica="r", transport="ucxx", nbytes=0, pieces=0, why="", lost="it made no progress"
        ),
    )
    about: dict[str, object] = {"nbytes": 1 << 20, "wire_s": 0.0, "total_s": 60.0, "pieces": 1, "retried": 0, "kept": 0}
    return ReadReport(**{**about, "sources": sources, **rest})  # type: ignore[arg-type]


def staged(**seconds: float) -> ReadReport:
    stages = {name: seconds.get(name, 0.0) for name in ZERO.__struct_fields__}
    return report(stages=ReadStages(**stages))


def test_a_read_that_failed_says_why_and_what_became_of_its_sources() -> None:
    watching, _ = watch()
    assert watching.ended(KEY, FailCall(1, "IntegrityError", "its bytes are wrong", report()), "7ace") == (
        "the read of shard 0 of policy/rollout failed: IntegrityError: its bytes are wrong; sources: "
        "agent-3 (ucxx, 0.0 MiB, left: it made no progress), agent-2 (local, 1.0 MiB) (trace 7ace)"
    )
    assert watching.ended(KEY, FailCall(1, "ReplicaConflict", "it drains"), None) == (
        "the read of shard 0 of policy/rollout failed: ReplicaConflict: it drains"
    )


def test_an_update_that_is_put_off_says_why() -> None:
    watching, _ = watch()
    line = watching.ended(KEY, CompleteCall(call=1, report=report(failure="no source is left", sources=())), None)
    assert line == "the update of shard 0 of policy/rollout is put off: no source is left"


def test_a_read_is_slow_by_what_it_took_for_its_bytes_and_not_by_what_it_waited_for() -> None:
    watching, late = watch()
    bytes_s = (1 << 20) / SLOW_BYTES_PER_S
    assert (
        watching.ended(KEY, CompleteCall(call=1, version=1, report=staged(round_s=3600.0, wire_s=SLOW_S)), None) is None
    )
    line = watching.ended(
        KEY, CompleteCall(call=1, version=1, report=staged(wire_s=SLOW_S + bytes_s, ready_s=11.0)), None
    )
    assert line is not None
    assert line.startswith("the read of shard 0 of policy/rollout was slow: version 1, 1.0 MiB in 13.0 s (plan 0.0, ")
    assert "bytes 2.0, proof 0.0, log 11.0); sources: agent-3" in line
    assert late == {"slow": 1}
    assert watching.ended(KEY, CompleteCall(call=1, version=1), None) is None
