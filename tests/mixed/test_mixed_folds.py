"""The release before this one and today's fold one log alike, follow each other, and read each other's snapshots."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.mixed.folding import Entry, Folded, Task
from tests.mixed.release import NoRelease, python_of

from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_event, encode
from tensorhub_common.protocol.log.commands import Lead, Sender, Unreadable
from tensorhub_common.protocol.log.events import kind_of, model_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_registry.core.release_agreement import agrees
from tensorhub_simulator.drivers.catalog import JOB, CatalogDriver
from tensorhub_simulator.drivers.catalog_commands import DrawnCommands

PROGRAM: Final = str(Path(__file__).with_name("folding.py"))
STEPS: Final = 250
FOLD_S: Final = 50.0


@pytest.fixture(scope="module")
def old() -> str:
    try:
        return str(python_of())
    except NoRelease as why:
        pytest.skip(str(why))


def fold(python: str, entries: list[Entry], snapshot: bytes | None = None) -> Folded:
    task = msgspec.json.encode(Task(JOB, entries, snapshot))
    done = subprocess.run([python, "-P", PROGRAM], input=task, capture_output=True, check=False, timeout=FOLD_S)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return msgspec.json.decode(done.stdout, type=Folded)


def entry(seq: int, subject: str, data: bytes) -> Entry:
    return Entry(seq, 1000.0 + seq, f"{subjects.PREFIX}.{JOB}.{subject}", data)


def commands_by_chance(seed: int) -> list[Entry]:
    """Return a life by chance at the level of the older release, with what is no command in between."""
    world = CatalogDriver(level=Level.FIRST)
    chance = DrawnCommands(world, random.Random(seed).choice)
    for _ in range(STEPS):
        world.say(chance.command())
    entries: list[Entry] = []
    for seq, _, command in world.log:
        # The world counts in twos: between two commands stands what is no event, as JetStream may put it there.
        entries.append(entry(seq - 1, "event._hub.agent.joined", b"{}"))
        if isinstance(command, Unreadable) or _is_beyond_bounds(command.by):
            entries.append(entry(seq, "cmd.fly.a", b'{"verb":"fly"}'))
            continue
        verb = str(command.__struct_config__.tag)
        process = "" if command.by is None else f".{command.by.process}"
        entries.append(entry(seq, f"cmd.{verb}{process}", encode(command)))
    return entries


def _is_beyond_bounds(by: Sender | None) -> bool:
    """Tell whether the older release could not make a snapshot while the answer to this sender is not published."""
    return by is not None and max(by.incarnation, by.n) >= 2**63


def said(events: list[str], after: int) -> list[Entry]:
    entries = []
    for number, body in enumerate(events, start=1):
        event = decode_event(body.encode())
        entries.append(entry(after + number, f"event.{model_of(event)}.{kind_of(event)}", body.encode()))
    return entries


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_two_releases_fold_one_log_alike(old: str, seed: int) -> None:
    """What both know of each event is the same, and each goes on from the other's snapshot of the middle."""
    entries = commands_by_chance(seed)
    one, other = fold(old, entries), fold(sys.executable, entries)
    assert (one.error, other.error) == (None, None)
    assert len(one.events) == len(other.events) > STEPS
    assert all(agrees(decode_event(b.encode()), a.encode()) for a, b in zip(one.events, other.events, strict=True))
    half = len(entries) // 2
    first, second = entries[:half], entries[half:]
    for begins, goes_on in ((old, sys.executable), (sys.executable, old)):
        begun = fold(begins, first)
        gone_on = fold(goes_on, second, begun.snapshot)
        assert gone_on.error is None
        assert begun.events + gone_on.events in (
            [*one.events[: len(begun.events)], *other.events[len(begun.events) :]],
            [*other.events[: len(begun.events)], *one.events[len(begun.events) :]],
        )


@pytest.mark.long
def test_each_follows_the_other_as_its_leader(old: str) -> None:
    """A standby compares what the leader of the other release wrote with what it decided itself."""
    entries = commands_by_chance(3)
    for leads, follows in ((old, sys.executable), (sys.executable, old)):
        led = fold(leads, entries)
        followed = fold(follows, [*entries, *said(led.events, entries[-1].seq)])
        assert (followed.error, followed.seq) == (None, entries[-1].seq + len(led.events))


def test_the_older_release_stops_at_a_raised_log(old: str) -> None:
    """It says so, and folds nothing of that level, of the log or of a snapshot."""
    lead = Lead(by=Sender("_registry", 1, 0), registry="registry-0", term=1, level=NEWEST_LEVEL)
    entries = [entry(1, "cmd.lead._registry", encode(lead))]
    led = fold(sys.executable, entries)
    followed = fold(old, [*entries, *said(led.events, 1)])
    assert followed.error is not None
    assert "another version of the registry has spoken" in followed.error
    assert (followed.seq, followed.events[0].count("command.rejected")) == (1, 1)
    refused = fold(old, [], led.snapshot).error or ""
    assert "was written by a newer release (this one does not know " in refused
    assert "Catalog.level" in refused
    assert refused.endswith("): run that one")
