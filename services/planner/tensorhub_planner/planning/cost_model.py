"""The cost model of a read: link rates measured by the reader's agent, and the division of bytes among sources. Pure.

Measured rates replace the model's constants where an agent has measured enough. An agent measures links by the names
that `link_of` gives, and sends its measurements with each demand. A planner therefore stores no rate of its own, loses
none at a restart, and agrees with planners that don't know of it.

A link is a source's host as seen from the reader's host, or another site as a whole, for all of its hosts. The link to
the reader's own host is memory, and the link to another host is the network. An unmeasured link takes the rate of
similar ones: a host takes the median of the hosts at the same distance. The most that a reader takes in is the best
rate that it got from any source. An unmeasured source is therefore neither avoided nor preferred, and the model's
ratios hold for measured rates too.

Rates are rounded to steps of `STEP`, since a smaller difference is within the error of a rate. Load and lot decide
between equal rates. Otherwise all readers would choose the one of a hundred equal sources that was measured a little
faster.

`stripe` decides how many sources to read equal pieces from, and how many bytes from each. A reader takes in at most
`ingest_bps`. A source gives `source_bps`, shared by its readers, so a source with n readers gives the next one
`source_bps / (n + 1)`. Each further source costs `setup_s`. With k sources that begin together and end together,

    seconds(k) = max(bytes / ingest_bps, level(k)) + k · setup_s

where `level` is the time at which the last of them would end if the reader took in everything at once. No read ends
before the reader has taken in all bytes of its plan (`floor_s`), so a part of the read need not end earlier either.
The fewest sources with a time within `slack` of the least are used.

Consequences of the model:
- One idle source is enough if it fills the reader by itself.
- Busy sources are striped.
- Small reads are not striped.
- No read is striped if the reader's own copying is the bound (`source_bps` is None), as on one host.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from tensorhub_common.protocol.plans import RATES_MAX, LinkRate, Transport
from tensorhub_planner.primitives.limits import PlanLimits, Rates
from tensorhub_planner.primitives.topology import TRANSPORT_BY_DISTANCE, AgentPlace, Distance

STEP: Final = math.sqrt(2)
"""The ratio of two neighbouring rates."""
BPS_MAX: Final = 10**15
"""What an agent tells beyond this it can't have measured: numbers on the wire have any length, and rates are computed
with as floating-point ones."""
OWN_HOST: Final = "host"
_LEVELS: Final[Mapping[Distance, str]] = {
    Distance.AGENT: OWN_HOST,
    Distance.HOST: OWN_HOST,
    Distance.RACK: "rack",
    Distance.SITE: "site",
    Distance.WAN: "wan",
}

TrustedRates = Mapping[tuple[str, Transport], LinkRate]
"""By link and transport the rates that count."""


def link_of(distance: Distance, source: AgentPlace | None) -> str:
    """Name the link between a reader and a source at this distance; empty for one of which no place is known."""
    level = _LEVELS[distance]
    if level == OWN_HOST:
        return level
    if source is None:
        return ""
    return f"{level}/{source.site if distance is Distance.WAN else source.host}"


def trusted_rates(rates: Sequence[LinkRate], limits: PlanLimits) -> TrustedRates:
    """Return what of a demand's rates rests on enough samples, and is not too old."""
    return {
        (rate.link, rate.transport): rate
        for rate in rates[:RATES_MAX]
        if 0 < rate.bps <= BPS_MAX and rate.samples >= limits.samples_min and 0 <= rate.age_s <= limits.measured_s_max
    }


def stepped(bps: float) -> float:
    """Return the rate of the steps that is nearest."""
    return STEP ** round(math.log(bps, STEP))


def measured_limits(rates: TrustedRates, limits: PlanLimits) -> PlanLimits:
    """Return the limits with the rates by distance that the measured links speak for."""
    if not rates:
        return limits
    own = rates.get((OWN_HOST, TRANSPORT_BY_DISTANCE[Distance.HOST]))
    rack, site = _of(Distance.RACK, rates), _of(Distance.SITE, rates)
    best = max([*rack, *site], default=0)
    return msgspec.structs.replace(
        limits,
        local=limits.local if own is None else msgspec.structs.replace(limits.local, ingest_bps=stepped(own.bps)),
        rack=_like(limits.rack, rack or site, best),
        network=_like(limits.network, site or rack, best),
    )


def _of(distance: Distance, rates: TrustedRates) -> list[int]:
    level, transport = f"{_LEVELS[distance]}/", TRANSPORT_BY_DISTANCE[distance]
    return [rate.bps for (link, via), rate in rates.items() if link.startswith(level) and via == transport]


def _like(model: Rates, measured: Sequence[int], best: int) -> Rates:
    if not measured:
        return model
    return msgspec.structs.replace(model, ingest_bps=stepped(best), source_bps=stepped(median(measured)))


class StripeCandidate(msgspec.Struct, gc=False):
    """A source that could be used: its readers so far, and the bytes that this same plan reads from it already."""

    readers: int
    begun: int = 0
    measured_bps: float | None = None
    """What it gives to one reader, where that was measured; else `rates.source_bps`."""

    def gives(self, source_bps: float) -> float:
        """Return what one reader more gets of it."""
        return (source_bps if self.measured_bps is None else self.measured_bps) / (self.readers + 1)


class Stripes(msgspec.Struct, frozen=True, gc=False):
    """How to read: the bytes of each of the first candidates, in the seconds that the model gives."""

    nbytes: tuple[float, ...]
    seconds: float
    seconds_alone: float


def stripe(
    nbytes: int,
    candidates: Sequence[StripeCandidate],
    rates: Rates,
    stripes_max: int,
    slack: float,
    floor_s: float = 0.0,
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


def _level(nbytes: int, used: Sequence[StripeCandidate], source_bps: float) -> float:
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


def _divide(nbytes: int, used: Sequence[StripeCandidate], source_bps: float) -> tuple[float, ...]:
    if len(used) == 1:
        return (float(nbytes),)
    level = _level(nbytes, used, source_bps)
    return tuple([max(0.0, level * each.gives(source_bps) - each.begun) for each in used])
