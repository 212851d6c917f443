"""The AsyncAPI document: it says what the structs say, it is well formed, and docs/ holds the same."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.docs import asyncapi
from tools.docs.asyncapi import COMMANDS, EVENTS, document, example

from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_command, decode_event, encode
from tensorhub_common.protocol.log.commands import OUTSIDE_VERBS, Command, Unreadable
from tensorhub_common.protocol.log.events import Event, kind_of, model_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "asyncapi.json"
BOOK = document()

_FILL = {
    "job": "run-7",
    "model": "policy",
    "process": "node-1-0",
    "agent": "node-1-0",
    "asker": "node-2-0",
    "digest": "0" * 64,
    "index": "0",
}


def references(part: Any) -> Iterator[str]:
    """Yield every `$ref` in the document."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for each in part.values():
            yield from references(each)
    elif isinstance(part, list):
        for each in part:
            yield from references(each)


def found(reference: str) -> Any:
    """Return what a reference points at. Raises KeyError."""
    assert reference.startswith("#/")
    part: Any = BOOK
    for step in reference[2:].split("/"):
        part = part[step.replace("~1", "/").replace("~0", "~")]
    return part


def test_the_document_in_docs_is_this_one() -> None:
    """After a change of a struct: `make docs`."""
    assert DOCUMENT.read_text() == asyncapi.text()


def test_the_root_is_that_of_asyncapi_3() -> None:
    assert re.fullmatch(r"3\.\d+\.\d+", BOOK["asyncapi"])
    assert set(BOOK) <= {
        "asyncapi",
        "id",
        "info",
        "servers",
        "defaultContentType",
        "channels",
        "operations",
        "components",
    }
    assert isinstance(BOOK["info"]["title"], str)
    assert isinstance(BOOK["info"]["version"], str)
    for server in BOOK["servers"].values():
        assert {"host", "protocol"} <= set(server)


def test_every_reference_leads_somewhere() -> None:
    for reference in references(BOOK):
        assert found(reference) is not None


@pytest.mark.parametrize("name", BOOK["channels"])
def test_a_channel_declares_exactly_the_parameters_of_its_address(name: str) -> None:
    channel = BOOK["channels"][name]
    assert set(channel) <= {"address", "title", "description", "messages", "parameters", "servers"}
    wanted = set(re.findall(r"\{(\w+)\}", channel["address"] or ""))
    assert set(channel.get("parameters", {})) == wanted
    for message in channel["messages"].values():
        assert message["$ref"].startswith("#/components/messages/")


@pytest.mark.parametrize("name", [name for name, channel in BOOK["channels"].items() if channel["address"]])
def test_an_address_is_a_subject_that_the_hub_uses(name: str) -> None:
    subjects.parse_subject(BOOK["channels"][name]["address"].format(**_FILL))


def test_what_is_no_subject_would_have_been_noticed() -> None:
    with pytest.raises(InvalidName):
        subjects.parse_subject("tensorhub.v1.run-7.flights.berlin")


@pytest.mark.parametrize("name", BOOK["operations"])
def test_an_operation_uses_messages_of_its_channel(name: str) -> None:
    operation = BOOK["operations"][name]
    assert operation["action"] in ("send", "receive")
    sides = [operation, operation["reply"]] if "reply" in operation else [operation]
    for side in sides:
        channel = side["channel"]["$ref"]
        assert channel.startswith("#/channels/")
        assert all(message["$ref"].startswith(f"{channel}/messages/") for message in side["messages"])


@pytest.mark.parametrize("name", BOOK["components"]["messages"])
def test_a_message_has_a_payload_and_says_how_it_is_written(name: str) -> None:
    message = BOOK["components"]["messages"][name]
    assert {"name", "summary", "payload", "contentType"} <= set(message)
    assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_command_is_there_with_an_example_that_reads(kind: type[Command]) -> None:
    verb = str(kind.__struct_config__.tag)
    (payload,) = [each["payload"] for each in BOOK["components"]["messages"][kind.__name__]["examples"]]
    command = example(kind)
    process = None if command.by is None else command.by.process
    assert decode_command(verb, process, json.dumps(payload).encode(), NEWEST_LEVEL) == command
    assert not isinstance(decode_command(verb, process, encode(command), NEWEST_LEVEL), Unreadable)
    assert (f"cmd.{verb}.outside" in BOOK["channels"]) == (verb in OUTSIDE_VERBS)


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_is_there_with_an_example_that_reads(kind: type[Event]) -> None:
    event = example(kind)
    (payload,) = [each["payload"] for each in BOOK["components"]["messages"][kind.__name__]["examples"]]
    assert decode_event(json.dumps(payload).encode()) == event
    address = BOOK["channels"][f"event.{kind_of(event)}"]["address"]
    noun, _, what = kind_of(event).partition(".")
    assert address.format(**_FILL | {"model": model_of(event)}) == subjects.event("run-7", model_of(event), noun, what)


def test_a_field_that_nobody_thought_of_is_noticed() -> None:
    class Odd(msgspec.Struct):
        flight: int

    with pytest.raises(KeyError):
        example(Odd)
