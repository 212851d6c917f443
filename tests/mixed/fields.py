"""A program of either release: names every message and stored form, and which of its fields a reader must find.

Out: a JSON object from "module.Class" to its tag, whether it is an array, whether defaults are left out, and its fields
(True: required); and the same of the catalog's state, as "state.Class".
"""

import importlib
import json
import sys

import msgspec

from tensorhub_common.catalog.snapshot import FIELDS

MODULES = (
    "tensorhub_common.wire.asks",
    "tensorhub_common.wire.commands",
    "tensorhub_common.wire.events.hub",
    "tensorhub_common.wire.events.publications",
    "tensorhub_common.wire.events.replicas",
    "tensorhub_common.wire.events.rounds",
    "tensorhub_common.wire.events.shards",
    "tensorhub_common.wire.events.versions",
    "tensorhub_common.wire.traces",
    "tensorhub_common.wire.transfer",
    "tensorhub_common.wire.worker",
    "tensorhub_common.bus.lease",
    "tensorhub_common.bus.snapshots",
    "tensorhub_common.layout",
    "tensorhub_common.program",
    "tensorhub_agent.gather_frames",
    "tensorhub_agent.lease_frames",
    "tensorhub_agent.manifest",
    "tensorhub_agent.ucxx_frames",
    "tensorhub.up.hub_file",
)
"""Where the messages and stored forms are. A module that moves gets a second name here, by which the other is found."""


def main() -> None:
    """Name them all."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct) or kind.__module__ != name:
                continue
            fields = {field.encode_name: field.required for field in msgspec.structs.fields(kind)}
            config = kind.__struct_config__
            found[f"{name.rpartition('.')[2]}.{kind.__name__}"] = {
                "tag": config.tag,
                "array": config.array_like,
                "brief": config.omit_defaults,
                "fields": fields,
            }
    for struct, names in FIELDS.items():
        found[f"state.{struct}"] = {"tag": None, "array": False, "brief": False, "fields": dict.fromkeys(names, False)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
