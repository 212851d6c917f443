"""What users want of a world: what each replica is to do next, what is ruled, and what must stand at the end."""

from functools import partial
from typing import Final

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Command, DeleteJob, Retain, Rewind
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_simulator.faultsim.nodes.job_processes import JobProcesses
from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan

RETAIN_S: Final = 0.7
QUIET_PAUSE_S: Final = 4.0
QUIET_READ_S: Final = 10.0
"""A read of the largest tables takes five where nothing fails: four hundred units, each asked for by itself."""


class Director:
    """Tells groups what to do, and the log what was ruled."""

    def __init__(self, processes: JobProcesses) -> None:
        """Begin."""
        self.processes, self.job, self.clock = processes, processes.job, processes.job.clock
        self.quiet_at = 0
        """The last entry of the log when the faults ended."""

    def start(self) -> None:
        """Begin to tell everybody."""
        for group in self.processes.replicas:
            self.clock.after(group.user.random() * 0.5, None, partial(self._direct, group))
        for model in self.job.config.models:
            self.clock.after(RETAIN_S, None, partial(self._retain, model))
        if self.job.config.deleted_after_s:
            self.clock.after(self.job.config.deleted_after_s, None, self._delete)

    # What groups do.

    def _direct(self, group: ReplicaPlan) -> None:
        """Tell a group what to do next."""
        rng, quiet = group.user, self.job.is_quiet
        group.serial += 1
        if group.trains:
            self._direct_trainer(group)
        else:
            self._direct_rollout(group)
        pause_s = QUIET_PAUSE_S if quiet and group.trains else rng.choice((0.2, 0.7, 1.5))
        self.clock.after(pause_s, None, lambda: self._direct(group))

    def _direct_trainer(self, group: ReplicaPlan) -> None:
        rng, quiet = group.user, self.job.is_quiet
        last = self._last(group)
        if last is not None and not quiet and group.rewinds.random() < self.job.config.rewinds:
            self.rule(Rewind(model=group.model, to=max(0, last - group.rewinds.randint(1, 2))))
        group.version = None if last is None or rng.random() < 0.6 else last + rng.randint(0, 3)  # noqa: PLR2004 (odds)
        group.timeout_s = rng.choice((0.05, 0.3, 1.0, 4.0))
        group.act = "wish" if rng.random() < 0.15 and not quiet else "publish"  # noqa: PLR2004 (odds)
        if quiet:
            # One group publishes once more and stands; the others stay as they are.
            standing = all(rank.published for rank in group.ranks) and self._stands_fresh(group.model)
            under_way = any(rank.done != group.serial - 1 for rank in group.ranks)
            first = next(each for each in self.processes.replicas if each.model == group.model)
            if standing or under_way or group is not first:
                group.serial -= 1
            group.version, group.timeout_s = None, 4.0

    def _direct_rollout(self, group: ReplicaPlan) -> None:
        rng, last = group.user, self._last(group)
        dice = rng.random()
        group.act = "release" if dice < 0.04 else "republish" if dice < 0.08 else "read"  # noqa: PLR2004 (odds)
        group.want = rng.choice(("latest", "latest", "newer", "newer", last if last is not None else "latest"))
        group.timeout_s = rng.choice((0.05, 0.5, 2.0, 6.0))
        group.wait_s = rng.choice((0.0, 0.3, group.timeout_s))
        if self.job.is_quiet:
            group.act, group.want, group.timeout_s = "read", "latest", QUIET_READ_S

    def _last(self, group: ReplicaPlan) -> int | None:
        record = self.job.view.model(group.model)
        return record.last if record is not None else None

    # What anybody may say.

    def _retain(self, name: str) -> None:
        """Have versions retained, as soon as there is a model."""
        retain, record = self.job.config.retain, self.job.view.model(name)
        if retain and not (record is not None and record.retain):
            self.rule(Retain(model=name, last=retain))
            self.clock.after(RETAIN_S, None, lambda: self._retain(name))

    def _delete(self) -> None:
        """Have the job deleted, again until the log has it."""
        if not self.job.view.catalog.deleted:
            self.rule(DeleteJob())
            self.clock.after(RETAIN_S, None, self._delete)

    def rule(self, command: Command) -> None:
        """Say what a user rules."""
        job = self.job
        verb, number = str(command.__struct_config__.tag), job.number()
        if job.network.is_up:
            job.log.append(command_subject(job.name, verb), encode(command), f"rule-{number}")

    # What must stand at the end.

    def missing(self) -> str | None:
        """Say what is missing until a version of the quiet time stands everywhere, for each model."""
        if self.job.config.deleted_after_s:
            return self._left()
        return next((why for why in map(self._missing_of, self.job.config.models) if why is not None), None)

    def _left(self) -> str | None:
        """Say what is left of a job that was to be deleted."""
        if not self.job.view.catalog.deleted:
            return "it is not deleted"
        agents = [agent for agent in self.processes.agents.values() if agent.up]
        left = [agent.name for agent in agents if agent.stored or not agent.core.is_over]
        return f"{left} have not freed all that they have of a deleted job" if left else None

    def _missing_of(self, name: str) -> str | None:
        record = self.job.view.model(name)
        newest = record.versions.get(record.last) if record is not None and record.last is not None else None
        if newest is None or not self._is_fresh(name, newest.number):
            return f"no version of {name} was published since"
        holders = self.job.view.holders(name)
        readers = [group for group in self.processes.replicas if group.model == name and not group.trains]
        late = [group.replica for group in readers if holders.get(group.replica) != newest.number]
        if late:
            return f"{late} do not hold version {newest.number} of {name}"
        apart = [rank.name for group in readers for rank in group.ranks if rank.version != newest.number]
        return f"{apart} were not told of version {newest.number} of {name}" if apart else None

    def _stands_fresh(self, name: str) -> bool:
        record = self.job.view.model(name)
        newest = record.versions.get(record.last) if record is not None and record.last is not None else None
        return newest is not None and newest.holders > 0 and self._is_fresh(name, newest.number)

    def _is_fresh(self, name: str, version: int) -> bool:
        """Tell whether a version was published since the last trouble."""
        return self.job.view.published_at.get((name, version), 0) > self.quiet_at
