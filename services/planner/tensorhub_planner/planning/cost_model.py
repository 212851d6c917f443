"""What a reader's agent has measured, in place of the model's constants where it has measured enough. Pure.

An agent measures links by names that are given here, and tells what it measured with each demand. So a planner keeps no
rate of its own, forgets none when it is restarted, and agrees with others that never heard of it.

A link is a source's host as seen from the reader's (its own host: memory; another one: the network), or another site as
a whole, whichever of its hosts the bytes come from. What is not measured itself is taken to be as its like: a host as
the median of those at the same distance, and the most that a reader takes in as the best that it got from any. So a
source of which nothing is known is neither avoided nor sought, and the model's ratios hold for measured rates too.

Rates count in steps of `STEP`: what differs by less than a rate is wrong by is equal, and then load and lot decide.
Else all readers would go to whichever of a hundred equal sources was measured a little faster.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from tensorhub_common.protocol.plans import RATES_MAX, LinkRate, Transport
from tensorhub_planner.primitives.limits import Limits, Rates
from tensorhub_planner.primitives.topology import TRANSPORTS, Distance, Place

STEP: Final = math.sqrt(2)
"""Of two neighbouring rates the higher is so many times the lower."""
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

Believed = Mapping[tuple[str, Transport], LinkRate]
"""By link and transport the rates that count."""


def link_of(distance: Distance, source: Place | None) -> str:
    """Name the link between a reader and a source at this distance; empty for one of which no place is known."""
    level = _LEVELS[distance]
    if level == OWN_HOST:
        return level
    if source is None:
        return ""
    return f"{level}/{source.site if distance is Distance.WAN else source.host}"


def believed(rates: Sequence[LinkRate], limits: Limits) -> Believed:
    """Return what of a demand's rates rests on enough samples, and is not too old."""
    return {
        (rate.link, rate.transport): rate
        for rate in rates[:RATES_MAX]
        if 0 < rate.bps <= BPS_MAX and rate.samples >= limits.samples_min and 0 <= rate.age_s <= limits.measured_s_max
    }


def stepped(bps: float) -> float:
    """Return the rate of the steps that is nearest."""
    return STEP ** round(math.log(bps, STEP))


def measured_limits(rates: Believed, limits: Limits) -> Limits:
    """Return the limits with the rates by distance that the measured links speak for."""
    if not rates:
        return limits
    own = rates.get((OWN_HOST, TRANSPORTS[Distance.HOST]))
    rack, site = _of(Distance.RACK, rates), _of(Distance.SITE, rates)
    best = max([*rack, *site], default=0)
    return msgspec.structs.replace(
        limits,
        local=limits.local if own is None else msgspec.structs.replace(limits.local, ingest_bps=stepped(own.bps)),
        rack=_like(limits.rack, rack or site, best),
        network=_like(limits.network, site or rack, best),
    )


def _of(distance: Distance, rates: Believed) -> list[int]:
    level, transport = f"{_LEVELS[distance]}/", TRANSPORTS[distance]
    return [rate.bps for (link, via), rate in rates.items() if link.startswith(level) and via == transport]


def _like(model: Rates, measured: Sequence[int], best: int) -> Rates:
    if not measured:
        return model
    return msgspec.structs.replace(model, ingest_bps=stepped(best), source_bps=stepped(median(measured)))
