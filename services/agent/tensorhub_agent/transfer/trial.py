"""A trial of another source, beside a half-filled source that brings little. Pure.

A slow source in the middle of a chain makes progress, so it is not left for silence; and while it is the only source,
no idle source exists that could take its pieces over. So after `trial_s` about one batch of what it has not brought is
let loose, and the planner is asked for another source. That source is kept if it brings the batch in far less time, and
then takes over by its rate as any idle source does. Otherwise it is closed, and the next trial comes later. Where a
plan names several sources, each is judged by its own part before it is given more.

Far less, because in a chain that is as fast as the network the tried holder also feeds the chain, and so seems half as
fast at best. A read that moved to it would take from the chain what the read itself lives on.

What it is worth, by `tensorhub simulate` (standalone, one sending card in eight ten times as slow): the mean update
takes 5.2 s instead of 17.0 s on 512 GPUs, and the longest 5.6 s instead of 22.9 s on 64. Without a slow card it costs:
3.8 s instead of 3.5 s on 512 GPUs.

Invariants:
- The sources of one plan are tried at a time, and those of at most `trials_max` plans in one read.
- What is let loose was not in flight.
- Each source grants its lease by the rules of every lease, so a trial adds no way to wait for oneself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.source import BATCH_PIECES_MAX, Source, SourcePhase
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.ranges import Range

NO_FASTER: Final = "it was tried, and is not much faster than the source that there is"


class TrialState(StrEnum):
    """How far a trial is."""

    RESTING = "resting"
    ASKED = "asked"
    TRYING = "trying"
    KEPT = "kept"


@dataclass(slots=True, eq=False)
class Trial:
    """The trials of one read, one after the other."""

    limits: TransferLimits = DEFAULT_LIMITS
    state: TrialState = TrialState.RESTING
    count: int = 0
    _lone: Source | None = None
    """The half-filled source that all pieces are with."""
    _tried: list[Source] = field(default_factory=list)
    """Who is not judged yet."""
    _is_better: bool = False
    """One of them was kept."""
    _since: float = 0.0
    _got_bytes: int = 0
    """What the lone one had brought by then."""
    _open_since: dict[int, float] = field(default_factory=dict)
    """By the numbers of those that are tried."""

    @property
    def avoid(self) -> tuple[SourceId, ...]:
        """Whom the planner is to leave out for the sake of a trial."""
        lone = self._lone
        return (lone.share.source,) if lone is not None and self.state is TrialState.ASKED else ()

    def look(
        self, live: Collection[Source], loose: list[Range], sizes: Sequence[int], now: float, *, asks: bool
    ) -> list[Source]:
        """Let time pass for a read under way and its live sources; `asks`: a question for a plan is out.

        May add to `loose` what another source is to bring. Returns the sources that were tried in vain, to be closed.
        """
        match self.state:
            case TrialState.RESTING:
                self._watch(live, loose, sizes, now)
            case TrialState.KEPT if len(live) == 1:
                self._rest(now)
            case TrialState.ASKED:
                self._await(live, now, over=not loose and not asks)
            case TrialState.TRYING:
                return self._compare(now)
            case _:
                pass
        return []

    def _watch(self, live: Collection[Source], loose: list[Range], sizes: Sequence[int], now: float) -> None:
        """Begin a trial when the one source has been slow for long enough."""
        lone = next(iter(live)) if len(live) == 1 else None
        if lone is not None and (not lone.is_ready or lone.has is None):
            lone = None
        if lone is not self._lone:
            self._lone = lone
            self._mark(now)
        wait_s = self.limits.trial_s * self.limits.trial_times**self.count
        if (
            lone is None
            or now < self._since + wait_s
            or self.count >= self.limits.trials_max
            or loose
            or not lone.waiting
        ):
            return
        mean_bytes = max(sum(sizes) / len(sizes), 1.0)
        if lone.waiting * mean_bytes < self._rate(now) * wait_s:
            # It ends soon, as far as can be known; what is known is measured anew.
            self._mark(now)
            return
        pieces = min(lone.waiting // 2, round(self.limits.trial_bytes / mean_bytes), BATCH_PIECES_MAX)
        loose.extend(lone.take_back(max(pieces, 1), None))
        self.count += 1
        self.state = TrialState.ASKED

    def _await(self, live: Collection[Source], now: float, *, over: bool) -> None:
        """Another source is opened, or there is none."""
        others = [source for source in live if source is not self._lone]
        if len(others) == len(live) or (not others and over):
            self._rest(now)
        elif others:
            self._tried, self._open_since, self._is_better = others, {}, False
            self.state = TrialState.TRYING

    def _compare(self, now: float) -> list[Source]:
        """Judge those that have brought what was asked of them; return who is not kept."""
        in_vain: list[Source] = []
        if self._lone is None or not self._lone.is_live:
            self._rest(now)
            return in_vain
        for tried in list(self._tried):
            if not tried.is_live:
                self._tried.remove(tried)
            elif tried.phase is SourcePhase.OPEN:
                took_s = now - self._open_since.setdefault(tried.number, now)
                if tried.is_idle:
                    self._tried.remove(tried)
                    if tried.got_bytes > self.limits.trial_better_times * self._rate(now) * took_s:
                        self._is_better = True
                    else:
                        in_vain.append(tried)
        if not self._tried and self._is_better:
            self.state = TrialState.KEPT
        elif not self._tried:
            self._rest(now)
        return in_vain

    def _rate(self, now: float) -> float:
        """Return what the lone source brings in a second, waiting for its own source included."""
        lone = self._lone
        return (lone.got_bytes - self._got_bytes) / max(now - self._since, 1e-9) if lone is not None else 0.0

    def _mark(self, now: float) -> None:
        self._since = now
        self._got_bytes = self._lone.got_bytes if self._lone is not None else 0

    def _rest(self, now: float) -> None:
        self.state, self._tried = TrialState.RESTING, []
        self._mark(now)
