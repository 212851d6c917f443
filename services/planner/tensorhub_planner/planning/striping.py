"""How many sources to read equal pieces from, and how many bytes from each.

The model. A reader takes in `ingest_bps` at most. A source gives `source_bps`, shared by its readers, so one with n
readers gives the next one `source_bps / (n + 1)`. Each source more costs `setup_s`. With k sources that begin together
and also end together,

    seconds(k) = max(bytes / ingest_bps, level(k)) + k · setup_s

where `level` is when the last of them would end if the reader took in everything at once. No read ends before the
reader has taken in all that its plan brings (`floor_s`), so a part of it need not either. Taken are the fewest sources
whose time is within `slack` of the least. It follows that one idle source is enough where it fills the reader by
itself; that sources which are busy are striped; that small reads are not; and that nothing is where the reader's own
copying is the bound (`source_bps` is None), as on one host.
"""

from collections.abc import Sequence

import msgspec

from tensorhub_planner.primitives.limits import Rates


class Candidate(msgspec.Struct, gc=False):
    """A source that could be used: its readers so far, and the bytes that this same plan reads from it already."""

    readers: int
    begun: int = 0
    measured_bps: float | None = None
    """What it gives to one reader, where that was measured; else `rates.source_bps`."""

    def gives(self, source_bps: float) -> float:
        """Return what one reader more gets of it."""
        return (source_bps if self.measured_bps is None else self.measured_bps) / (self.readers + 1)


class Stripes(msgspec.Struct, frozen=True, gc=False):
    """How to read: so many bytes of each of the first candidates, in the seconds that the model gives."""

    nbytes: tuple[float, ...]
    seconds: float
    seconds_alone: float


def stripe(
    nbytes: int, candidates: Sequence[Candidate], rates: Rates, stripes_max: int, slack: float, floor_s: float = 0.0
) -> Stripes:
    """Divide `nbytes` among candidates that are sorted by preference; at least one is needed."""
    times: list[float] = []
    begun = fresh = 0
    for used, each in enumerate(candidates[:stripes_max], start=1):
        begun += each.begun
        fresh += each.begun == 0
        # More sources than these need no less than this: the reader's own time, and asking them.
        least = max((nbytes + begun) / rates.ingest_bps, floor_s) + rates.setup_s * fresh
        if times and (rates.source_bps is None or nbytes == 0 or min(times) <= least):
            break
        level = 0.0 if rates.source_bps is None else _level(nbytes, candidates[:used], rates.source_bps)
        times.append(max(least, level + rates.setup_s * fresh))
    if rates.source_bps is None:
        return Stripes((float(nbytes),), times[0], times[0])
    goal = min(times) * (1 + slack)
    used = next(k for k, seconds in enumerate(times, start=1) if seconds <= goal)
    return Stripes(_divide(nbytes, candidates[:used], rates.source_bps), times[used - 1], times[0])


def _level(nbytes: int, used: Sequence[Candidate], source_bps: float) -> float:
    """Return the time at which all of `used` end together, each with what it has begun and its part of `nbytes`.

    One that ends what it has begun only after that time gets no part.
    """
    if len(used) == 1:
        return (nbytes + used[0].begun) / used[0].gives(source_bps)
    speed, work, level = 0.0, float(nbytes), 0.0
    for each in sorted(used, key=lambda one: one.begun / one.gives(source_bps)):
        rate = each.gives(source_bps)
        if speed and each.begun / rate >= level:
            break
        speed += rate
        work += each.begun
        level = work / speed
    return level


def _divide(nbytes: int, used: Sequence[Candidate], source_bps: float) -> tuple[float, ...]:
    if len(used) == 1:
        return (float(nbytes),)
    level = _level(nbytes, used, source_bps)
    return tuple([max(0.0, level * each.gives(source_bps) - each.begun) for each in used])
