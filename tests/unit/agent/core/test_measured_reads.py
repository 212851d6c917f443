"""An agent's reads and its demands: what one has got over a link, the next one's demand tells, in whichever job."""

import pytest
from tests.unit.agent.core.scene import OneAgent
from tests.unit.agent.core.test_read import pair, publish

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import BytesReceived, FailCall, ReadBatch, RequestPlan
from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.rates import link_rates
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_common.protocol.heartbeat import ReaderLoad, ServingLoad
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import LinkRate, ReadPriority, SourceId

LINK = "host"


@pytest.fixture(autouse=True)
def _twelve_bytes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of these tests are small; how much makes a sample is shown in test_meter.py."""
    monkeypatch.setattr(link_rates, "SAMPLE_BYTES_LEAST", 1)


def begin_reading(reader: OneAgent, key: ShardKey, link: str = LINK) -> None:
    """Come so far that all of the read's twelve bytes are under way."""
    reader.read(key)
    reader.log()
    reader.plan(key, link=link)
    reader.opened(key, "a")
    reader.log()


def rates_asked_with(reader: OneAgent) -> tuple[LinkRate, ...]:
    asked = reader.last(RequestPlan)
    assert asked is not None
    return asked.demand.rates


def test_what_a_read_got_the_next_demand_tells() -> None:
    trainer, reader = pair()
    key = reader.key("rollout")
    begin_reading(reader, key)
    assert rates_asked_with(reader) == ()
    reader.now += 2.0
    reader.brought(key, "a")
    reader.log()
    reader.now += 10.0
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    publish(trainer, "b")
    reader.unpublish(key)
    reader.log()
    reader.read(key)
    reader.log()
    assert rates_asked_with(reader) == (LinkRate(LINK, "local", 6, 1, 10.0),)


def test_a_read_that_is_given_up_for_its_slow_source_tells_of_it_too() -> None:
    _, reader = pair()
    key = reader.key("rollout")
    begin_reading(reader, key)
    post = reader.last(ReadBatch)
    assert post is not None
    for _ in range(2):
        for _ in range(8):
            reader.tick(DEFAULT_LIMITS.look_s)
        reader.do(reader.core.on_outcome(BytesReceived(key, post.source, 4), reader.now))
    reader.tick(10.0)
    reader.log()
    [told] = reader.core.measured.told(reader.now)
    assert (told.bps, told.samples) == (2, 1), "eight bytes in four seconds; the test's own pause counts for nobody"


def test_of_a_link_without_a_name_nothing_is_told() -> None:
    """A planner of an earlier release names none."""
    _, reader = pair()
    key = reader.key("rollout")
    begin_reading(reader, key, link="")
    reader.now += 2.0
    reader.brought(key, "a")
    assert reader.core.measured.told(reader.now) == ()


def test_a_source_that_brings_nothing_gives_no_sample() -> None:
    """That it is silent is for the read itself to see; a rate of it would stand long after it came back."""
    _, reader = pair()
    key = reader.key("rollout")
    begin_reading(reader, key)
    reader.tick(20.0)
    reader.log()
    reader.closed(key)
    assert reader.last(FailCall) is not None
    assert reader.core.measured.told(reader.now) == ()


def test_what_one_job_measured_another_one_tells() -> None:
    measured = LinkRates()
    one, other = (AgentCore("agent-0", CoreConfig(), measured) for _ in range(2))
    assert one.measured is other.measured is measured


def lease(agent: OneAgent, key: ShardKey, name: str, *, shard: int, nbytes: int, mapped: bool = False) -> None:
    me = SourceId(agent.core.agent, agent.core.incarnation, key.replica, key.shard)
    ask = LeaseRequest(
        job="run-7",
        model=key.model,
        source=me,
        version=1,
        root=root_digest(agent.core.shards[key].contents.digests),
        reader=SourceId("agent-9", 1, "reader", shard),
        transport="ucxx",
        turn=ReadPriority(70 + shard, 70),
        nbytes=nbytes,
        mapped=mapped,
    )
    assert isinstance(agent.core.lease_asked(ask, name, f"ticket-{name}", "here", agent.now), LeaseGrant)


def test_an_agent_says_who_reads_from_it() -> None:
    """From its grant to its end a reader counts; one that maps the memory costs nothing."""
    trainer, _ = pair()
    key, table = trainer.key("trainer"), trainer.core.leases
    assert reader_loads(table.readers()) == ()
    lease(trainer, key, "one", shard=0, nbytes=5)
    lease(trainer, key, "two", shard=1, nbytes=7)
    lease(trainer, key, "mapped", shard=2, nbytes=100, mapped=True)
    one, two = (
        ReaderLoad("run-7", key.model, "reader", shard, 70 + shard, nbytes) for shard, nbytes in ((0, 5), (1, 7))
    )
    assert reader_loads(table.readers()) == (ServingLoad("ucxx", 2, 12, (one, two)),)
    assert trainer.core.redeemed("ticket-one", trainer.now) is not None
    assert reader_loads(table.readers()) == (ServingLoad("ucxx", 2, 12, (one, two)),)
    trainer.tick(6.0)
    assert reader_loads(table.readers()) == (ServingLoad("ucxx", 1, 5, (one,)),), (
        "the other ticket was not shown in time"
    )
