"""What a reader is told of versions that were published and can't be read: who held them last, and what to do."""

import pytest

from tensorhub._control.lost_versions import explain
from tensorhub.cli.commands import pull
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.queries import ReplicaInfo, ShardInfo, VersionInfo

NOW = 1_000.0


def version(number: int, state: str = "unavailable", gone: str = "lost") -> VersionInfo:
    holders = ("trainer",) if state == "available" else ()
    return VersionInfo(
        model="m", version=number, state=state, publisher="trainer", published_at=1.0, holders=holders, gone=gone
    )


def replica(name: str, agent: str, lost_at: float | None, *, mapped: bool = False) -> ReplicaInfo:
    shard = ShardInfo(
        shard=0,
        state="empty",
        version=None,
        agent=agent,
        host="h",
        live=lost_at is None,
        nbytes=8,
        layout="0" * 64,
        lost_at=lost_at or 0.0,
    )
    return ReplicaInfo(
        model="m", replica=name, version=None, shards=1, spot=False, mapped=mapped, round=None, members=(shard,)
    )


HERE = replica("reader", "agent-1", None)
TRAINER = replica("trainer", "agent-0", NOW - 12)


def test_the_lost_holder_of_the_only_version_is_named_with_what_to_do() -> None:
    assert explain("m", [version(3)], [TRAINER, HERE], None, NOW) == (
        "version 3 of model 'm' was published, but its last holder is lost (trainer on agent-0, lost 12 s ago): start "
        "that agent again, which brings it back if its host has kept the memory, or publish again from a checkpoint"
    )


def test_of_several_versions_the_newest_is_explained_and_the_latest_loss_comes_first() -> None:
    versions = [version(1, gone="replaced"), version(2, gone="replaced"), version(3)]
    replicas = [replica("older", "agent-2", NOW - 600), TRAINER, replica("mapped", "agent-3", NOW, mapped=True), HERE]
    said = explain("m", versions, replicas, None, NOW)
    assert said.startswith(
        "versions 1 to 3 of model 'm' were published, but the last holder of version 3 is lost "
        "(trainer on agent-0, lost 12 s ago, older on agent-2, lost 10 min ago): start"
    )


def test_a_lost_agent_that_is_forgotten_or_was_back_without_its_memory_is_not_waited_for() -> None:
    assert explain("m", [version(3)], [HERE], None, NOW) == (
        "version 3 of model 'm' was published, but its last holder is lost: publish again from a checkpoint"
    )


def test_what_its_holder_gave_up_is_no_loss() -> None:
    assert explain("m", [version(3, gone="unpublished")], [TRAINER], None, NOW) == (
        "version 3 of model 'm' was published, but its last holder has unpublished it: wait until a version is "
        "published again"
    )


def test_a_number_is_explained_beside_what_can_be_read() -> None:
    versions = [version(3), version(4, "available", "")]
    assert explain("m", versions, [TRAINER], 3, NOW).endswith("from a checkpoint; available now: [4]")
    assert explain("m", versions, [TRAINER], None, NOW) == explain("m", versions, [TRAINER], 4, NOW) == ""


def test_where_nothing_was_published_or_an_older_registry_does_not_say_why_nothing_is_claimed() -> None:
    assert explain("m", [], [TRAINER], None, NOW) == ""
    assert explain("m", [version(3, gone="")], [TRAINER], None, NOW) == ""
    assert explain("m", [version(3, "retired", "")], [TRAINER], 3, NOW) == ""


def test_pull_says_it_too() -> None:
    with pytest.raises(VersionUnavailable, match=r"was published, but its last holder is lost \(trainer on agent-0"):
        pull._choose([version(3)], [TRAINER], "m", None)
    with pytest.raises(VersionUnavailable, match="no version that anybody holds now"):
        pull._choose([], [], "m", None)
