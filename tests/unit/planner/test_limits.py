"""Which rates count over which distance."""

from tensorhub_common.protocol.plans import SHARES_MAX
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, WIDE, PlanLimits
from tensorhub_planner.primitives.topology import Distance


def test_rates_by_distance() -> None:
    limits = PlanLimits()
    assert [limits.rates(distance) for distance in Distance] == [LOCAL, LOCAL, NETWORK, NETWORK, WIDE]


def test_a_plan_fits_the_wire() -> None:
    """The wire's own limit on shares is kept."""
    assert PlanLimits().stripes_max <= PlanLimits().shares_max <= SHARES_MAX
