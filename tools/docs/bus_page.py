"""The AsyncAPI document as Markdown: the site puts it into docs/reference/bus.md."""

import json
from collections.abc import Mapping
from typing import Any, Final

GROUPS: Final = {
    "cmd": "Commands",
    "event": "Events",
    "ask": "Questions",
    "answer": "Answers",
    "rollout": "Rollouts",
    "": "Other messages",
}
"""The first part of a channel's name, and the heading that it is listed under."""


def bus_markdown(document: Mapping[str, Any]) -> str:
    """Return tables of all channels, then each message with its fields and an example."""
    groups: dict[str, list[str]] = {heading: [] for heading in GROUPS.values()}
    for name, channel in document["channels"].items():
        heading = GROUPS.get(name.partition(".")[0], GROUPS[""])
        groups[heading].append(_channel_row(name, channel))
    parts = []
    for heading, rows in groups.items():
        parts.append(f"## {heading}\n\n| subject | messages | meaning |\n|---|---|---|\n" + "\n".join(rows))
    parts.append("## Messages")
    schemas = document["components"]["schemas"]
    parts += [_message(name, message, schemas) for name, message in document["components"]["messages"].items()]
    return "\n\n".join(parts)


def _channel_row(name: str, channel: Mapping[str, Any]) -> str:
    address = channel["address"]
    subject = f"`{address}`" if address else f"inbox of `{name.partition('.')[2]}`"
    messages = ", ".join(f"[`{each}`](#{each.lower()})" for each in channel.get("messages", {}))
    return f"| {subject} | {messages or 'empty'} | {_cell(channel.get('description', ''))} |"


def _message(name: str, message: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    lines = [f"### `{name}`", "", _cell(message.get("summary", "")), ""]
    schema = schemas.get(_reference(message["payload"]))
    if schema is not None and schema.get("properties"):
        required = schema.get("required", ())
        lines += ["| field | type | |", "|---|---|---|"]
        for field, kind in schema["properties"].items():
            default = "" if field in required else f"default `{json.dumps(kind.get('default'))}`"
            lines.append(f"| `{field}` | {_type(kind)} | {default} |")
    for example in message.get("examples", ())[:1]:
        if "payload" in example:
            lines += ["", "```json", json.dumps(example["payload"], ensure_ascii=False, indent=2), "```"]
    return "\n".join(lines)


def _reference(kind: Mapping[str, Any]) -> str:
    return str(kind.get("$ref", "")).rpartition("/")[2]


def _type(kind: Mapping[str, Any]) -> str:
    """Return a schema in a few words."""
    if name := _reference(kind):
        return f"`{name}`"
    if options := kind.get("anyOf") or kind.get("oneOf"):
        return " or ".join(_type(each) for each in options)
    if "enum" in kind:
        return ", ".join(f"`{each}`" for each in kind["enum"])
    if kind.get("type") == "array":
        inner = kind.get("items") or (kind.get("prefixItems") or [{}])[0]
        return f"list of {_type(inner)}" if inner else "list"
    if kind.get("type") == "object" and isinstance(values := kind.get("additionalProperties"), dict):
        return f"map to {_type(values)}"
    return str(kind.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
