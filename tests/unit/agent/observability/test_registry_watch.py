"""That no registry answers is one line for all jobs, and that one does again another."""

from tensorhub_agent.observability.registry_watch import FORGOTTEN_S, SILENT_S, RegistryWatch

ALWAYS = -1000.0
"""NATS was there all the time."""


def saying(*times: float) -> RegistryWatch:
    """Let job `a` say as many commands on one lane, at these times."""
    watch = RegistryWatch()
    for number, at in enumerate(times, 1):
        watch.said("a", "agent-0", number, at)
    return watch


def test_a_registry_that_is_away_is_told_once_and_so_is_its_return() -> None:
    watch = saying(0.0, 1.0)
    watch.said("b", "agent-0", 3, 0.0)
    assert watch.look(SILENT_S - 0.1, ALWAYS) is None
    line = "no registry has answered for 3.0 s what this agent said in a, b: is one running?"
    assert watch.look(SILENT_S, ALWAYS) == line
    assert watch.look(10.0, ALWAYS) is None
    watch.answered("a", "agent-0", 2)
    assert watch.look(10.0, ALWAYS) is None, "the other job waits still"
    watch.answered("b", "agent-0", 3)
    assert watch.look(12.0, ALWAYS) == "the registry answers again after 12.0 s"
    assert watch.look(13.0, ALWAYS) is None


def test_what_was_said_behind_the_oldest_is_waited_for_too() -> None:
    watch = saying(0.0, 0.5, 1.0)
    watch.answered("a", "agent-0", 1)
    assert watch.look(SILENT_S + 0.9, ALWAYS) is None
    assert "no registry has answered" in (watch.look(SILENT_S + 1.0, ALWAYS) or "")
    watch.answered("a", "agent-0", 3)
    assert watch.look(SILENT_S + 2.0, ALWAYS) is not None


def test_while_nats_is_away_nothing_is_said_of_the_registry() -> None:
    watch = saying(0.0)
    assert watch.look(20.0, None) is None
    assert watch.look(21.0, 20.0) is None, "it had a second"
    assert watch.look(20.0 + SILENT_S, 20.0) is not None


def test_an_outcome_that_never_comes_is_forgotten() -> None:
    watch = RegistryWatch()
    watch.said("a", "agent-0", 5, 0.0)
    watch.answered("a", "agent-0", 4)
    watch.answered("a", "agent-9", 5)
    assert watch.look(SILENT_S, ALWAYS) is not None
    assert watch.look(FORGOTTEN_S, ALWAYS) == f"the registry answers again after {FORGOTTEN_S:.1f} s"
    watch.said("a", "agent-0", 6, 100.0)
    watch.forget("a")
    assert watch.look(200.0, ALWAYS) is None
