"""All systems that are compared: what each drives a job with.

A new one has its name in `config.scenario.System` and a row here; a file of its own for what it does
otherwise.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from msgspec.structs import replace

from tensorhub_simulator.rollout_performance.config.scenario import Scenario, System, Trainer
from tensorhub_simulator.rollout_performance.job.drive import Drive, Known, Placing
from tensorhub_simulator.rollout_performance.job.job import JobRun
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
from tensorhub_simulator.rollout_performance.systems import laminar, polyrl
from tensorhub_simulator.rollout_performance.systems.balanced import balanced_in_time
from tensorhub_simulator.rollout_performance.systems.colocated import colocated
from tensorhub_simulator.rollout_performance.systems.in_turns import in_turns
from tensorhub_simulator.rollout_performance.systems.rounds import GradedTrainer, RoundsTrainer
from tensorhub_simulator.rollout_performance.systems.seer import ProbesFirst


def _reserved(scenario: Scenario) -> Trainer:
    return scenario.trainer if scenario.trainer.seeds else colocated(scenario)


def _at_once(trainer: Trainer) -> Trainer:
    """Return a trainer that begins once all of a step is made."""
    return replace(trainer, steps_ahead=0, streams=False, micro_batch=trainer.groups * trainer.group_size)


def _waiting(scenario: Scenario) -> Trainer:
    return _at_once(colocated(scenario))


def _disaggregated(scenario: Scenario) -> Trainer:
    return replace(_at_once(scenario.trainer), seeds=False)


def _in_rounds(scenario: Scenario) -> Trainer:
    """Return a trainer with steps: each is a round."""
    return replace(scenario.trainer, steps_ahead=0, streams=False)


def _in_turns(_: Known) -> Placing:
    return in_turns


def _seer(known: Known) -> Placing:
    return ProbesFirst(known.scenario.trainer.group_size, known.expected).actions


def _by_expected(known: Known) -> Placing:
    return partial(balanced_in_time, left_of=known.expected, costs=known.scenario.engine)


def _by_truth(known: Known) -> Placing:
    return partial(balanced_in_time, left_of=known.left, costs=known.scenario.engine)


_DRIVES = (
    Drive("reserved", trainer=_reserved, has_others=False),
    Drive("disaggregated", trainer=_disaggregated),
    Drive("recompute", is_forgetful=True),
    Drive("rlboost"),
    Drive("streamrl", "streamrl"),
    Drive("arrival", "arrival"),
    Drive("siblings", place=_by_expected),
    Drive("oracle", place=_by_truth),
    Drive("waitall", trainer=_waiting, has_others=False, place=_in_turns),
    Drive("rollpacker", trainer=_waiting, loop=RoundsTrainer, has_others=False, place=_in_turns),
    Drive("seer", place=_seer),
    Drive("rounds", "arrival", trainer=_in_rounds, loop=RoundsTrainer),
    Drive("graded", "arrival", trainer=_in_rounds, loop=GradedTrainer),
    Drive("polyrl", loop=polyrl.PolyrlTrainer, place=polyrl.groups_in_turns, misfit=polyrl.misfit_of),
    Drive("laminar", misfit=laminar.misfit_of),
)
DRIVES: Final[Mapping[System, Drive]] = {each.system: each for each in _DRIVES}
RUNS: Final[Mapping[System, type[JobRun]]] = {"polyrl": polyrl.PolyrlRun, "laminar": laminar.LaminarRun}
"""Jobs of these systems have more of their own than a trainer, and where requests are placed."""


def job_of(scenario: Scenario, system: System, timeline: Timeline | None = None) -> JobRun:
    """Return a job with one system; a timeline is filled on the way."""
    return RUNS.get(system, JobRun)(scenario, DRIVES[system], timeline)
