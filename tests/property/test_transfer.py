"""What holds of every read, whatever its sources do: one writer for a piece, nothing counts that is wrong, an end."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.transfer_chance import World

from tensorhub_agent.transfer.plan_requests import PLANS_MAX
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_simulator.faultsim.runner.run import scaled_down


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_every_read_ends_with_right_bytes_or_an_error(seed: int) -> None:
    world = World(Random(seed))
    with scaled_down():
        world.run()
    assert world.plans <= PLANS_MAX


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    """So that the test above means something: sources are left for every reason, and most reads are done."""
    left, ends = Counter[str](), Counter[TransferPhase]()
    reasons = ("it made no progress", "it was slow, and another source had nothing left to bring")
    with scaled_down():
        for seed in range(400):
            world = World(Random(seed))
            ends[world.run()] += 1
            left += world.story()
            if ends[TransferPhase.DONE] > ends[TransferPhase.FAILED] > 0 and all(left[reason] for reason in reasons):
                return
    pytest.fail(f"400 reads came to {ends}, and left sources for {left}")
