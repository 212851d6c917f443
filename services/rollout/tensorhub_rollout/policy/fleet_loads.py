"""What each instance of a fleet has to do, from its requests and what is expected of them. Pure.

To look at all requests of a fleet takes longer than a look may. So each look goes on with a few of them, those of the
instance whose assessment is the oldest. What is placed counts at once, and what is done meanwhile as it was predicted.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tensorhub_rollout.policy.finish_times import LEFT_MIN, Load, Work
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.request_facts import Facts, RequestFacts
from tensorhub_rollout.policy.view import FleetView, InstanceView

UNMEASURED: Final = StepModel(1.0, 0.1, 0.0)
"""Of engines whose steps are not known: only which of two instances has more to do is told by it."""
ASSESSED_SHARE: Final = 1 / 2048
"""In a large fleet at least this share of the requests on instances is looked at in one look."""

COUNTED_S: Final = 0.1
"""How often it is counted how many requests instances have: in a large fleet it changes little from look to look."""


class AssessmentLimits(msgspec.Struct, frozen=True):
    """How much of a fleet one look assesses; times in seconds."""

    assessed_s: float = 1.0
    """How often an instance is assessed at most."""
    assessed_max: int = 8
    """Limit of the requests that one look looks at, in a fleet with no more than 2,048 times as many."""
    new_max: int = 128
    """The same while instances have never been assessed: a leader that begins knows nothing."""


class _Assessment:
    """An instance that is being assessed, over some looks."""

    def __init__(self, instance: InstanceView) -> None:
        self.runner = instance.runner
        self.load = Load()
        self.rest = [*instance.executing, *instance.pending]
        """Those that were on it when it began, the next one last."""
        self.rest.reverse()
        self._longest = {False: 0.0, True: 0.0}

    def take(self, count: int, there: InstanceView, facts: Facts, steps: StepModel, beside: int) -> None:
        """Look at the next requests; those that have gone meanwhile are passed over."""
        for _ in range(min(count, len(self.rest))):
            of = self.rest.pop()
            is_pending = of in there.pending
            if not is_pending and of not in there.executing:
                continue
            known = facts.of(of)
            is_due = known.is_due
            work = Work.of(known.length, known.context, beside, self._longest[is_due])
            self._longest[is_due] = max(self._longest[is_due], work.left)
            self.load.add(work, steps, is_new=is_pending, is_due=is_due)


class FleetLoads:
    """The loads of one fleet, from look to look."""

    def __init__(self, limits: AssessmentLimits) -> None:
        """Know of no instance."""
        self._limits = limits
        self.staying: list[InstanceView] = []
        self.leaving: list[InstanceView] = []
        """Those whose machines go away: nothing is placed there, and nothing is known of what they have."""
        self.instances: dict[str, InstanceView] = {}
        """Those that stay, by runner."""
        self.steps: dict[str, StepModel] = {}
        """How long a step takes: of each instance, as measured, or as the one in the middle of those that are."""
        self.is_measured = False
        """Whether steps of any instance are."""
        self.beside = 1
        """How many requests an instance has on average, once all are placed."""
        self.slots = 0
        """Of all instances together."""
        self._placed = 0
        """How many requests instances have, as last counted."""
        self._counted_at = -math.inf
        self._loads: dict[str, Load] = {}
        self._assessed_at: dict[str, float] = {}
        """The oldest assessment first."""
        self._assessing: _Assessment | None = None
        self._known: Mapping[str, StepModel] = {}
        self._seen: tuple[InstanceView, ...] = ()
        self._now = 0.0

    def look(self, view: FleetView, facts: Facts, now: float) -> None:
        """Take which instances there are, and assess some of what they have."""
        self._now = now
        is_other = view.instances is not self._seen
        if is_other:
            self._seen = view.instances
            self.staying = [each for each in view.instances if not each.is_leaving]
            self.leaving = [each for each in view.instances if each.is_leaving]
            self.instances = {each.runner: each for each in self.staying}
            self.slots = sum(each.slots for each in self.instances.values())
        if is_other or now - self._counted_at >= COUNTED_S:
            self._counted_at = now
            self._placed = sum([len(each.executing) + len(each.pending) for each in self.staying])
        self.beside = (self._placed + len(view.waiting)) // max(1, len(self.instances))
        if self._known is not facts.steps or (is_other and self.steps.keys() != self.instances.keys()):
            self._meet(facts.steps)
        self._assess(facts, max(self._limits.assessed_max, int(self._placed * ASSESSED_SHARE)))

    def some(self, first: int, count: int) -> list[InstanceView]:
        """Return a number of those that stay, from one of them on and around: for a look that can't compare all."""
        staying = self.staying
        at = first % len(staying)
        return [*staying[at : at + count], *staying[: max(0, at + count - len(staying))]]

    def _meet(self, known: Mapping[str, StepModel]) -> None:
        """Take which instances have come and gone, and how long steps take."""
        self._known = known
        measured = sorted(
            (known[name].seconds(each.slots, 0.0), name) for name, each in self.instances.items() if name in known
        )
        if bool(measured) != self.is_measured:
            # What was assessed by other steps is no measure.
            self._assessed_at, self._assessing = {}, None
        self.is_measured = bool(measured)
        middle = known[measured[len(measured) // 2][1]] if measured else UNMEASURED
        self.steps = {name: known.get(name, middle) for name in self.instances}
        if not self._assessed_at.keys() == self._loads.keys() == self.instances.keys():
            new = {name: -math.inf for name in self.instances if name not in self._assessed_at}
            old = {name: at for name, at in self._assessed_at.items() if name in self.instances}
            self._assessed_at = new | old
            self._loads = {name: self._loads.get(name, Load(as_of=self._now)) for name in self.instances}

    def _assess(self, facts: Facts, count: int) -> None:
        if next(iter(self._assessed_at.values()), 0.0) == -math.inf:
            count = max(count, self._limits.new_max)
        while count > 0:
            if self._assessing is None or self._assessing.runner not in self.instances:
                name = next(iter(self._assessed_at), None)
                if name is None or self._now - self._assessed_at[name] < self._limits.assessed_s:
                    return
                self._assessing = _Assessment(self.instances[name])
            found = self._assessing
            rest = len(found.rest)
            found.take(count, self.instances[found.runner], facts, self.steps[found.runner], self.beside)
            count -= max(1, rest)
            if not found.rest:
                self._assessing = None
                self._assessed(found.runner, found.load)

    def _assessed(self, name: str, load: Load) -> None:
        load.as_of = self._now
        self._loads[name] = load
        del self._assessed_at[name]
        self._assessed_at[name] = self._now

    def is_old(self, name: str) -> bool:
        """Tell whether the assessment of an instance is older than they should be."""
        return self._now - self._assessed_at[name] >= self._limits.assessed_s

    def assess(self, name: str, facts: Facts) -> None:
        """Look at all requests of an instance at once."""
        if self._assessing is not None and self._assessing.runner == name:
            self._assessing = None
        found = _Assessment(self.instances[name])
        found.take(len(found.rest), self.instances[name], facts, self.steps[name], self.beside)
        self._assessed(name, found.load)

    def load(self, name: str) -> Load:
        """Return a copy of what an instance has to do now."""
        return self._loads[name].at(self.steps[name], self._now)

    def finish_and_busy_s(self, names: Iterable[str]) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
        """Return when instances are done, and how much their responses add to steps until then, in seconds."""
        loads, steps, now = self._loads, self.steps, self._now
        finish, busy = [], []
        for name in names:
            load = loads[name]
            # `Load._left` without a call, for thousands of instances.
            takes_s = steps[name].fixed_s * load.longest + load.busy_s
            finish.append((max(LEFT_MIN * takes_s, takes_s - (now - load.as_of)), name))
            busy.append((load.busy_s, name))
        return finish, busy

    def loads(self) -> dict[str, Load]:
        """Return what all have to do now."""
        steps, now = self.steps, self._now
        return {name: load.at(steps[name], now) for name, load in self._loads.items()}

    def contexts(self) -> dict[str, float]:
        """Return how many context tokens all have."""
        return {name: load.context for name, load in self._loads.items()}

    def add(self, name: str, work: Work, *, is_due: bool) -> None:
        """Have an instance make a response from its context on."""
        load, steps = self._loads[name], self.steps[name]
        load.advance(steps, self._now)
        load.add(work, steps, is_new=True, is_due=is_due)
        if self._assessing is not None and self._assessing.runner == name:
            self._assessing.load.add(work, steps, is_new=True, is_due=is_due)

    def move(self, source: str, rest: Load, target: str, work: Work, *, is_due: bool) -> None:
        """Have one instance make a response that another one has had; `rest`: what that has without it."""
        self._loads[source] = rest
        self.add(target, work, is_due=is_due)

    def work(self, known: RequestFacts) -> Work:
        """Return what is to be made of a request's response."""
        return Work.of(known.length, known.context, self.beside)
