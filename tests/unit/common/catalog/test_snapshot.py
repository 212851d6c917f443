"""Snapshots of a job: nothing is lost on the way through bytes, whatever the state grows."""

import random
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from tests.property.test_catalog import run

from tensorhub_common.catalog import snapshot as module
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.snapshot import FIELDS, Due, Snapshot, SnapshotUnreadable, Told, decode, encode, fields_of
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.events import AgentLost
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_simulator.drivers.catalog import JOB

LOST = AgentLost(cmd=7, i=1, k=2, agent="a", incarnation=3, term=4)


@pytest.mark.parametrize("seed", range(12))
def test_a_fold_goes_on_from_a_snapshot_as_if_it_had_folded_all(seed: int) -> None:
    """Taken after every tenth command of a life by chance; what follows has the same events and the same end."""
    world = run(random.Random(seed).choice, 200)
    catalog, said = Catalog(JOB, level=NEWEST_LEVEL), {}
    for number, (seq, time, command) in enumerate(world.log):
        if number % 10 == 0:
            before = catalog
            catalog = decode(JOB, encode(Snapshot(catalog.seq, catalog.time, catalog))).catalog
            assert catalog == before
            assert order_of(catalog) == order_of(before)
            check_invariants(catalog)
        said[seq] = apply(catalog, seq, time, command)
    assert [event for events in said.values() for event in events] == world.events
    assert catalog == world.catalog


def order_of(value: Any) -> Any:
    """Return all keys of all tables in their order, which decides who is woken first."""
    if isinstance(value, dict):
        return [(key, order_of(each)) for key, each in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [order_of(getattr(value, each.name)) for each in fields(value)]
    return None


def test_what_is_still_to_be_said_comes_along() -> None:
    told = Told(41, (7, 1, 2), (LOST,), (Due(msgspec.structs.replace(LOST, i=2), {"traceparent": "x"}, "_INBOX.a"),))
    snapshot = Snapshot(50, 12.5, Catalog(JOB, seq=7, term=4), told)
    assert decode(JOB, encode(snapshot)) == snapshot


def test_every_field_of_the_state_can_be_compared_and_kept() -> None:
    """So that the tests above see whatever the state grows: no field is left out of equality."""
    assert set(FIELDS) >= {"Catalog", "Model", "Replica", "Round", "Shard", "Version", "AgentRecord", "Remembered"}
    waiting: list[Any] = [Snapshot]
    seen: set[type] = set()
    while waiting:
        kind = waiting.pop()
        if is_dataclass(kind) and isinstance(kind, type) and kind not in seen:
            assert kind.__name__ not in {each.__name__ for each in seen}, f"two classes are called {kind.__name__}"
            seen.add(kind)
            for each in fields(kind):
                assert each.compare, f"{kind.__name__}.{each.name} is left out of comparisons"
                assert each.init, f"{kind.__name__}.{each.name} can't be given"
            waiting += get_type_hints(kind).values()
        elif get_origin(kind) is not None:
            waiting += get_args(kind)
        else:
            assert kind is not Any, "a field of any type can't be read back"


def test_a_snapshot_of_an_older_release_has_defaults_for_what_is_new() -> None:
    body = encode(Snapshot(3, 1.0, Catalog(JOB, seq=3)))
    envelope = msgspec.msgpack.decode(body, type=dict)
    envelope["fields"]["Catalog"] = [name for name in envelope["fields"]["Catalog"] if name != "term"]
    state = msgspec.msgpack.decode(body, type=module._Envelope).state
    plain = msgspec.msgpack.decode(state)
    del plain["catalog"]["term"]
    envelope["state"] = msgspec.Raw(msgspec.msgpack.encode(plain))
    assert decode(JOB, msgspec.msgpack.encode(envelope)).catalog == Catalog(JOB, seq=3)


def test_a_snapshot_of_a_newer_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave out what is not known would be to fold differently from the others."""
    monkeypatch.setattr(module, "FIELDS", {**FIELDS, "Catalog": (*FIELDS["Catalog"], "pins")})
    body = encode(Snapshot(3, 1.0, Catalog(JOB, seq=3)))
    monkeypatch.undo()
    with pytest.raises(SnapshotUnreadable, match=r"newer release.*Catalog\.pins"):
        decode(JOB, body)
    monkeypatch.setattr(module, "FORMAT", 2)
    body = encode(Snapshot(3, 1.0, Catalog(JOB, seq=3)))
    monkeypatch.undo()
    with pytest.raises(SnapshotUnreadable, match="format 2"):
        decode(JOB, body)


def test_new_fields_are_found_by_themselves() -> None:
    @dataclass
    class Pin:
        version: int

    grown = make_dataclass("Grown", [("pins", dict[str, Pin | None])])
    assert fields_of(grown) == {"Grown": ("pins",), "Pin": ("version",)}


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\xc1", encode(Snapshot(3, 1.0, Catalog(JOB)))[:-3]])
def test_what_is_no_snapshot_is_refused(body: bytes) -> None:
    with pytest.raises(SnapshotUnreadable, match="can't be read"):
        decode(JOB, body)


def test_another_jobs_snapshot_is_refused() -> None:
    with pytest.raises(SnapshotUnreadable, match="other-job"):
        decode(JOB, encode(Snapshot(3, 1.0, Catalog("other-job"))))
