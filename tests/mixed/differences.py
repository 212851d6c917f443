"""What of the messages and stored forms one release can't read of the other, in sentences.

Both directions count: any part of a hub may be of either release, and an upgrade may be rolled back. What one may write
is to be among what the other reads. A kind of message that is new is none of this: a level switches it on.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict

PROGRAM: Final = str(Path(__file__).with_name("fields.py"))
ERROR: Final = "queries.QueryError"
"""May come for any answer, so whoever reads answers of a kind that it is given reads this beside each of them."""
RENAMED: Final = {
    "asks.Beat": "heartbeat.Heartbeat",
    "asks.Error": "queries.QueryError",
    "asks.Served": "heartbeat.ReaderLoad",
    "asks.Serving": "heartbeat.ServingLoad",
    "commands.Holding": "commands.HeldShard",
    "fold_cells.Fold": "amax_cells.AmaxReduction",
    "gather_frames.Gather": "frames.GatherRequest",
    "gather_frames.Sums": "frames.GatherDigests",
    "lease_frames.Broken": "lease_messages.LeaseBroken",
    "lease_frames.Cede": "lease_messages.PiecesHandedOff",
    "lease_frames.Confirm": "lease_messages.ConfirmRequest",
    "lease_frames.Done": "lease_messages.ReaderDone",
    "lease_frames.Have": "lease_messages.PiecesAvailable",
    "lease_frames.Holds": "lease_messages.ConfirmReply",
    "lease_frames.No": "lease_messages.Denied",
    "lease_frames.Promise": "lease_messages.PiecesPromised",
    "lease_frames.Retract": "lease_messages.PromiseRetracted",
    "program.Cut": "program.UnitSplit",
    "program.Group": "program.TensorGroup",
    "program.Owner": "program.SourceBox",
    "program.Program": "program.TransferProgram",
    "regions.Form": "regions.StridedForm",
    "snapshots.Index": "snapshot_store.SnapshotIndex",
    "snapshots.Record": "snapshot_store.SnapshotRecord",
    "traces.Link": "spans.SpanLink",
    "traces.Span": "spans.FinishedSpan",
    "transfer.Demand": "plans.PlanRequest",
    "transfer.DigestsAsk": "leases.DigestsRequest",
    "transfer.LeaseAsk": "leases.LeaseRequest",
    "transfer.Turn": "plans.ReadPriority",
    "transport_facts.Broken": "transports.ProbeFailed",
    "ucxx_frames.Fetch": "frames.FetchPacked",
    "ucxx_frames.Idle": "frames.LeaseClosed",
    "ucxx_frames.Pack": "frames.PackRequest",
    "ucxx_frames.Packed": "frames.PackReply",
    "ucxx_frames.Want": "frames.PieceRequest",
    "ucxx_frames.WantPatches": "frames.PatchRequest",
    "worker.Encoded": "worker.EncodedBytes",
    "worker.Holds": "worker.HoldingChanged",
    "worker.Refused": "worker.AttachRefused",
}
"""Forms of the older release, and what they are called today. On the wire is neither name: tags and fields count."""
Kind = dict[str, Any]
"""A type, as `fields.py` describes it."""
Form = dict[str, Any]


class Forms(TypedDict):
    """The messages and stored forms of a release."""

    forms: dict[str, Form]
    roots: list[Kind]
    """What is read as a whole."""


def forms_of(python: str) -> Forms:
    done = subprocess.run([python, "-P", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise AssertionError(f"{python} can't describe its messages: {done.stderr[-1000:]}")
    found: Forms = json.loads(done.stdout)
    return found


def differences(old: Forms, new: Forms) -> list[str]:
    """Say what the older release can't read of today's, and today's of the older one."""
    names = _names(old, new)
    found = [
        f"{name} is gone: the older release still sends it and expects it"
        for name in sorted({each for root in old["roots"] for each in _forms_in(root)} - names.keys())
    ]
    read = [set(_forms_in(root)) for root in new["roots"]]
    for root in old["roots"]:
        known = {names[name] for name in _forms_in(root) if name in names} - {ERROR}
        if not any(known <= each for each in read):
            found.append(f"nothing of this release reads all of {_said(root)}, as the older one does")
    return found + _Pairs(old["forms"], new["forms"], list(names.items())).differences()


def _names(old: Forms, new: Forms) -> dict[str, str]:
    """Return what each form of the older release is called today; one whose module moved keeps its class's name."""
    names = {name: name for name in old["forms"] if name in new["forms"]}
    names |= {name: moved for name, moved in RENAMED.items() if name in old["forms"] and moved in new["forms"]}
    for name in old["forms"].keys() - names.keys():
        moved = [each for each in new["forms"].keys() - old["forms"].keys() if _class(each) == _class(name)]
        if len(moved) == 1:
            names[name] = moved[0]
    return names


def _class(name: str) -> str:
    return name.rpartition(".")[2]


def _forms_in(kind: Kind) -> list[str]:
    if "form" in kind:
        return [kind["form"]]
    inner = [
        *kind.get("any_of", ()),
        *kind.get("tuple", ()),
        *(kind[each] for each in ("keys", "items") if each in kind),
    ]
    return [name for each in inner for name in _forms_in(each)]


@dataclass(slots=True)
class _Pairs:
    """Forms of the older release, each with what it is today."""

    old: dict[str, Form]
    new: dict[str, Form]
    waiting: list[tuple[str, str]]
    told: list[str] = field(default_factory=list)

    def differences(self) -> list[str]:
        """Compare them, and all that stand in their fields."""
        met: set[tuple[str, str]] = set()
        while self.waiting:
            pair = self.waiting.pop()
            if pair not in met:
                met.add(pair)
                self._compare(pair[0], self.old[pair[0]], self.new[pair[1]])
        return self.told

    def _compare(self, name: str, before: Form, now: Form) -> None:
        if _outline(before) != _outline(now):
            self.told.append(f"{name} has another tag or form: neither release reads it of the other")
            return
        self.told += _missing(name, before["fields"], now["fields"])
        self.told += _left_out(name, before, now)
        if before["array"] and any(a != b for a, b in zip(before["fields"], now["fields"], strict=False)):
            self.told.append(f"{name} is an array, and its first fields are others: add fields at its end only")
        for each, was in before["fields"].items():
            become = now["fields"].get(each)
            if become is not None:
                self._compare_types(f"{name}.{each}", was, become)

    def _compare_types(self, what: str, was: Kind, become: Kind) -> None:
        here, there = self._reads(become, was, by_older=False), self._reads(was, become, by_older=True)
        if not (here and there):
            who = "this release does not read what the older one writes" if there else "neither reads the other's"
            who = "the older release does not read all that this one may write" if here else who
            self.told.append(f"{what} was {_said(was)} and is {_said(become)}: {who}")

    def _reads(self, reader: Kind, writer: Kind, *, by_older: bool) -> bool:
        """Tell whether all that one release may write there is read by the other; note which forms meet there."""
        readers, writers = reader.get("any_of", [reader]), writer.get("any_of", [writer])
        if by_older and any("form" in one and self.old[one["form"]]["tag"] is not None for one in readers):
            # It says which kind of message it is, and a level or a protocol switches a new one on.
            writers = [one for one in writers if "form" not in one or not self._is_new_kind(one["form"])]
        return all(any(self._takes(one, each, by_older=by_older) for one in readers) for each in writers)

    def _is_new_kind(self, form: str) -> bool:
        return form not in self.old and self.new[form]["tag"] is not None

    def _takes(self, reader: Kind, writer: Kind, *, by_older: bool) -> bool:
        """Tell the same of two types that are no unions."""
        if reader.get("type") in ("any", "raw"):
            return True
        if "form" in reader and "form" in writer:
            old, new = (reader["form"], writer["form"]) if by_older else (writer["form"], reader["form"])
            # Where both say what they are, this is how a reader tells one from the other, whatever the class is called.
            is_it = _outline(self.old[old]) == _outline(self.new[new])
            if is_it:
                self.waiting.append((old, new))
            return is_it
        if "bounds" in reader and reader["bounds"] != writer.get("bounds"):
            return False
        if "values" in writer:
            return all(_takes_value(reader, value) for value in writer["values"])
        if "tuple" in writer and ("tuple" in reader or _is_list(reader)):
            inner = reader.get("tuple") or [reader.get("items")] * len(writer["tuple"])
            pairs = list(zip(inner, writer["tuple"], strict=False))
            return len(inner) == len(writer["tuple"]) and all(self._reads(*pair, by_older=by_older) for pair in pairs)
        if "items" in writer and "items" in reader and _is_list(writer) == _is_list(reader):
            pairs = [(reader[each], writer[each]) for each in ("keys", "items") if each in writer]
            return all(self._reads(*pair, by_older=by_older) for pair in pairs)
        wrote = writer.get("type")
        return wrote is not None and reader.get("type") in (wrote, _WIDER.get(wrote, wrote))


_WIDER: Final = {"int": "float"}
"""What is written as one is read where the other stands."""


def _outline(form: Form) -> tuple[Any, ...]:
    return form["tag"], form["tag_field"], form["array"]


def _missing(name: str, before: dict[str, Kind], now: dict[str, Kind]) -> list[str]:
    """Tell of fields that one release has and the other has not."""
    found = []
    for each, kind in before.items():
        if each not in now:
            why = (
                "gets back none of what it writes there" if not kind["required"] else f"does not read {name} without it"
            )
            found.append(f"{name}.{each} is gone: the older release {why}")
    return found + [
        f"{name}.{each} has no default: this release does not read what the older one writes without it"
        for each, kind in now.items()
        if kind["required"] and each not in before
    ]


def _left_out(name: str, before: Form, now: Form) -> list[str]:
    """Tell of fields that are left out, or written, where the other release does not expect it."""
    found = []
    for writer, reader, who in ((before, now, "this release"), (now, before, "the older release")):
        for each, kind in reader["fields"].items():
            written = writer["fields"].get(each)
            if written is None or not writer["brief"] or written["required"]:
                continue
            if kind["required"]:
                found.append(f"{name}.{each} is left out where it is the default: {who} does not read that")
            elif kind["default"] != written["default"]:
                found.append(
                    f"{name}.{each} is left out where it is {written['default']}, and {who} takes it for "
                    f"{kind['default']}"
                )
    later = [each for each in now["fields"] if each not in before["fields"]]
    if before["strict"] and not now["brief"] and later:
        found.append(f"{name}.{later[0]} is always written, and the older release refuses what it does not know")
    return found


def _is_list(kind: Kind) -> bool:
    return "items" in kind and "keys" not in kind


def _takes_value(reader: Kind, value: Any) -> bool:
    return value in reader["values"] if "values" in reader else reader.get("type") == type(value).__name__


def _said(kind: Kind) -> str:
    if "any_of" in kind:
        return " or ".join(map(_said, kind["any_of"]))
    if "tuple" in kind:
        return f"({', '.join(map(_said, kind['tuple']))})"
    if "keys" in kind:
        return f"a map of {_said(kind['keys'])} to {_said(kind['items'])}"
    if "items" in kind:
        return f"a list of {_said(kind['items'])}"
    if "values" in kind:
        return "one of " + ", ".join(map(repr, kind["values"]))
    said: str = kind.get("form") or kind["type"]
    return said + "".join(f", {bound} {value}" for bound, value in kind.get("bounds", {}).items())


if __name__ == "__main__":
    # python -m tests.mixed.differences OLD_PYTHON [NEW_PYTHON]
    told = differences(forms_of(sys.argv[1]), forms_of(sys.argv[2] if len(sys.argv) > 2 else sys.executable))
    print("\n".join(told) or "each release reads what the other writes")
    sys.exit(1 if told else 0)
