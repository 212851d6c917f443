"""Which rates count over which distance."""

from tensorhub_common.protocol.plans import SHARES_MAX
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, WIDE, Limits
from tensorhub_planner.primitives.topology import Distance


def test_rates_by_distance() -> None:
    limits = Limits()
    assert [limits.rates(distance) for distance in Distance] == [LOCAL, LOCAL, NETWORK, NETWORK, WIDE]


def test_a_plan_fits_the_wire() -> None:
    """The wire's own limit on shares is kept."""
    assert Limits().stripes_max <= Limits().shares_max <= SHARES_MAX
