"""Stored plans by transfer programs, used again for the next version while their sources are unchanged. Pure.

A trainer publishes a version a minute, and its ranks and the engine's stay where they are. A plan for all of a shard is
therefore stored, and given again with the new version and its roots, as long as the same plan would be decided again:
the program is the same, the holders are at the same places, all of them are ready, none is avoided, rates are
unchanged, and only the reader's own siblings read from the plan's sources, as when the plan was made.

Invariants:
- A reused plan has passed `verify_reused_plan`.
- At most `PLANS_MAX` plans with `SHARES_MAX` shares together are kept, the last used ones.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.protocol.plans import Plan, PlanRequest, SourceId
from tensorhub_planner.catalog_view.holders import Candidates, Holder
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import TRANSPORTS, AgentTransport, ReaderId
from tensorhub_planner.planning.cost_model import STEP, TrustedRates, trusted_rates
from tensorhub_planner.planning.verifier import verify_reused_plan
from tensorhub_planner.primitives.limits import PlanLimits

PLANS_MAX: Final = 16_384
SHARES_MAX: Final = 524_288
"""Of all kept plans together: some 200 MB at worst."""


class _CachedPlan(NamedTuple):
    """A plan, and what it was decided by."""

    plan: Plan
    me: SourceId
    key: str
    standing: bytes
    places: tuple[int, ...]
    """Of each share the place of its source among the holders."""
    lanes: tuple[AgentTransport, ...]
    """What the shares are read from."""
    rates: TrustedRates
    limits: PlanLimits


class PlanCache:
    """The last plan of each reader."""

    def __init__(self, plans_max: int = PLANS_MAX, shares_max: int = SHARES_MAX) -> None:
        """Keep none yet."""
        self._plans_max, self._shares_max = plans_max, shares_max
        self._made: OrderedDict[ReaderId, _CachedPlan] = OrderedDict()
        self._shares = 0

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._made)

    def again(
        self,
        reader: ReaderId,
        demand: PlanRequest,
        found: Candidates,
        ledger: LoadLedger,
        limits: PlanLimits,
        now: float,
    ) -> Plan | None:
        """Return the reader's last plan for this version, counted in the ledger; None where it has to be decided."""
        made, roll = self._made.get(reader), found.roll
        if made is None or roll is None or not _is_plain(demand) or demand.program != made.plan.program:
            return None
        if not roll.is_ready or roll.standing != made.standing or (found.seat.me, found.seat.key) != made[1:3]:
            return None
        if made.limits != limits or not _alike(made.rates, trusted_rates(demand.rates, limits)):
            return None
        # It asks for everything: what it was given before is void, and no load on anybody.
        ledger.done(reader)
        ledger.at(now)
        if not ledger.serves_only(reader, made.lanes, now):
            return None
        holders = [roll.holders.able[place] for place in made.places]
        plan = _with_roots(made.plan, demand.version, holders)
        verify_reused_plan(plan, made.plan, holders, reader=found.seat.me, avoid=frozenset(demand.avoid))
        self._made.move_to_end(reader)
        ledger.assign(reader, plan, now)
        return plan

    def keep(
        self,
        reader: ReaderId,
        demand: PlanRequest,
        found: Candidates,
        plan: Plan,
        ledger: LoadLedger,
        limits: PlanLimits,
        now: float,
    ) -> None:
        """Keep a plan that was just decided and counted, if it may be given again.

        `found` are all among whom was chosen. Where others read from one of them the choice may be another one later.
        """
        self._forget(reader)
        roll = found.roll
        if roll is None or not roll.is_ready or not _is_plain(demand) or plan.program is None:
            return
        # What siblings bring over to the site is shared out anew each time.
        if any(share.crosses for share in plan.shares):
            return
        lanes = ((holder.source.agent, transport) for holder in found.holders.able for transport in TRANSPORTS)
        if not ledger.serves_only(reader, lanes, now):
            return
        place = roll.places
        self._made[reader] = _CachedPlan(
            plan,
            found.seat.me,
            found.seat.key,
            roll.standing,
            tuple(place[share.source] for share in plan.shares),
            tuple((share.source.agent, share.transport) for share in plan.shares),
            trusted_rates(demand.rates, limits),
            limits,
        )
        self._shares += len(plan.shares)
        while len(self._made) > self._plans_max or self._shares > self._shares_max:
            self._forget(next(iter(self._made)))

    def _forget(self, reader: ReaderId) -> None:
        made = self._made.pop(reader, None)
        if made is not None:
            self._shares -= len(made.plan.shares)


def _is_plain(demand: PlanRequest) -> bool:
    """Tell whether a request is the first one of a read: for everything, with no failed source."""
    return demand.pieces is None and not demand.avoid and not demand.mapped and not demand.uncrossed


def _alike(before: TrustedRates, now: TrustedRates) -> bool:
    """Tell whether the same links were measured, and differ by less than a rate is wrong by."""
    if before.keys() != now.keys():
        return False
    return all(rate.bps <= now[link].bps * STEP and now[link].bps <= rate.bps * STEP for link, rate in before.items())


def _with_roots(plan: Plan, version: int, holders: Sequence[Holder]) -> Plan:
    replace = msgspec.structs.replace
    shares = [replace(share, root=holder.root) for share, holder in zip(plan.shares, holders, strict=True)]
    why = plan.why if plan.version == version else f"as version {plan.version} was read: {plan.why}"
    return replace(plan, version=version, shares=tuple(shares), why=why)
