"""What `tensorhub simulate rollout` is held against: real jobs on this machine, and the same jobs simulated.

`python -m benchmarks.rollouts.calibrate [--json FILE] [--docs]`: jobs of 2 to 8 runners, with kills and updates, as
`policies` runs them. Each is simulated with the lengths that were drawn, with what its steps, publications, loads and
restarts took as measured, and with kills of the same runners behind as many responses. `--from FILE` takes the runs of
files that `policies` or this command wrote.
"""

import argparse
import asyncio
import dataclasses
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from benchmarks import page
from benchmarks.rollouts.policies import Compared, at_least, compared, runs_in, write
from benchmarks.rollouts.trained_job import LOOK_S, Took, Workload, middle
from tensorhub_common.protocol.rollout.entries import PolicyName
from tensorhub_simulator.rollout_performance.config.scenario import Messages, Scenario
from tensorhub_simulator.rollout_performance.job.job import JobRun
from tensorhub_simulator.rollout_performance.job.trainer import TrainerRun
from tensorhub_simulator.rollout_performance.systems.systems import DRIVES

PAGE: Final = page.DOCS / "simulate.md"
RUNNERS: Final = (2, 4, 8)
POLICIES: Final[tuple[PolicyName, ...]] = ("arrival", "rlboost")
MESSAGES: Final = Messages(progress_s=0.05, heartbeat_s=0.1, look_s=0.02)
"""Production's. The simulator has some seldomer, for its steps are minutes: here they are seconds."""


class _KilledTrainer(TrainerRun):
    """A trainer that begins once all machines serve, as a real one does, and beside which machines are killed."""

    job: "SimulatedJob"

    def begin_step(self) -> None:
        if not self.steps and not self.job.serves:
            self.agenda.after(LOOK_S, self.begin_step)
            return
        super().begin_step()

    def train(self) -> None:
        super().train()
        self.job.kill(sum(each.submitted - len(each.open) - len(each.ready) for each in self.submitted))


class SimulatedJob(JobRun):
    """A simulated job of a workload, whose machines run from the beginning and are killed as there."""

    def __init__(self, scenario: Scenario, workload: Workload, policy: PolicyName) -> None:
        super().__init__(scenario, dataclasses.replace(DRIVES[policy], loop=_KilledTrainer))
        assert isinstance(self._trainer, _KilledTrainer)
        self._trainer.job = self
        self._kills = workload.killed()
        for number in range(workload.runners):
            self._fleet.start(f"runner-{number}", is_local=False)

    @property
    def serves(self) -> bool:
        """Whether the leader knows all machines."""
        return len(self._leader.instances) >= len(self._fleet.machines)

    def kill(self, taken: int) -> None:
        """Kill what is to be killed once so many responses were taken to be trained."""
        while self._kills and taken >= self._kills[0][0]:
            self._kill(self._kills.pop(0)[1])

    def _kill(self, name: str) -> None:
        """Have a machine go without a word, and another one in its place boot."""
        fleet = self._fleet
        if name in fleet.machines:
            fleet.end(fleet.machines[name])
        now = fleet.booting[name] = self._agenda.now
        self._agenda.after(self._scenario.spot.boot_s, partial(self._booted, name, now))

    def _booted(self, name: str, since: float) -> None:
        """Have a machine load weights, unless it was killed once more since it began to boot."""
        if self._fleet.booting.get(name) == since:
            self._fleet.load_first(name)


class Pair(msgspec.Struct, frozen=True):
    """A real job beside the simulated one."""

    runners: int
    kills: int
    is_paced: bool
    seeds: bool
    """Whether the trainer's own engine generates too."""
    streams: bool
    """Whether it takes no steps."""
    real: Took
    tokens_per_s: float
    """Simulated."""
    steps: tuple[float, ...]
    made_again: float

    @property
    def error(self) -> float:
        """By how much more tokens a second are simulated, as a part of the real ones."""
        return self.tokens_per_s / self.real.tokens_per_s - 1

    @property
    def step_errors(self) -> list[float]:
        """By how much longer each step is simulated to be, as a part of what it really took."""
        return [ours / real - 1 for ours, real in zip(self.steps, self.real.steps, strict=True)]


def scenario_of(workload: Workload, took: Took) -> Scenario:
    """Return a real job as the simulator takes it. Raises `ValueError` where too few steps were measured."""
    if took.engine is None:
        raise ValueError("the engines' steps were not measured: run more of them")
    load_s = max(0.0, middle(took.load_s) - LOOK_S / 2)
    back_s = middle(took.back_s) if took.back_s else workload.back_s
    worked_s = took.seconds - took.waited_s - took.seeded_s - sum(took.publish_s)
    known = workload.scenario()
    step = took.engine
    return replace(
        known,
        engine=replace(known.engine, fixed_s=step.fixed_s, each_s=step.each_s, attention_s=step.attention_s),
        trainer=replace(known.trainer, token_s=worked_s / took.tokens, publish_s=middle(took.publish_s)),
        spot=replace(known.spot, boot_s=max(0.0, back_s - load_s), load_s=load_s),
        messages=MESSAGES,
    )


def simulated(workload: Workload, took: Took) -> Pair:
    """Simulate a real job."""
    seeded = replace(workload, seed=took.seed)
    scenario = replace(scenario_of(seeded, took), terms_off=tuple(sorted(took.terms_off)))
    report = SimulatedJob(scenario, seeded, took.policy).run()
    is_paced = workload.step.fixed_s > 0
    return Pair(
        workload.runners,
        len(took.kills),
        is_paced,
        workload.seeds,
        workload.streams,
        took,
        report.tokens / sum(report.step_s),
        report.step_s,
        report.made / report.tokens - 1,
    )


def pairs(found: Sequence[Compared]) -> Iterator[Pair]:
    """Simulate all jobs, those of few runners first."""
    for each in sorted(found, key=lambda each: each.workload.runners):
        for took in sorted(each.runs, key=lambda took: (took.name, took.seed)):
            yield simulated(each.workload, took)


def table(found: Sequence[Pair]) -> str:
    """Return the errors in a sentence, and each job in a row."""
    rows = [
        [
            f"{each.runners} runners{_kind(each)}",
            each.real.name,
            str(each.real.seed),
            str(each.kills),
            f"{each.real.tokens_per_s:.0f}",
            f"{each.tokens_per_s:.0f}",
            f"{each.error:+.1%}",
            f"{middle(map(abs, each.step_errors)):.1%}",
            f"{max(map(abs, each.step_errors)):.1%}",
            f"{each.real.waits_share:.0%}",
        ]
        for each in found
    ]
    head = ["", "policy", "seed", "kills", "tokens/s", "simulated", "error", "of a step", "at worst", "trainer waits"]
    return f"{sentence(found)}\n\n{page.table(head, rows)}"


def _kind(pair: Pair) -> str:
    kinds = {"not paced": not pair.is_paced, "seeding": pair.seeds, "no steps": pair.streams}
    return "".join(f", {kind}" for kind, is_meant in kinds.items() if is_meant)


def sentence(found: Sequence[Pair]) -> str:
    """Say how far off the simulator is."""
    errors = [abs(each.error) for each in found]
    steps = [abs(error) for each in found for error in each.step_errors]
    return (
        f"Against {len(found)} real jobs, tokens a second are off by {statistics.median(errors):.1%} in the median and "
        f"{max(errors):.1%} at worst; the {len(steps)} steps one by one by {statistics.median(steps):.1%} and "
        f"{max(steps):.1%}."
    )


async def measured(rounds: int, kills: Mapping[int, int]) -> list[Compared]:
    """Run real jobs: for each number of runners so many kills."""
    return [
        await compared(Workload(runners=runners, kills=count), rounds, POLICIES) for runners, count in kills.items()
    ]


def main() -> None:
    """Measure, simulate, print, and write the figures down."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts.calibrate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3, help="of runners, in each job of more than two")
    parser.add_argument("--from", dest="from_", type=Path, nargs="+", metavar="FILE", help="take these files' runs")
    parser.add_argument("--json", type=Path, help="write the real runs into this file")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    options = parser.parse_args()
    at_least(parser, options, rounds=1, kills=0)
    logging.getLogger("tensorhub").setLevel(logging.ERROR)  # That processes were killed is no news.
    if options.from_:
        found = [each for path in options.from_ for each in runs_in(path)]
    else:
        kills = {runners: options.kills if runners > min(RUNNERS) else 0 for runners in RUNNERS}
        found = asyncio.run(measured(options.rounds, kills))
    if options.json is not None:
        write(options.json, found)
    text = table([*pairs(found)])
    sys.stdout.write(f"{text}\n")
    if options.docs:
        page.write("rollout-calibration", text, PAGE)


if __name__ == "__main__":
    main()
