"""A program of either release: describes every message and stored form, and what may stand in each of their fields.

They are found: whatever the release's own code decodes, all structs of its protocol, and what is reachable from these.
Out: JSON with "forms", by "module.Class" ("state.Class" of the catalog), and "roots": what is read as a whole.
"""

import ast
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.inspect import (
    CollectionType,
    CustomType,
    DataclassType,
    DictType,
    EnumType,
    Field,
    FrozenSetType,
    ListType,
    LiteralType,
    Metadata,
    SetType,
    StructType,
    TupleType,
    Type,
    UnionType,
    VarTupleType,
    multi_type_info,
)

PACKAGES = ("tensorhub_common", "tensorhub_agent", "tensorhub_planner", "tensorhub_registry", "tensorhub")
WIRE = ("tensorhub_common.wire.", "tensorhub_common.protocol.")
ONE_RELEASE = ("tensorhub.demo", "tensorhub.integrations")
"""What programs of one release, which end together, say to each other, and what says nothing to any of ours."""
BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        (folder,) = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages([folder], f"{package}.", onerror=_not_to_be_had):
            if not found.name.startswith(ONE_RELEASE):
                path = Path(folder, *found.name.split(".")[1:])
                yield found.name, path / "__init__.py" if found.ispkg else path.with_suffix(".py")


def _not_to_be_had(package: str) -> None:
    if not package.startswith(ONE_RELEASE):
        raise SystemExit(f"{package} can't be imported, so its messages are not known")


def decoded(source: str) -> list[str]:
    """Return what types a module decodes, as its source says them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = {each.arg: each.value for each in node.keywords}.get("type")
            if function.endswith("Decoder") and node.args:
                given = node.args[0]
            if function == "msgspec.convert" and len(node.args) > 1:
                given = node.args[1]
            if given is not None and function.endswith(("Decoder", "decode", "msgspec.convert")):
                found.append(ast.unparse(given))
    return found


def roots_of(name: str, path: Path) -> list[Any]:
    said = decoded(path.read_text())
    is_wire = name.startswith(WIRE)
    if not said and not is_wire:
        return []
    module = importlib.import_module(name)
    found = structs_of(module) if is_wire else []
    for each in said:
        try:
            found.append(eval(each, vars(module).copy()))  # noqa: S307 (an expression of our own source)
        except NameError:
            # A function's own argument, as in `decode(data, type=kind)`: such are of the wire, which is taken whole.
            continue
    return found


def structs_of(module: ModuleType) -> list[Any]:
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and not kind.__subclasses__()
    ]


class Forms:
    """The forms that were met."""

    def __init__(self) -> None:
        """None yet."""
        self.found: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, type] = {}

    def said(self, kind: Type) -> dict[str, Any]:
        said: dict[str, Any] = {"type": type(kind).__name__.removesuffix("Type").lower()}
        if isinstance(kind, Metadata):
            said = self.said(kind.type)
        elif isinstance(kind, UnionType):
            said = {"any_of": [self.said(each) for each in kind.types]}
        elif isinstance(kind, (StructType, DataclassType)):
            said = {"form": self._noted(kind)}
        elif isinstance(kind, LiteralType):
            said = {"values": sorted(kind.values, key=repr)}
        elif isinstance(kind, EnumType):
            said = {"values": sorted((each.value for each in kind.cls), key=repr)}
        elif isinstance(kind, TupleType):
            said = {"tuple": [self.said(each) for each in kind.item_types]}
        elif isinstance(kind, CustomType):
            said = {"type": kind.cls.__name__}
        elif isinstance(kind, DictType):
            said = {"keys": self.said(kind.key_type), "items": self.said(kind.value_type)}
        elif isinstance(kind, (ListType, VarTupleType, SetType, FrozenSetType, CollectionType)):
            # All are written alike.
            said = {"items": self.said(kind.item_type)}
        bounds = {bound: getattr(kind, bound) for bound in BOUNDS if getattr(kind, bound, None) is not None}
        return said | ({"bounds": bounds} if bounds else {})

    def _noted(self, kind: StructType | DataclassType) -> str:
        """Note a form and all in it, and return its name."""
        config = getattr(kind.cls, "__struct_config__", None)
        # Of the SDK's dataclasses, which stand in files of users, the catalog knows nothing.
        is_state = config is None and kind.cls.__module__.startswith("tensorhub_common.")
        part = "state" if is_state else kind.cls.__module__.rpartition(".")[2]
        name = f"{part}.{kind.cls.__name__}"
        if self._kinds.setdefault(name, kind.cls) is not kind.cls:
            raise SystemExit(f"two forms are called {name}: name one of them otherwise")
        if name not in self.found:
            form = self.found[name] = {
                "tag": config and config.tag,
                "tag_field": config and config.tag_field,
                "array": bool(config and config.array_like),
                "brief": bool(config and config.omit_defaults and not config.array_like),
                "strict": bool(config and config.forbid_unknown_fields),
            }
            form["fields"] = {each.encode_name: self._field(each) for each in kind.fields}
        return name

    def _field(self, field: Field) -> dict[str, Any]:
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        return {"required": field.required, "default": repr(default), **self.said(field.type)}


def main() -> None:
    roots = [each for name, path in modules() for each in roots_of(name, path)]
    forms = Forms()
    said = [forms.said(kind) for kind in multi_type_info(roots)]
    json.dump({"forms": forms.found, "roots": said}, sys.stdout)


if __name__ == "__main__":
    main()
