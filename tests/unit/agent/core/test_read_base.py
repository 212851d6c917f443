"""From which version a read may take patches: one that stands whole in what it overwrites, and no other."""

import pytest
from tests.unit.agent.core.scene import OneAgent, digests_of

from tensorhub_agent.core.effects import BatchDone, CompleteCall, ReadBatch, RequestLease
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.rates.link_rates import SLOW_SAMPLES_MIN, LinkSample
from tensorhub_common.protocol.log.commands import Unpublish
from tensorhub_common.protocol.worker import EncodedBytes


def pair(
    *, staged: bool = False, mapped: bool = False, digests: bool = True, encodings: bool = True
) -> tuple[OneAgent, OneAgent, ShardKey]:
    trainer = OneAgent("elsewhere", digests=digests)
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog, digests=digests, encodings=encodings)
    reader.join()
    publish(trainer, "a")
    return trainer, reader, reader.register("rollout", staged=staged, mapped=mapped)


def publish(trainer: OneAgent, text: str) -> None:
    key = trainer.key("trainer")
    if trainer.memory(key) is MemoryState.READY:
        trainer.unpublish(key)
        trainer.log()
    trainer.publish(key, text)
    trainer.log()


def asked(reader: OneAgent, key: ShardKey) -> RequestLease:
    """Begin to read, up to the question for a lease."""
    reader.read(key)
    reader.log()
    reader.plan(key)
    opening = reader.last(RequestLease)
    assert opening is not None
    return opening


def read(reader: OneAgent, key: ShardKey, text: str, *encoded: EncodedBytes) -> None:
    asked(reader, key)
    reader.opened(key, text)
    reader.log()
    post = reader.last(ReadBatch)
    assert post is not None
    reader.do(reader.core.on_outcome(BatchDone(key, post.source, post.batch, digests_of(text), encoded), reader.now))
    reader.log()
    assert reader.memory(key) is MemoryState.READY


@pytest.mark.parametrize("staged", [False, True])
def test_what_stood_there_before_is_the_base(staged: bool) -> None:  # noqa: FBT001
    trainer, reader, key = pair(staged=staged)
    assert asked(reader, key).base is None
    reader.opened(key, "a")
    reader.log()
    reader.brought(key, "a")
    reader.log()
    publish(trainer, "b")
    assert asked(reader, key).base == BaseVersion(1, root_digest(digests_of("a")))


def test_a_report_says_what_came_as_a_delta_and_from_where() -> None:
    trainer, reader, key = pair()
    read(reader, key, "a")
    publish(trainer, "b")
    encoded = EncodedBytes(how="delta", nbytes=8, wire_bytes=1)
    read(reader, key, "b", encoded)
    answer = reader.last(CompleteCall)
    assert answer is not None
    assert answer.report is not None
    assert answer.report.base == 1
    assert answer.report.sources[0].encoded == (encoded,)


def test_what_was_partly_overwritten_is_no_base() -> None:
    trainer, reader, key = pair()
    read(reader, key, "a")
    publish(trainer, "b")
    asked(reader, key)
    reader.opened(key, "b")
    reader.log()
    assert reader.memory(key) is MemoryState.FILLING
    reader.tick(10.0)
    reader.log()
    reader.closed(key)
    assert asked(reader, key).base is None


def test_without_digests_nothing_would_judge_a_patch() -> None:
    trainer, reader, key = pair(digests=False)
    asked(reader, key)
    reader.opened(key, "")
    reader.log()
    post = reader.last(ReadBatch)
    assert post is not None
    reader.do(reader.core.on_outcome(BatchDone(key, post.source, post.batch, b""), reader.now))
    reader.confirmed(key)
    reader.log()
    assert reader.memory(key) is MemoryState.READY
    publish(trainer, "b")
    assert asked(reader, key).base is None


def test_without_encodings_no_patch_is_asked_for() -> None:
    trainer, reader, key = pair(encodings=False)
    read(reader, key, "a")
    publish(trainer, "b")
    assert asked(reader, key).base is None


def test_what_was_taken_back_for_writing_is_no_base() -> None:
    """An engine that unpublishes may write: nothing is known of the bytes any more."""
    trainer, reader, key = pair()
    read(reader, key, "a")
    reader.unpublish(key)
    assert any(isinstance(command, Unpublish) for command in reader.unsaid)
    reader.log()
    assert reader.memory(key) is MemoryState.EMPTY
    publish(trainer, "b")
    assert asked(reader, key).base is None


def test_what_was_got_over_the_link_before_is_told_with_it() -> None:
    """So a read in which all pieces have patches knows how fast the line is."""
    trainer, reader, key = pair()
    opening = asked(reader, key)
    link = (opening.share.link, opening.share.transport)
    assert opening.rate is None
    reader.opened(key, "a")
    reader.log()
    reader.brought(key, "a")
    reader.log()
    reader.core.measured.note([LinkSample(link, 50_000_000, 2.0, 1)] * SLOW_SAMPLES_MIN, reader.now)
    publish(trainer, "b")
    again = asked(reader, key)
    assert (again.share.link, again.rate) == (link[0], 25_000_000)
