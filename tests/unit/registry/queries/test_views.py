"""The catalog as users see it."""

from collections.abc import Iterable

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import AnyCommand, Expire, Join, Ready, Register, Sender, Want
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_registry.queries import views

ROOT = "a" * 32
LAYOUT = "b" * 64


def catalog_after(commands: Iterable[AnyCommand], level: int = 0) -> Catalog:
    catalog = Catalog("run-7", level=level)
    for seq, command in enumerate(commands, start=1):
        apply(catalog, seq, 1_000.0 + seq, command)
    return catalog


def register(n: int, replica: str, shard: int, shards: int) -> Register:
    by = Sender("a", 1, n)
    return Register(by=by, model="m", replica=replica, shard=shard, shards=shards, layout=LAYOUT, nbytes=8)


def ready(n: int, version: int) -> Ready:
    return Ready(by=Sender("a", 1, n), model="m", replica="trainer", shard=0, version=version, root=ROOT)


JOIN = Join(by=Sender("a", 1, 1), host="h", site="s")
PUBLISHED = (JOIN, register(2, "trainer", 0, 1), ready(3, 12))


def test_a_version_names_its_holders_and_its_publisher_and_an_unknown_model_has_nothing() -> None:
    (version,) = views.versions(catalog_after(PUBLISHED), "m").versions
    assert (version.version, version.state, version.publisher) == (12, "available", "trainer")
    assert (version.holders, version.published_at) == (("trainer",), 1_003.0)
    assert views.versions(Catalog("run-7"), "m").versions == ()
    assert views.replicas(Catalog("run-7"), "m").replicas == ()


def test_a_replica_shows_its_shards_in_order_and_its_round() -> None:
    wish = Want(by=Sender("a", 1, 6), model="m", replica="rollout", shard=1, want="latest")
    catalog = catalog_after((*PUBLISHED, register(4, "rollout", 1, 2), register(5, "rollout", 0, 2), wish))
    trainer, rollout = views.replicas(catalog, "m").replicas
    assert (trainer.replica, trainer.version, trainer.round) == ("trainer", 12, None)
    assert (rollout.version, rollout.shards, rollout.round) == (None, 2, 6)
    assert [member.shard for member in rollout.members] == [0, 1]
    member = trainer.members[0]
    assert (member.state, member.version, member.agent, member.host, member.live) == ("ready", 12, "a", "h", True)
    assert (member.nbytes, member.layout) == (8, LAYOUT)


def test_of_a_lost_agent_status_and_its_last_version_tell_so() -> None:
    lost = Expire(by=Sender("_registry", 5, 1), agent="a", incarnation=1, term=5)
    catalog = catalog_after((*PUBLISHED, lost), NEWEST_LEVEL)
    status = views.status(catalog, 9, "registry-0", 5)
    assert (status.job, status.seq, status.registry, status.term) == ("run-7", 9, "registry-0", 5)
    assert [(model.model, model.last, model.replicas) for model in status.models] == [("m", 12, 1)]
    (agent,) = status.agents
    assert (agent.agent, agent.live, agent.incarnation, agent.shards) == ("a", False, 1, 1)
    (version,) = views.versions(catalog, "m").versions
    (trainer,) = views.replicas(catalog, "m").replicas
    assert (version.state, version.gone) == ("unavailable", "lost")
    assert (trainer.members[0].live, trainer.members[0].lost_at) == (False, 1_004.0)
