"""What the demo tells: comparisons, rows, notes, and a verdict that is good only when all was seen."""

import json

import pytest

from tensorhub.demo.comparison import Claim, Comparison, Difference
from tensorhub.demo.display import Lines, Objects
from tensorhub.demo.happenings import AnyHappening, Ended, Killed, Missed, Released, Started, Wreck
from tensorhub.demo.messages import (
    TRAINER,
    Held,
    Joined,
    Proved,
    Published,
    Rested,
    Said,
    Sealed,
    Source,
    Standby,
    Stepped,
    Trouble,
    Unpublished,
)
from tensorhub.demo.plot import LATECOMER, ROLLOUTS, VICTIM
from tensorhub.demo.show import Note, Show

NBYTES = 80_000_000


def held(version: int, source: str = TRAINER, digest: str = "") -> Held:
    return Held(
        version=version,
        began=100.0,
        ended=100.5,
        nbytes=NBYTES,
        wire_s=0.02,
        sources=(Source(source, NBYTES // 2, "local"), Source(source, NBYTES // 2, "local")),
        digests={"w": digest or f"of {version}"},
    )


def proved(version: int) -> Proved:
    return Proved(version=version, nbytes=NBYTES, digests={"w": f"of {version}"})


def story() -> list[tuple[str, AnyHappening]]:
    """A demo of three versions in which all is as it should be."""
    told: list[tuple[str, AnyHappening]] = [(TRAINER, Started(pid=1)), (VICTIM, Started(pid=2))]
    told.append((TRAINER, Joined(parameters=20_000_000, nbytes=NBYTES, version=None)))
    for version in (1, 2, 3):
        told += [
            (TRAINER, Stepped(step=version, loss=5.0 - version, seconds=0.1)),
            (TRAINER, Sealed(version=version, nbytes=NBYTES, digests={"w": f"of {version}"})),
            (TRAINER, Published(version=version, at=100.4, loss=5.0 - version)),
            (TRAINER, Released(version=version, at=100.4)),
        ]
        told += [(replica, held(version)) for replica in ROLLOUTS[:3]]
        told.append((TRAINER, Unpublished(version=version)))
    told += [
        (VICTIM, Missed(version=2)),
        (VICTIM, Killed(version=3, pid=2, agent_pid=3, after_s=0.01)),
        (VICTIM, Wreck(version=3, written_bytes=NBYTES // 2, nbytes=NBYTES, filled=1)),
        (VICTIM, Started(pid=4)),
        (VICTIM, held(3, "rollout-1")),
        (VICTIM, Said(version=3, text="the sea", seconds=0.1)),
        (LATECOMER, Standby()),
        (LATECOMER, Trouble(error="VersionUnavailable", message="it went")),
        (LATECOMER, held(3, "rollout-3")),
        (TRAINER, Rested(version=3)),
        *((replica, proved(3)) for replica in (TRAINER, *ROLLOUTS)),
        *((replica, Ended(code=0, tail="")) for replica in (TRAINER, *ROLLOUTS)),
    ]
    return told


def seen(told: list[tuple[str, AnyHappening]]) -> tuple[Show, list[Note]]:
    show, notes = Show(), []
    for replica, news in told:
        notes += show.take(replica, news, 1.0)
    return show, notes


def test_a_good_demo_has_no_faults() -> None:
    show, notes = seen(story())
    assert show.faults() == []
    assert show.comparison.compared == 9 + 2 + 5
    assert show.comparison.nbytes == 16 * NBYTES
    events = [(note.kind, note.replica) for note in notes if note.is_event]
    assert events == [
        ("killed", VICTIM),
        ("wreck", VICTIM),
        ("back", VICTIM),
        ("trouble", LATECOMER),
        ("joined-late", LATECOMER),
    ]


def test_the_wait_begins_when_there_is_something_to_wait_for() -> None:
    """A rollout that asked before the version was published has waited from the publication on."""
    show, _ = seen(story())
    read = show.rows["rollout-1"].reads[-1]
    assert read.wait_s == pytest.approx(0.1)
    assert read.gb_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("dropped", "fault"),
    [
        (Wreck, "was not killed in the middle"),
        (Stepped, "the loss did not go down"),
        (Proved, "was not compared at the end"),
        (Sealed, "of which the trainer knows nothing"),
    ],
)
def test_what_was_promised_and_not_seen_is_a_fault(dropped: type, fault: str) -> None:
    show, _ = seen([(replica, news) for replica, news in story() if not isinstance(news, dropped)])
    assert any(fault in each for each in show.faults())


def test_a_late_one_that_read_from_the_trainer_is_a_fault() -> None:
    mixed = held(3)
    told = [(replica, mixed if replica == LATECOMER and isinstance(news, Held) else news) for replica, news in story()]
    assert seen(told)[0].faults() == [f"{LATECOMER} did not take its first weights from a peer"]


def test_one_that_never_came_back_is_a_fault() -> None:
    told = [(replica, news) for replica, news in story() if news != Started(pid=4)]
    assert f"{VICTIM} did not come back" in seen(told)[0].faults()


def test_other_bytes_are_a_fault_and_told_at_once() -> None:
    show, notes = seen([*story(), ("rollout-3", held(3, digest="another"))])
    assert show.faults() == ["rollout-3 holds other bytes than version 3 in w"]
    assert "NOT WHAT WAS PUBLISHED" in notes[-1].text


def test_claims_wait_for_the_trainers_word() -> None:
    comparison = Comparison()
    assert comparison.claim(Claim("rollout-1", 1, 10, {"a": "x", "b": "y"})) is None
    assert comparison.compared == 0
    comparison.seal(1, {"a": "x", "b": "y"})
    assert (comparison.compared, comparison.nbytes, comparison.equal) == (1, 10, {"rollout-1": 1})
    assert comparison.claim(Claim("rollout-2", 1, 10, {"a": "x"})) is False
    assert comparison.claim(Claim("rollout-3", 1, 10, {"a": "x", "b": "y", "c": "z"})) is False
    assert comparison.differences == [Difference("rollout-2", 1, ("b",)), Difference("rollout-3", 1, ("c",))]


def test_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    show, notes = seen(story())
    lines = Lines()
    lines.open("TensorHub demo")
    for note in notes:
        lines.tell(note)
    lines.sum_up(show, show.faults(), 12.0)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "rollout-2 killed 10 ms into its read of version 3" in out
    assert "rollout-2 40 of 80 MB had been overwritten: cut in the middle of the transfer" in out
    assert "every byte of 16 copies of 80 MB was compared with what the trainer published, 1.3 GB in all: equal" in out


def test_objects_are_json_with_a_summary_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    show, notes = seen(story())
    objects = Objects()
    objects.open("TensorHub demo")
    for note in notes:
        objects.tell(note)
    objects.sum_up(show, ["something"], 12.0)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"kind", "at_s", "replica"} <= told[0].keys()
    assert told[-1]["kind"] == "summary"
    assert (told[-1]["ok"], told[-1]["faults"], told[-1]["compared"]) == (False, ["something"], 16)
    late = told[-1]["replicas"][-1]
    assert (late["replica"], late["nbytes_from_peers"], late["nbytes_from_trainer"]) == (LATECOMER, NBYTES, 0)


def test_in_peace_it_is_no_fault_that_nobody_was_killed() -> None:
    show = Show(is_peaceful=True)
    for replica, news in story():
        if not isinstance(news, Killed | Wreck):
            show.take(replica, news, 1.0)
    assert show.faults() == []


def test_why_a_process_ended_is_told_to_people_and_to_programs() -> None:
    (note,) = Show().take(TRAINER, Ended(code=1, tail="AgentUnavailable: call again"), 1.0)
    assert note.text == "ended with exit code 1: AgentUnavailable: call again"
    assert (note.facts["code"], note.facts["tail"]) == (1, "AgentUnavailable: call again")
