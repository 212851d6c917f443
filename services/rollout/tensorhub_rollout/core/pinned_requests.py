"""Open requests by the version that they are for: which are for one alone, and whether that can still be had. Pure.

Invariant (`check`): `demand` counts the open requests of a model, each once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.instance import Instance


class PinnedRequests:
    """The versions that a leader's open requests are for."""

    def __init__(self) -> None:
        """No request is open yet."""
        self.versions: dict[RequestId, int] = {}
        """Of the requests that are for one version alone."""
        self._demand: dict[str, Counter[int | None]] = {}
        """By model."""

    def open(self, of: RequestId, model: str, version: int | None) -> None:
        """Count a request that is for one version alone, or for any that its rule allows (None)."""
        self._demand.setdefault(model, Counter())[version] += 1
        if version is not None:
            self.versions[of] = version

    def close(self, of: RequestId, model: str) -> None:
        """Count a request no more."""
        version, demand = self.versions.pop(of, None), self._demand[model]
        demand[version] -= 1
        if not demand[version]:
            del demand[version]

    def demand(self, model: str) -> Mapping[int | None, int]:
        """Return how many requests of a model are open for each version; None: for those that their rules allow."""
        return self._demand.get(model, {})

    def has_any(self, model: str) -> bool:
        """Tell whether a request of a model is open for one version alone."""
        return any(version is not None for version in self.demand(model))

    def check(self, open_: Iterable[RequestId]) -> None:
        """Raise AssertionError where the invariant does not hold. `open_`: the requests that are open."""
        requests = set(open_)
        assert self.versions.keys() <= requests
        assert sum(count for each in self._demand.values() for count in each.values()) == len(requests)
        pinned = Counter(self.versions.values())
        counted = sum((each for each in self._demand.values()), start=Counter[int | None]())
        assert {version: count for version, count in counted.items() if version is not None} == pinned


def why_gone(
    version: int, versions: PublishedVersions, available: frozenset[int], instances: list[Instance]
) -> str | None:
    """Say why a request that waits for one version alone can never run; None: it may, or a version is yet to come.

    `available`: the versions that a replica of the hub has. `instances`: those of the request's model.
    """
    if versions.is_retired(version):
        return f"it was for version {version} alone, which the trainer has gone back behind"
    newest = max(versions.published, default=-1)
    if version >= newest or any(_has(each, version) for each in instances):
        return None
    why = f"it was for version {version} alone, which no instance holds: the newest is {newest}, and "
    if version not in available:
        return why + "the hub does not have it (`retain` or `pin` keeps a version)"
    if instances and not any(each.keeps_versions for each in instances):
        return why + "these instances follow the newest one alone"
    return None


def _has(instance: Instance, version: int) -> bool:
    """Tell whether an instance has a version, or may have it in a moment."""
    return instance.version == version or (instance.version is None and instance.version_wanted == version)
