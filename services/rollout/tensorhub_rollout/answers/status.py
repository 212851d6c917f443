"""What a leader says of its job's rollouts to users. Pure."""

from collections import Counter, defaultdict

from tensorhub_common.protocol.rollout.questions import (
    ConsumerStatus,
    InstanceStateName,
    InstanceStatus,
    RolloutStatus,
)
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.log.state import ANY_SITE


def status_of(leader: Leader) -> RolloutStatus:
    """Return the state of consumers, instances and the queue."""
    state = leader.state
    pending, executing = defaultdict[str, int](int), defaultdict[str, int](int)
    running: dict[str, Counter[int]] = defaultdict(Counter)
    for placement in leader.placements.values():
        response = leader.responses.get(placement.request)
        has_begun = response is not None and response.count > placement.began_at
        (executing if has_begun else pending)[placement.runner] += 1
        instance = leader.instances.get(placement.runner)
        if has_begun and instance is not None and instance.version is not None:
            behind = _behind(leader, instance)
            running[state.submissions[placement.request.submission].consumer][behind] += 1
    waiting = Counter(
        state.submissions[of.submission].consumer for of, each in leader.requests.items() if each.placement is None
    )
    consumers = tuple(
        ConsumerStatus(
            name,
            each.model,
            each.epoch,
            each.open,
            waiting[name],
            sum(len(requests) for requests in each.ended.values()),
            tuple(running[name][behind] for behind in range(max(running[name], default=-1) + 1)),
        )
        for name, each in sorted(state.consumers.items())
    )
    instances = tuple(
        InstanceStatus(
            runner,
            each.model,
            state_of(each),
            each.version,
            each.slots,
            pending[runner],
            executing[runner],
            round(each.tokens_per_s, 1),
            each.version_wanted if isinstance(each.version_wanted, int) else None,
        )
        for runner, each in sorted(leader.instances.items())
    )
    return RolloutStatus(
        state.job,
        state.manager,
        state.term,
        state.seq,
        consumers,
        instances,
        round(sum(each.tokens_per_s for each in leader.instances.values()), 1),
        state.payload_bytes,
        state.wished[ANY_SITE].instances if ANY_SITE in state.wished else None,
        leader.fleet.has_gathered,
    )


def _behind(leader: Leader, instance: Instance) -> int:
    return leader.models[instance.model].published.newer_than(instance.version or 0)


def state_of(instance: Instance) -> InstanceStateName:
    """Return the word that users have for how an instance is."""
    if instance.is_leaving:
        return "leaving"
    return "serving" if instance.takes_more else "loading"
