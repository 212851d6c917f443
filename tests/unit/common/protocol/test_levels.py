"""Levels: what older and newer releases read out of one log, and what stops a job."""

import json

import msgspec
import pytest

from tensorhub_common.catalog import apply as applying
from tensorhub_common.catalog import snapshot
from tensorhub_common.catalog.snapshot import Snapshot, SnapshotUnreadable
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log import codec, levels
from tensorhub_common.protocol.log.codec import decode_command
from tensorhub_common.protocol.log.commands import Lead, Pin, Sender, Unreadable
from tensorhub_common.protocol.log.events import RegistryLeads
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level, LevelUnknown
from tensorhub_simulator.drivers.catalog import JOB, REGISTRY, CatalogDriver, refused

JOIN = {"verb": "join", "by": {"lane": "a", "incarnation": 1, "n": 1}, "host": "h", "site": "s"}


def lead(term: int, level: int = 0) -> Lead:
    return Lead(by=Sender(REGISTRY, term, 0), registry="registry-0", term=term, level=level)


def read(body: object, level: int, process: str | None = "a", verb: str = "join") -> object:
    return decode_command(verb, process, json.dumps(body).encode(), level)


def test_a_leader_raises_the_level_and_none_lowers_it() -> None:
    world = CatalogDriver(level=Level.FIRST)
    assert world.say(lead(1)) == (
        RegistryLeads(registry="registry-0", term=1, level=0, cmd=2, i=1, k=1, time=1002.0, by=Sender(REGISTRY, 1, 0)),
    )
    world.say(lead(2, Level.TOLERANT))
    assert world.catalog.level == Level.TOLERANT
    world.say(lead(3))
    assert (world.catalog.term, world.catalog.level) == (3, Level.TOLERANT)


def test_a_level_that_is_not_known_stops_the_job() -> None:
    """To go on would be to fold differently from those that know it."""
    world = CatalogDriver()
    with pytest.raises(
        LevelUnknown, match=f"level {NEWEST_LEVEL + 1}.*levels up to {int(NEWEST_LEVEL)}: it stops this job here"
    ):
        world.say(lead(1, NEWEST_LEVEL + 1))
    assert (world.catalog.term, world.catalog.level) == (0, NEWEST_LEVEL)


def test_a_level_from_whoever_may_not_raise_it_stops_nothing() -> None:
    """An agent, and a leader of a term that is over, are refused before anybody looks at the level."""
    world = CatalogDriver()
    world.say(lead(7))
    refused(world.say(msgspec.structs.replace(lead(5, NEWEST_LEVEL + 1), by=Sender(REGISTRY, 8, 0))), "BadCommand")
    refused(world.say(msgspec.structs.replace(lead(9, NEWEST_LEVEL + 1), by=Sender("a", 1, 90))), "BadCommand")
    refused(world.say(lead(9, -1)), "BadCommand")


def test_below_level_1_an_unknown_field_is_refused_as_earlier_releases_do() -> None:
    answer = read({**JOIN, "later": 1}, Level.FIRST)
    assert isinstance(answer, Unreadable)
    assert "later" in answer.reason
    assert not isinstance(read(JOIN, Level.TOLERANT), Unreadable)
    assert read({**JOIN, "later": 1}, Level.TOLERANT) == read(JOIN, Level.TOLERANT), "and passed over from there on"
    for level in Level:
        outside = read({"verb": "publish", "model": "m", "replica": "r", "versoin": 12}, level, None, "publish")
        assert isinstance(outside, Unreadable), "a misspelt field must not be taken for a wish without a version"
        assert "versoin" in outside.reason


@pytest.mark.parametrize("number", [-1, 2**53, 10**40])
def test_from_level_1_on_no_event_repeats_a_number_that_no_snapshot_can_have(number: int) -> None:
    """Earlier releases refuse it too, and name it in the refusal."""
    body = {**JOIN, "by": {"lane": "a", "incarnation": number, "n": 1}}
    assert isinstance(read(body, Level.TOLERANT), Unreadable)
    assert not isinstance(read(body, Level.FIRST), Unreadable)


def test_a_field_counts_from_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below it this release reads what one that does not know the field reads."""
    monkeypatch.setattr(codec, "COMMAND_FIELDS_SINCE", {("join", "rack"): Level.TOLERANT + 1})
    monkeypatch.setattr(codec, "NEWEST_LEVEL", Level.TOLERANT + 1)
    codec._fields_at.cache_clear()
    with_rack = {**JOIN, "rack": "r1"}
    assert isinstance(read(with_rack, Level.FIRST), Unreadable)
    assert read(with_rack, Level.TOLERANT) == read(JOIN, Level.TOLERANT)
    # An older release does not look at what is in the field.
    assert read({**JOIN, "rack": 7}, Level.TOLERANT) == read(JOIN, Level.TOLERANT)
    assert getattr(read(with_rack, Level.TOLERANT + 1), "rack", None) == "r1"
    monkeypatch.undo()
    codec._fields_at.cache_clear()


def test_a_verb_counts_from_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "VERBS_SINCE", {"pin": Level.TOLERANT})
    old, new = CatalogDriver(level=Level.FIRST), CatalogDriver(level=Level.TOLERANT)
    said = refused(old.say(Pin(model="m", version=1)), "BadCommand")
    assert (said.verb, said.model, said.by) == ("pin", "_hub", None)
    refused(new.say(Pin(model="m", version=1)), "VersionUnavailable")


def test_a_snapshot_names_what_counts_at_its_level() -> None:
    """So an older release goes on from it, as long as the job is at a level that it knows."""
    names = msgspec.msgpack.decode(snapshot.encode(Snapshot(3, 1.0, Catalog(JOB, seq=3))))["fields"]
    assert "level" not in names["Catalog"]
    raised = Snapshot(3, 1.0, Catalog(JOB, seq=3, level=Level.TOLERANT))
    assert "level" in msgspec.msgpack.decode(snapshot.encode(raised))["fields"]["Catalog"]
    assert snapshot.decode(JOB, snapshot.encode(raised)) == raised
    body = snapshot.encode(Snapshot(3, 1.0, Catalog(JOB, seq=3, level=NEWEST_LEVEL + 1)))
    with pytest.raises(SnapshotUnreadable, match=f"level {NEWEST_LEVEL + 1}"):
        snapshot.decode(JOB, body)


def test_what_is_said_to_be_later_is_there() -> None:
    """A row of the tables that names nothing would switch nothing."""
    assert set(levels.VERBS_SINCE) <= set(codec._fields_at(NEWEST_LEVEL))
    for verb, field in levels.COMMAND_FIELDS_SINCE:
        assert field in codec._fields_at(NEWEST_LEVEL)[verb]
    for kind, field in levels.STATE_FIELDS_SINCE:
        assert field in snapshot.FIELDS[kind]
