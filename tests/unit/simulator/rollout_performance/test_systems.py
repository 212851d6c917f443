"""The table of systems."""

from typing import get_args

import pytest

from tensorhub_simulator.rollout_performance.config.scenario import System
from tensorhub_simulator.rollout_performance.systems.systems import DRIVES, RUNS


@pytest.mark.long
def test_each_system_that_a_scenario_may_name_has_a_row() -> None:
    assert set(DRIVES) == {*get_args(System)}
    assert set(RUNS) <= set(DRIVES)
