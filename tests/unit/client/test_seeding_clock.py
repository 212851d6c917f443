"""What a trainer measures of a step for seeding: from one publication to the next, however often it seeds."""

from tensorhub.aio.seeding import SeedingClock


def test_a_step_goes_on_until_the_next_version() -> None:
    clock = SeedingClock()
    clock.begin_step(1)
    clock.train_wait_s, clock.seeded_s = 5.0, 2.0
    clock.begin_step(1)
    assert (clock.train_wait_s, clock.seeded_s) == (5.0, 2.0)
    clock.begin_step(2)
    assert (clock.train_wait_s, clock.seeded_s) == (0.0, 0.0)
