"""What one leader has seen of the versions of its job's models: which there are, and when they arrive where. Pure.

A step of a model is from one version to the next. Only steps that this leader has seen count.
"""

from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.leader_events import VersionsSeen
from tensorhub_rollout.core.step_meter import StepMeter
from tensorhub_rollout.core.version_arrivals import VersionArrivals


@dataclass(slots=True)
class ModelVersions:
    """The versions of one model."""

    seen: VersionsSeen
    """What the hub has of them."""
    steps: int = 0
    """How many of them this leader has seen as the newest one."""
    meter: StepMeter = field(default_factory=StepMeter)
    arrivals: VersionArrivals = field(default_factory=VersionArrivals)

    @property
    def published(self) -> PublishedVersions:
        """Those that the trainer has published."""
        return self.seen.versions

    def take(self, seen: VersionsSeen, remote: frozenset[str], now: float) -> bool:
        """Take what the hub has now; tell whether a step ended. `remote`: the runners that are not the trainer's."""
        before, self.seen = max(self.published.published, default=-1), seen
        newest = max(seen.versions.published, default=-1)
        self.arrivals.published(newest, now, is_new=self.steps > 0)
        if newest <= before:
            return False
        self.steps += 1
        self.meter.see_fleet(remote)
        self.meter.end(newest, now)
        return True


class Models(dict[str, ModelVersions]):
    """All models of a job, by name. One that is asked for and not known has no version yet."""

    def __missing__(self, model: str) -> ModelVersions:
        self[model] = ModelVersions(VersionsSeen(model, PublishedVersions(0)))
        return self[model]

    def step_s(self) -> float:
        """Return how long the longest of the models' last steps was, in seconds; 0: none was seen whole."""
        return max((each.meter.last.whole_s for each in self.values() if each.meter.last is not None), default=0.0)
