"""Every message and stored form is read by the release before this one and by today's, whichever wrote it."""

import copy
import sys

import pytest
from tests.mixed.differences import Forms, differences, forms_of
from tests.mixed.release import NoRelease, python_of


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
    broken["transfer.Later"] = {"tag": "later", "array": False, "strict": False, "fields": {"n": True}}
    assert sorted(differences(old, broken)) == [
        "asks.Beat has another tag or form: neither release reads it of the other",
        "commands.Want.why has no default: this release does not read what the older one writes without it",
        "shards.Sibling is an array, and its first fields are others: add fields at its end only",
        "transfer.LeaseGrant.ticket_s is gone: the older release does not read transfer.LeaseGrant without it",
        "worker.Loaded is gone: the older release still sends it and expects it",
    ]
