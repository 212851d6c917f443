"""What is run of a scenario: each system with each seed, as its file says it and with each of its variations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from tensorhub_simulator.rollout_performance.config.decoding import varied
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError, System
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
from tensorhub_simulator.rollout_performance.systems.systems import DRIVES, job_of

SEEDS_MAX: Final = 1000


class Case(msgspec.Struct, frozen=True):
    """One run."""

    scenario: Scenario
    """With its trace, and the seed of this run."""
    system: System
    what: str = ""
    """What is otherwise than in the file; empty for the file itself."""
    is_drawn: bool = False
    """Whether its report has a timeline."""


class Finding(msgspec.Struct, frozen=True):
    """A scenario with all that was run of it."""

    scenario: Scenario
    cases: tuple[Case, ...]
    reports: tuple[Report, ...]

    def of(self, what: str, system: System) -> list[Report]:
        """Return the reports of one system, by seed."""
        return [
            report
            for case, report in zip(self.cases, self.reports, strict=True)
            if (case.what, case.system) == (what, system)
        ]

    @property
    def systems(self) -> list[System]:
        """Return the systems, in their order."""
        return list(dict.fromkeys(case.system for case in self.cases))

    @property
    def variations(self) -> list[str]:
        """Return what was otherwise, in the order of the file."""
        return [what for what in dict.fromkeys(case.what for case in self.cases) if what]


def cases(
    scenario: Scenario,
    systems: Sequence[System],
    seeds: int,
    traced: Callable[[Scenario], Scenario],
    *,
    alone: bool,
    drawn: bool = False,
) -> Iterator[Case]:
    """Yield what to run; unless `alone`, with all variations. `traced` reads a scenario's trace.

    `drawn`: the runs of the first seed of the file itself are to be drawn. Raises `ScenarioError` for a job that no
    instance would ever generate for, or that a system is not made for.
    """
    kinds = [("", traced(scenario))]
    if not alone:
        kinds += [(each.what, traced(varied(scenario, each))) for each in scenario.vary]
    for what, kind in kinds:
        has_others = kind.spot.most > 0 or kind.far is not None
        idle = next((each for each in systems if not has_others and not DRIVES[each].trainer(kind).seeds), None)
        if idle is not None:
            raise ScenarioError(
                f"{kind.name}: no instance would ever generate with {idle!r}, whose trainer only trains: have some in "
                "spot.changes, or name other systems with --system"
            )
        wrong = next(filter(None, (DRIVES[each].misfit(kind) for each in systems)), None)
        if wrong is not None:
            raise ScenarioError(f"{kind.name}: {wrong}, or name other systems with --system")
        for seed in range(kind.seed, kind.seed + seeds):
            for system in systems:
                is_drawn = drawn and not what and seed == kind.seed
                yield Case(msgspec.structs.replace(kind, seed=seed), system, what, is_drawn)


def run(case: Case) -> Report:
    """Run a case."""
    return job_of(case.scenario, case.system, Timeline() if case.is_drawn else None).run()


def size_of(case: Case) -> float:
    """Return about how long a case takes, beside others."""
    return case.scenario.trainer.steps * case.scenario.trainer.groups * case.scenario.trainer.group_size
