"""What stands against a lease: each reason by itself, and nothing where there is none."""

import msgspec
import pytest

from tensorhub_agent.leases.lease import Lease, LeaseOffer
from tensorhub_agent.leases.table import (
    LEASES_OF_ONE_MAX,
    READERS_MAX,
    is_asked_for,
    refuse_filling,
    refuse_for_room,
    refuse_ready,
)
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.heartbeat import ReaderLoad
from tensorhub_common.protocol.leases import LeaseRequest
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import ReadPriority, SourceId

ROOT = "a" * 32
ASK = LeaseRequest(
    job="job",
    model="m",
    source=SourceId("agent-0", 1, "trainer", 0),
    version=7,
    root=ROOT,
    reader=SourceId("agent-1", 1, "rollout", 0),
    turn=ReadPriority(20, 2),
)
COMING = LeaseOffer(7, ROOT, b"", turn=ReadPriority(10, 1), has=bytearray(3))


def test_what_stands_ready_is_what_is_asked_for_or_is_refused() -> None:
    assert refuse_ready(LeaseOffer(7, ROOT, b""), ASK) is None
    assert refuse_ready(LeaseOffer(None, ROOT, b""), ASK) is None
    assert "version 6, not 7" in str(refuse_ready(LeaseOffer(6, ROOT, b""), ASK))
    assert "other bytes" in str(refuse_ready(LeaseOffer(7, "b" * 32, b""), ASK))


@pytest.mark.parametrize("root", [None, NO_ROOT])
def test_a_publication_without_a_number_is_known_by_a_root_of_digests_alone(root: str | None) -> None:
    ask = msgspec.structs.replace(ASK, root=root)
    assert "no number yet" in str(refuse_ready(LeaseOffer(None, root, b""), ask))
    assert refuse_ready(LeaseOffer(7, root, b""), ask) is None


def test_what_comes_is_asked_for_by_its_version_and_root() -> None:
    assert is_asked_for(COMING, ASK)
    assert not is_asked_for(COMING, msgspec.structs.replace(ASK, version=8))
    assert not is_asked_for(COMING, msgspec.structs.replace(ASK, root="b" * 32))
    without = msgspec.structs.replace(ASK, root=None)
    assert not is_asked_for(COMING, without)
    assert is_asked_for(COMING, msgspec.structs.replace(without, units=True))


def test_who_comes_later_waits_and_who_counts_on_promises_waits_in_any_turn() -> None:
    earlier = msgspec.structs.replace(ASK, turn=ReadPriority(5, 1))
    assert refuse_filling(COMING, ASK, None) is None
    assert "not earlier" in str(refuse_filling(COMING, earlier, None))
    assert refuse_filling(COMING, msgspec.structs.replace(earlier, promises=True), None) is None


def test_who_counts_on_promises_goes_by_the_same_program() -> None:
    promised = msgspec.structs.replace(ASK, promises=True, program="p")
    assert refuse_filling(COMING, promised, "p") is None
    assert "by the program" in str(refuse_filling(COMING, promised, "q"))


READER = ReaderLoad("job", "m", "rollout", 0, 3, 0)


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        ([f"agent-{n}" for n in range(READERS_MAX)], f"{READERS_MAX} readers already"),
        (["agent-1"] * LEASES_OF_ONE_MAX, f"{LEASES_OF_ONE_MAX} leases on the shard already"),
    ],
)
def test_there_are_so_many_leases_and_so_many_of_one_agent(agents: list[str], said: str) -> None:
    def offered(count: int) -> LeaseOffer:
        made = LeaseOffer(7, ROOT, b"")
        for number, agent in enumerate(agents[:count]):
            key = ShardKey("m", "trainer", 0)
            made.leases[str(number)] = Lease(str(number), key, f"{agent}/rollout/0", "t", 1.0, made, READER)
        return made

    assert refuse_for_room(offered(len(agents) - 1), "agent-1") is None
    assert said in str(refuse_for_room(offered(len(agents)), "agent-1"))
