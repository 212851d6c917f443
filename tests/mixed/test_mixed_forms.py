"""Every message and stored form is read by the release before this one and by today's, whichever wrote it."""

import copy
import sys

import pytest
from tests.mixed.differences import Forms, differences, forms_of
from tests.mixed.release import NoRelease, python_of

from tensorhub_common import levels


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


def test_what_breaks_a_release_is_named(old: Forms, new: Forms) -> None:
    broken = copy.deepcopy(new)
    del broken["transfer.LeaseGrant"]["fields"]["ticket_s"]
    broken["commands.Want"]["fields"]["why"] = True
    broken["asks.Beat"]["tag"] = "beat"
    del broken["worker.Loaded"]
    broken["shards.Sibling"]["fields"] = {"layout": True, "shard": True}
    # What is new, and what has a default, breaks nothing.
    broken["transfer.LeaseGrant"]["fields"]["later"] = False
    broken["transfer.Later"] = {"tag": "later", "array": False, "brief": False, "fields": {"n": True}}
    assert sorted(differences(old, broken)) == [
        "asks.Beat has another tag or form: neither release reads it of the other",
        "commands.Want.why has no default: this release does not read what the older one writes without it",
        "shards.Sibling is an array, and its first fields are others: add fields at its end only",
        "transfer.LeaseGrant.ticket_s is gone: the older release does not read transfer.LeaseGrant without it",
        "worker.Loaded is gone: the older release still sends it and expects it",
    ]


def test_what_is_new_in_the_log_is_switched_by_a_level(old: Forms, new: Forms) -> None:
    """A verb, a field of a command, or a field of the state that the older release does not know has a row there."""
    missing = []
    for name, form in new.items():
        part, _, kind = name.partition(".")
        before = old.get(name, {"fields": {}})["fields"]
        later = [field for field in form["fields"] if field not in before]
        if part == "commands" and form["tag"] is not None:
            verb = form["tag"]
            if name not in old:
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
