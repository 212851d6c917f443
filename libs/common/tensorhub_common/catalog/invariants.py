"""What always holds of a catalog. Tests and the simulator call `check_invariants` after every command."""

from tensorhub_common.catalog.retention import is_coming, must_stay
from tensorhub_common.catalog.state import ATTEMPTS_MAX, Catalog, Model, Replica, known_root
from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState
from tensorhub_common.protocol.queries import VersionState


def check_invariants(catalog: Catalog) -> None:
    """Raise AssertionError that names the first invariant which does not hold."""
    for agent in catalog.agents.values():
        for model_name, replica_name, index in agent.shards:
            owner = catalog.models[model_name].replicas[replica_name].members[index].agent
            assert owner == agent.name, (
                f"{model_name}/{replica_name}/{index} is listed by {agent.name}, owned by {owner}"
            )
        replicas = [(catalog.models[m].replicas[r], i) for m, r, i in agent.shards]
        cached = sum(replica.members[i].nbytes for replica, i in replicas if replica.cache is not None)
        assert agent.cached_bytes == cached, f"{agent.name} counts {agent.cached_bytes} bytes of copies, of {cached}"
        assert agent.draining == (agent.name in catalog.leaving)
    assert not (catalog.deleted and (catalog.models or catalog.agents)), "a deleted job is not empty"
    for lane, last in catalog.lanes.items():
        known = catalog.agents.get(lane.partition("/")[0])
        assert known.incarnation == last.incarnation if known else lane.startswith("_"), f"lane {lane} has no agent"
    for model in catalog.models.values():
        assert set(model.waiting) <= set(model.replicas)
        assert set(catalog.tended) <= set(catalog.models)
        _check_retention(catalog, model)
        _check_versions(model)
        for replica in model.replicas.values():
            _check_replica(catalog, model, replica)
            _check_round(model, replica)


def _check_retention(catalog: Catalog, model: Model) -> None:
    """No replica is held back without need, or for ever: another copy is on its way."""
    tended = bool(model.retain or model.pins or model.holds)
    for replica in model.replicas.values():
        leaving = any(shard.leaving for shard in replica.members.values())
        held = replica.round is not None and replica.round.held
        tended = tended or leaving or held or replica.cache is not None
        if leaving or held:
            assert replica.version is not None, f"{replica.name} is held back and holds nothing"
            assert must_stay(catalog, model, replica), f"{replica.name} is held back, and another copy stands"
            assert is_coming(catalog, model, replica, replica.version), f"{replica.name} is held back for ever"
        if held:
            assert replica.round is not None
            filled = replica.round.state is RoundState.STARTED and len(replica.round.filled) == replica.shards
            assert filled or replica.round.state is RoundState.DECIDED
    assert not tended or model.name in catalog.tended, f"{model.name} is retained, and not tended"


def _check_versions(model: Model) -> None:
    for number, version in model.versions.items():
        assert model.last is not None
        assert number <= model.last, f"version {number} of {model.name} is above the last published {model.last}"
        holders = sum(replica.version == number and not replica.mapped for replica in model.replicas.values())
        assert version.holders == holders, f"version {number} counts {version.holders} holders and has {holders}"
        if version.state is VersionState.RETIRED:
            held = any(shard.version == number for r in model.replicas.values() for shard in r.members.values())
            assert held, f"version {number} of {model.name} is retired, and no shard holds a part of it"
            continue
        able = version.state is VersionState.AVAILABLE
        assert able == (holders > 0), f"version {number} is {version.state} with {holders} holders"


def _check_replica(catalog: Catalog, model: Model, replica: Replica) -> None:
    assert replica.members, f"replica {replica.name} has no shard left"
    ready = {shard.version for shard in replica.members.values() if shard.state is ShardState.READY}
    all_ready = len(replica.members) == replica.shards and all(
        shard.state is ShardState.READY for shard in replica.members.values()
    )
    common = next(iter(ready)) if all_ready and len(ready) == 1 else None
    assert replica.version == common, f"replica {replica.name} says {replica.version}, its shards hold {ready}"
    for shard in replica.members.values():
        agent = catalog.agents[shard.agent]
        assert (model.name, replica.name, shard.index) in agent.shards
        if shard.state is not ShardState.EMPTY:
            assert agent.state is AgentState.LIVE, f"{replica.name}/{shard.index} is {shard.state} on a lost agent"
        if shard.state is ShardState.READY:
            assert shard.version is not None
            root = known_root(model, replica, shard, shard.version)
            assert root == shard.root, f"{replica.name}/{shard.index} holds root {shard.root}, the log keeps {root}"
        if shard.state in (ShardState.EMPTY, ShardState.FILLING):
            assert shard.version is None
    for index in replica.offers:
        assert replica.members[index].state is ShardState.EMPTY, f"offer of a shard that is not empty: {index}"


def _check_round(model: Model, replica: Replica) -> None:
    current = replica.round
    filling = {index for index, shard in replica.members.items() if shard.state is ShardState.FILLING}
    if current is None:
        assert not filling, f"shards {filling} of {replica.name} are filling in no round"
        assert replica.name not in model.waiting
        return
    assert current.wants, f"round {current.number} has no shard"
    assert set(current.wants) == set(current.patient)
    assert set(current.wants) <= set(replica.members), f"round {current.number} has a shard that is not registered"
    assert current.granted <= set(current.wants)
    assert set(current.staged) <= set(current.wants)
    assert current.attempt <= ATTEMPTS_MAX
    assert (replica.name in model.waiting) == (current.state is RoundState.JOINING)
    if current.state is RoundState.JOINING:
        assert not filling
        assert not current.granted
        assert current.version is None
        return
    assert current.started or not filling, f"round {current.number} fills {filling} and was never started"
    assert len(current.wants) == replica.shards, f"round {current.number} was decided before all had joined"
    assert current.version is not None
    if current.state is RoundState.STARTED:
        rest = set(range(replica.shards)) - filling
        waiting = {index for index in current.staged if index not in current.filled}
        assert not filling & set(current.staged), f"round {current.number}: a staged shard is filled in place"
        assert rest - waiting == current.filled, (
            f"round {current.number}: {rest} are not filling, {current.filled} are filled"
        )
