"""What one part of the simulation draws changes nothing that another part draws."""

from collections.abc import Sequence
from random import Random

from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.faults.all_faults import ALL
from tensorhub_simulator.faultsim.faults.injector import Fault, Injector
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World

SEED = 3


def test_a_stream_depends_on_the_seed_and_its_name_alone() -> None:
    one, same, other = Streams(1).of("a", 2), Streams(1).of("a", 2), Streams(1).of("a", 3)
    other.random()
    assert [one.random() for _ in range(3)] == [same.random() for _ in range(3)]
    assert len({Streams(seed).of(*names).random() for seed in (1, 2) for names in (("a", "b"), ("b", "a"))}) == 4


def transcript(faults: Sequence[Fault]) -> list[str]:
    """Return all that happens in a seed's world."""
    with scaled_down():
        world = World(SEED, draw_config(SEED, calm=False), steps=True, faults=faults)
        world.run()
    assert world.config.troubles > 0
    return list(world.transcript)


def test_a_new_fault_changes_no_seed_in_which_it_does_not_strike() -> None:
    """And where it strikes, it does change what happens."""

    def strike(faults: Injector, rng: Random) -> None:
        rng.choice(list(faults.processes.agents.values())).kill()

    before = transcript(ALL)
    assert transcript((Fault("new", 0.0, strike), *ALL)) == before
    assert transcript((*ALL, Fault("new", 1.0, strike))) != before
