"""How old what trainers take is: counted for metrics where a trainer says that responses are done.

Which versions made a response is known to the leader under which it ended. So what ended before that led is left out.
"""

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_common.observability.metrics import METER, recorder
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.log.outcomes import Acknowledged, Ended, Outcome

AGE_MAX: Final = 16
"""Tokens that are older are counted with those of this age."""
UNDONE_MAX: Final = 65_536
"""Limit of the responses that have ended and are not done of which the versions are remembered, the latest."""


class _Made(NamedTuple):
    """A response that has ended: how many tokens each version made."""

    model: str
    group: tuple[int, int]
    """Its submission, and its group's index there."""
    newest: int | None
    """The newest version when it was submitted."""
    tokens: dict[int, int]
    """By version."""


class ResponseAges:
    """The ages of one job's responses."""

    def __init__(self, job: str, meter: Meter | None = None) -> None:
        """Count nothing yet."""
        meter = meter or api.get_meter(METER)
        self._record_response = recorder(meter, "tensorhub.rollout.response.age")
        self._record_group = recorder(meter, "tensorhub.rollout.group.age")
        self.tokens = Counter[int]()
        """How many tokens are done of each age."""
        self._labels = {"job": job}
        self._undone: OrderedDict[RequestId, _Made] = OrderedDict()

    def take(self, leader: Leader | None, outcome: Outcome) -> None:
        """Note what an entry did. `leader`, if this manager leads, has not heard of the entry yet; its state has."""
        if leader is None:
            return
        match outcome:
            case Ended(requests=ended):
                for of in ended:
                    self._end(leader, of)
            case Acknowledged(requests=done):
                self._done(leader, [made for of in done if (made := self._undone.pop(of, None)) is not None])
            case _:
                pass

    def forget(self) -> None:
        """Forget what has ended and is not done: another manager leads from here on."""
        self._undone.clear()

    def _end(self, leader: Leader, of: RequestId) -> None:
        request, response = leader.requests.get(of), leader.responses.get(of)
        stored = leader.state.request(of)
        if request is None or response is None or stored is None or not response.count:
            return
        tokens = Counter[int]()
        ends = [*(run.start for run in response.runs[1:]), response.count]
        for run, end in zip(response.runs, ends, strict=True):
            tokens[run.version] += end - run.start
        self._undone[of] = _Made(request.model, (of.submission, stored.group), request.newest, dict(tokens))
        if len(self._undone) > UNDONE_MAX:
            self._undone.popitem(last=False)

    def _done(self, leader: Leader, done: list[_Made]) -> None:
        for made in done:
            versions = _versions(leader, made)
            ages = {versions.newer_than(version): count for version, count in made.tokens.items()}
            for age, count in ages.items():
                self.tokens[min(age, AGE_MAX)] += count
            self._record_response(max(ages), self._labels)
        for made in {each.group: each for each in done}.values():
            submission = leader.state.submissions.get(made.group[0])
            is_done = submission is None or made.group[1] not in submission.groups
            if is_done and made.newest is not None:
                self._record_group(_versions(leader, made).newer_than(made.newest), self._labels)


def _versions(leader: Leader, made: _Made) -> PublishedVersions:
    return leader.models[made.model].published
