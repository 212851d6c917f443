"""Whether registries answer this agent: each command that its jobs' logs have taken gets its outcome there. Pure.

Always true: a job counts as unanswered only where the oldest of its commands has waited for `SILENT_S` while there was
a connection to NATS; that and its end are one line each, however many jobs and commands there are.
"""

from typing import Final, NamedTuple

SILENT_S: Final = 3.0
"""A command without an outcome for this long: a standby registry leads within less."""

FORGOTTEN_S: Final = 60.0
"""A command that has had no outcome for this long counts no more: a restarted log may never answer it."""

JOBS_NAMED_MAX: Final = 4
"""A line names at most this many jobs."""


class _Unanswered(NamedTuple):
    """The commands of one lane that have no answer: the oldest and the newest, by number, and when they were said."""

    oldest: int
    since: float
    newest: int
    newest_at: float


class RegistryWatch:
    """All jobs of one agent."""

    def __init__(self) -> None:
        """Wait for nothing."""
        self._said: dict[tuple[str, str], _Unanswered] = {}
        """What has no answer yet, by job and lane."""
        self._silent_since: float | None = None

    def said(self, job: str, lane: str, number: int, now: float) -> None:
        """A command goes to the log."""
        before = self._said.get((job, lane))
        oldest, since = (number, now) if before is None else (before.oldest, before.since)
        self._said[job, lane] = _Unanswered(oldest, since, number, now)

    def answered(self, job: str, lane: str, number: int) -> None:
        """The log has the outcome of a command."""
        waits = self._said.get((job, lane))
        if waits is None or number < waits.oldest:
            return
        if number >= waits.newest:
            del self._said[job, lane]
        else:
            # When those between were said is not kept: none of them waits for longer than is taken here.
            self._said[job, lane] = _Unanswered(number + 1, waits.newest_at, waits.newest, waits.newest_at)

    def forget(self, job: str) -> None:
        """The job's commands are dropped, or it is over."""
        self._said = {key: said for key, said in self._said.items() if key[0] != job}

    def look(self, now: float, connected_since: float | None) -> str | None:
        """Return the line that is due. `connected_since` is since when NATS could be reached; None: it can't be."""
        if connected_since is None:
            # That NATS is away says nothing of the registry.
            return None
        self._said = {key: said for key, said in self._said.items() if now - said.since < FORGOTTEN_S}
        waits: dict[str, float] = {}
        for (job, _), said in self._said.items():
            waits[job] = min(waits.get(job, now), max(said.since, connected_since))
        late = sorted(job for job, since in waits.items() if now - since >= SILENT_S)
        if late and self._silent_since is None:
            self._silent_since = min(waits[job] for job in late)
            named = ", ".join(late[:JOBS_NAMED_MAX])
            more = f" and {len(late) - JOBS_NAMED_MAX} more" if len(late) > JOBS_NAMED_MAX else ""
            for_s = now - self._silent_since
            return f"no registry has answered for {for_s:.1f} s what this agent said in {named}{more}: is one running?"
        if not late and self._silent_since is not None:
            silent_s, self._silent_since = now - self._silent_since, None
            return f"the registry answers again after {silent_s:.1f} s"
        return None
