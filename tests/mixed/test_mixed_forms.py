"""Every message and stored form is read by the release before this one and by today's, whichever wrote it."""

import copy
import json
import sys
from typing import Final

import pytest
from tests.mixed.differences import Forms, Kind, differences, forms_of
from tests.mixed.fields import decoded
from tests.mixed.release import NoRelease, python_of

from tensorhub_common.protocol.log import levels


@pytest.fixture(scope="module")
def old() -> Forms:
    try:
        return forms_of(str(python_of()))
    except NoRelease as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def new() -> Forms:
    return forms_of(sys.executable)


def test_each_release_reads_what_the_other_writes(old: Forms, new: Forms) -> None:
    """A failure names the field. Give it a default, or keep writing it until that release is not run any more."""
    assert differences(old, new) == []


def without(roots: list[Kind], form: str) -> list[Kind]:
    """Return what is read as a whole, without a form in unions."""
    return [
        {"any_of": [each for each in root["any_of"] if each != {"form": form}]} if "any_of" in root else root
        for root in roots
    ]


def test_what_breaks_a_release_is_named(old: Forms, new: Forms) -> None:
    broken = copy.deepcopy(new)
    forms = broken["forms"]
    del forms["leases.LeaseGrant"]["fields"]["ticket_s"]
    del forms["parts.Part"]["fields"]["cast"]
    forms["commands.Want"]["fields"]["why"] = {**TEXT, "required": True}
    forms["heartbeat.Heartbeat"]["tag"] = "beat"
    forms["events.Sibling"]["fields"] = dict(reversed(forms["events.Sibling"]["fields"].items()))
    forms["program.TransferProgram"]["fields"]["unread_count"]["required"] = True
    del forms["worker.Loaded"]
    broken["roots"] = without(broken["roots"], "worker.Loaded")
    # What is new, and what has a default, breaks nothing.
    forms["leases.LeaseGrant"]["fields"]["later"] = {**TEXT, "required": False}
    forms["leases.Later"] = {**forms["leases.LeaseGrant"], "tag": "later"}
    told = differences(old, broken)
    for sentence in (
        "asks.Beat has another tag or form: neither release reads it of the other",
        "commands.Want.why has no default: this release does not read what the older one writes without it",
        "commands.Want.why is always written, and the older release refuses what it does not know",
        "parts.Part.cast is gone: the older release gets back none of what it writes there",
        "program.Program.unread_count has no default: this release does not read what the older one writes without it",
        "shards.Sibling is an array, and its first fields are others: add fields at its end only",
        "transfer.LeaseGrant.ticket_s is gone: the older release does not read transfer.LeaseGrant without it",
        "worker.Loaded is gone: the older release still sends it and expects it",
    ):
        assert sentence in told
        told.remove(sentence)
    assert told == []


NUMBER: Final = {"type": "float"}
TEXT: Final = {"type": "str"}
COUNT: Final = {"type": "int"}
NONE: Final = {"type": "none"}
KIND: Final = {"form": "leases.LeaseRefusal"}
NEITHER: Final = "neither reads the other's"
NOT_HERE: Final = "this release does not read what the older one writes"
NOT_THERE: Final = "the older release does not read all that this one may write"


@pytest.mark.parametrize(
    ("was", "become", "why"),
    [
        (NUMBER, NUMBER, ""),
        (NUMBER, TEXT, NEITHER),
        (COUNT, NUMBER, NOT_THERE),
        (NUMBER, COUNT, NOT_HERE),
        (NUMBER, {"any_of": [NUMBER, NONE]}, NOT_THERE),
        ({"any_of": [NUMBER, NONE]}, NUMBER, NOT_HERE),
        ({"any_of": [NUMBER, NONE]}, {"any_of": [NONE, NUMBER]}, ""),
        ({"items": COUNT}, {"items": TEXT}, NEITHER),
        ({"items": COUNT}, {"tuple": [COUNT, COUNT]}, NOT_HERE),
        ({"tuple": [COUNT, TEXT]}, {"tuple": [TEXT, COUNT]}, NEITHER),
        ({"tuple": [COUNT]}, {"tuple": [COUNT, COUNT]}, NEITHER),
        ({"items": COUNT}, {"keys": TEXT, "items": COUNT}, NEITHER),
        ({"keys": TEXT, "items": COUNT}, {"keys": TEXT, "items": NUMBER}, NOT_THERE),
        ({"values": ["a"]}, {"values": ["a", "b"]}, NOT_THERE),
        ({"values": ["a"]}, TEXT, NOT_THERE),
        (COUNT, {**COUNT, "bounds": {"ge": 0}}, NOT_HERE),
        (KIND, {"form": "leases.LeaseRequest"}, NEITHER),
        (KIND, TEXT, NEITHER),
    ],
)
def test_a_field_of_another_type_is_named(new: Forms, was: Kind, become: Kind, why: str) -> None:
    """A reader may take more than the writer writes, and not less."""
    before, now = copy.deepcopy(new), copy.deepcopy(new)
    for forms, kind in ((before, was), (now, become)):
        forms["forms"]["leases.LeaseGrant"]["fields"]["ticket_s"] = {"required": True, "default": "", **kind}
    told = differences(before, now)
    if why:
        (sentence,) = told
        assert sentence.startswith("leases.LeaseGrant.ticket_s was ")
        assert sentence.endswith(f": {why}")
    else:
        assert told == []


def test_a_kind_of_message_that_is_new_breaks_no_field(new: Forms) -> None:
    """Beside kinds that were there before. Whether it may be sent yet is what a level says."""
    before, now = copy.deepcopy(new), copy.deepcopy(new)
    now["forms"]["leases.Later"] = {**now["forms"]["leases.LeaseRefusal"], "tag": "later"}
    later = {"form": "leases.Later"}
    for was, become, is_read in ((KIND, [KIND, later], True), (NUMBER, [NUMBER, later], False)):
        before["forms"]["leases.LeaseGrant"]["fields"]["ticket_s"] = {"required": True, "default": "", **was}
        now["forms"]["leases.LeaseGrant"]["fields"]["ticket_s"] = {"required": True, "default": "", "any_of": become}
        assert (differences(before, now) == []) == is_read


def test_a_message_that_a_decoder_reads_no_more_is_named(new: Forms) -> None:
    """Though its struct is still there."""
    now = copy.deepcopy(new)
    now["roots"] = without(new["roots"], "worker.Loaded")
    (told,) = differences(new, now)
    assert told.startswith("nothing of this release reads all of worker.Attach or ")


def test_a_struct_may_move_to_another_module(new: Forms) -> None:
    now = json.loads(json.dumps(new).replace('"parts.Part"', '"boxes.Part"'))
    assert differences(new, now) == []
    now["forms"]["boxes.Part"]["fields"]["name"] |= NUMBER
    assert differences(new, now) == [f"parts.Part.name was str and is float: {NEITHER}"]


def test_defaults_that_are_left_out_are_the_same_on_both_sides(new: Forms) -> None:
    now = copy.deepcopy(new)
    now["forms"]["program.TransferProgram"]["fields"]["unread_count"]["default"] = "1"
    assert sorted(differences(new, now)) == [
        "program.TransferProgram.unread_count is left out where it is 0, and this release takes it for 1",
        "program.TransferProgram.unread_count is left out where it is 1, and the older release takes it for 0",
    ]
    now["forms"]["program.TransferProgram"]["fields"]["unread_count"] |= {"required": True, "default": ""}
    assert differences(new, now) == [
        "program.TransferProgram.unread_count is left out where it is the default: this release does not read that"
    ]


def test_what_refuses_unknown_fields_gets_none_that_is_always_written(new: Forms) -> None:
    now = copy.deepcopy(new)
    later = {**TEXT, "required": False, "default": "''"}
    now["forms"]["commands.Want"]["fields"]["later"] = later
    now["forms"]["commands.Lead"]["fields"]["later"] = later
    assert [name for name in ("Want", "Lead") if new["forms"][f"commands.{name}"]["strict"]] == ["Want", "Lead"]
    assert differences(new, now) == [
        "commands.Want.later is always written, and the older release refuses what it does not know"
    ]


def test_every_form_is_found(new: Forms) -> None:
    """What is decoded anywhere, in whatever way it is said, and what stands in the fields of that."""
    source = """
one = msgspec.json.Decoder(One)
two: Final[msgspec.json.Decoder[Two]] = msgspec.msgpack.Decoder(Two | None)
def read(data):
    text = data.decode()
    return msgspec.msgpack.decode(data, type=Three), msgspec.convert(data, Four), json.Decoder(type=Five)
"""
    assert sorted(decoded(source)) == ["Five", "Four", "One", "Three", "Two | None"]
    # Of those: by a decoder, in a function, by a field of a field, as a dataclass, in a list.
    named = "program.TransferProgram layout.Layout parts.Part amax_cells.AmaxReduction regions.Blocks state.Replica"
    assert new["forms"].keys() >= {*named.split(), "snapshot_store.SnapshotRecord", "manifest.Manifest"}
    assert new["forms"]["parts.Part"]["array"]
    assert new["forms"]["leases.LeaseGrant"]["fields"]["ticket_s"]["type"] == "float"


def test_what_is_new_in_the_log_is_switched_by_a_level(old: Forms, new: Forms) -> None:
    """A verb, a field of a command, or a field of the state that the older release does not know has a row there."""
    missing = []
    for name, form in new["forms"].items():
        part, _, kind = name.partition(".")
        before = old["forms"].get(name, {"fields": {}})["fields"]
        later = [field for field in form["fields"] if field not in before]
        if part == "commands" and form["tag"] is not None:
            verb = form["tag"]
            if name not in old["forms"]:
                missing += [] if verb in levels.VERBS_SINCE else [f"VERBS_SINCE has no {verb!r}"]
                continue
            # The one that raises the level is read at each of them.
            rows = [(verb, field) for field in later if (verb, field) != ("lead", "level")]
            missing += [f"COMMAND_FIELDS_SINCE has no {row}" for row in rows if row not in levels.COMMAND_FIELDS_SINCE]
            if later and not form["brief"]:
                missing.append(f"{name} writes its defaults, which an older registry refuses: make it omit_defaults")
        if part == "state":
            rows = [(kind, field) for field in later]
            missing += [f"STATE_FIELDS_SINCE has no {row}" for row in rows if row not in levels.STATE_FIELDS_SINCE]
    assert missing == []
