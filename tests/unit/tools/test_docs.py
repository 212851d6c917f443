"""The site and its pages: what is generated is as the code is, and what is written by hand names what exists."""

import ast
import inspect
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from tests.property.test_catalog import run
from tools.docs import asyncapi, links, peers_chart, protocol_page
from tools.docs.asyncapi import COMMANDS, ENTRIES, EVENTS, document, example
from tools.docs.bus_page import bus_markdown
from tools.docs.cli_page import commands_markdown
from tools.docs.site_hooks import GENERATED, PAGES, place_of, relinked, shown

import tensorhub
from tensorhub.cli.main import app
from tensorhub_common import errors
from tensorhub_common.auth.permissions import ASKS_OF_ROLLOUTS
from tensorhub_common.errors import InvalidName
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_command, decode_event, encode
from tensorhub_common.protocol.log.commands import OUTSIDE_VERBS, Command, Publish, Unreadable
from tensorhub_common.protocol.log.events import CommandRejected, Event, kind_of, model_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import QueryError
from tensorhub_common.protocol.rollout import questions
from tensorhub_common.protocol.rollout.entries import PolicyName, decode
from tensorhub_simulator.drivers.catalog import CatalogDriver
from tensorhub_simulator.faultsim.mutants.planting import BUGS
from tensorhub_simulator.rollouts import bugs

DOCS = links.ROOT / "docs"
BOOK = document()

# ------------------------------------------------------------------------------------------------------------ the site


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml brings no annotations
    """Reads mkdocs.yml, in which some values are names of Python's."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, name, _node: name)


def texts(part: Any) -> Iterator[str]:
    """Yield every text in a document's values."""
    if isinstance(part, str):
        yield part
    for each in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        yield from texts(each)


def test_every_page_is_in_the_navigation_once_and_every_marker_is_filled() -> None:
    settings = yaml.load((links.ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506 (a safe loader, and our own file)
    there = [page.relative_to(DOCS).as_posix() for page in links.pages() if page.is_relative_to(DOCS)]
    assert sorted(texts(settings["nav"])) == sorted({*there, *PAGES.values()} - {"design/adr/template.md"})
    assert len(list((DOCS / "concepts").glob("*.md"))) <= 3
    named = [name for page in links.pages() for name in re.findall(r"<!-- site: (\w+) -->", page.read_text())]
    assert sorted(named) == sorted(GENERATED)


def test_every_command_message_channel_and_public_name_is_told() -> None:
    commands, bus = commands_markdown(), bus_markdown(BOOK)
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        assert f"### `{name}`" in commands
        assert f"    tensorhub {name}" in commands
    messages = BOOK["components"]["messages"]
    assert all(f"### `{name}`\n" in bus for name in messages)
    for channel in BOOK["channels"].values():
        assert channel["address"] is None or f"| `{channel['address']}` |" in bus
    assert set(re.findall(r"\]\(#(\w+)\)", bus)) <= {name.lower() for name in messages}
    reference = (DOCS / "reference" / "api.md").read_text() + "\n"
    for name in dir(tensorhub):
        found = getattr(tensorhub, name)
        if isinstance(found, type) and issubclass(found, Exception):
            assert f"`{name}`" in reference
        elif not name.startswith("_"):
            assert f"::: tensorhub.{name}\n" in reference


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_each_policy_that_a_trainer_may_name_is_told_where_it_is_named(policy: str) -> None:
    assert f'\n| `"{policy}"`' in (DOCS / "guides" / "rollouts.md").read_text()
    for hub in (tensorhub.Hub, tensorhub.AsyncHub):
        assert f'"{policy}"' in str(inspect.getdoc(hub.rollouts)).partition("policy: ")[2]


def test_the_chart_is_of_the_figures_in_the_page() -> None:
    """After a new run of the benchmarks: `make docs`."""
    page = peers_chart.PAGE.read_text()
    assert peers_chart.CHART.read_text() == peers_chart.chart(page)
    for heading in peers_chart.PARTS.values():
        found = peers_chart.rows(page, heading)
        assert [is_ours for *_, is_ours in found].count(True) == 1
        assert len(found) > 5


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site() -> None:
    for link, becomes in (
        ("../../examples/trainer.py", "../source/examples/trainer.py.md"),
        ("../../ARCHITECTURE.md#the-picture", "../design/architecture.md#the-picture"),
        ("engine.md", "engine.md"),
        ("https://example.com", "https://example.com"),
    ):
        assert relinked(f"[a]({link})", "docs/guides", "guides/trainer.md") == f"[a]({becomes})"
    assert place_of("docs/guides/engine.md") == "guides/engine.md"
    trainer = links.ROOT / "examples" / "trainer.py"
    assert trainer.read_text().rstrip() in shown(trainer)
    assert "- `trainer.py`" in shown(trainer.parent)


# ------------------------------------------------------------------------- docs/design/protocol, docs/design/rollouts

PROTOCOL, ROLLOUTS = (
    {path.stem: path.read_text() for path in sorted((links.ROOT / folder).glob("*.md"))}
    for folder in protocol_page.FOLDERS
)
ANY_COMMAND = frozenset({"BadCommand", "StaleSender", "VersionUnavailable", "command.repeated"})


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every table, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s-]+", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", [*PROTOCOL.values(), *ROLLOUTS.values()], ids=[*PROTOCOL, *ROLLOUTS])
def test_a_page_is_as_the_code_is(page: str) -> None:
    """After a change of a message, a transition or a bound: `make docs`."""
    assert protocol_page.generated(page) == page, "run: make docs"


def test_every_section_and_page_is_there_and_what_is_written_by_hand_stays() -> None:
    pages = [*PROTOCOL.values(), *ROLLOUTS.values()]
    named = [each for page in pages for each in re.findall(r"<!-- generated: ([\w-]+) -->", page)]
    assert sorted(named) == sorted(protocol_page.SECTIONS)
    for folder in (PROTOCOL, ROLLOUTS):
        assert set(re.findall(r"\]\(([\w-]+)\.md\)", folder["index"])) == folder.keys() - {"index"}
    made = protocol_page.generated("before\n<!-- generated: states-agent -->\nold\n<!-- end -->\nafter\n")
    assert made.startswith("before\n<!-- generated: states-agent -->\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    assert protocol_page.generated(made) == made
    with pytest.raises(KeyError):
        protocol_page.generated("<!-- generated: nonsense -->\n<!-- end -->\n")


def test_every_example_reads() -> None:
    commands, events = (
        re.findall(r"## `([\w.]+)`\n.*?```json\n(.*?)\n```", PROTOCOL[page], re.DOTALL)
        for page in ("commands", "events")
    )
    assert commands
    assert events
    for verb, body in commands:
        sender = json.loads(body)["by"]
        process = None if sender is None else sender["lane"].partition("/")[0]
        assert not isinstance(decode_command(verb, process, body.encode(), NEWEST_LEVEL), Unreadable), body
    for kind, body in events:
        assert kind_of(decode_event(body.encode())) == kind


def test_bounds_are_read_as_python_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_page, "ROOT", tmp_path)
    path = tmp_path / "some.py"
    lines = ["A: Final = 4 * 1024", "WAIT_S: Final = -1.5", '"""Why', '  so."""', "THINGS_MAX = (1 << 4) - A // 1024"]
    path.write_text("\n".join([*lines, 'B_MAX: Final = len("x")']))
    found = [(bound.name, bound.value, bound.why) for bound in protocol_page.bounds_of(path)]
    assert found == [("WAIT_S", -1.5, "Why so."), ("THINGS_MAX", 12, "")]


def test_outcomes_that_occur_are_those_that_are_told() -> None:
    """By chance as in tests/property: no command had another outcome, and none is told that no event or error has."""
    told: dict[str, set[str]] = {}
    for command, outcomes, refusals in rows(PROTOCOL["log"])[1:]:
        told[command.strip("`")] = {*re.findall(r"`([\w.]+)`", outcomes), *filter(None, refusals.split(", "))}
    seen: dict[str, set[str]] = defaultdict(set)
    for seed in range(20):
        world = run(random.Random(seed).choice, 300)
        first = {event.cmd: event for event in world.events if event.i == 1}
        for seq, _, said in world.log:
            if not isinstance(said, Unreadable):
                event = first[seq]
                outcome = event.error if isinstance(event, CommandRejected) else kind_of(event)
                seen[str(said.__struct_config__.tag)].add(outcome)
    for verb, found in seen.items():
        assert found - ANY_COMMAND <= told[verb], f"{verb}: {found - ANY_COMMAND - told[verb]} is not told"
    for outcome in set().union(*told.values()):
        assert "." in outcome or hasattr(errors, outcome), outcome


@pytest.mark.parametrize(
    "row",
    rows(PROTOCOL["failures-log"] + PROTOCOL["failures-reads"] + ROLLOUTS["failures"]),
    ids=lambda row: row[0][:60],
)
def test_an_interleaving_names_places_that_exist(row: list[str]) -> None:
    """What is planned is said to be so, and is not looked for."""
    assert len(row) == 3
    if row[0] == "what could go wrong":
        return
    there, _, _ = row[2].partition("*Planned:*")
    places = re.findall(r"`([^`]+\.py(?:::\w+)?)`", there)
    assert places or "*Planned:*" in row[2], "neither a place nor a plan"
    for place in places:
        path, _, test = place.partition("::")
        assert (links.ROOT / path).is_file(), path
        if test:
            assert re.search(rf"def {test}\b", (links.ROOT / path).read_text()), place
    for names in re.findall(r"planted as ((?:`[\w-]+`(?:, | and )?)+)", row[2]):
        assert {*re.findall(r"`([\w-]+)`", names)} <= BUGS.keys() | bugs.BUGS.keys()


NAMES = {"job": "run-7", "verb": "want", "agent": "a", "asker": "b", "model": "m", "noun": "version", "what": "retired"}
NAMES |= {"digest": "0" * 64, "i": "0", "index": "0", "process": "registry-0", "runner": "runner-0"}


def expand(pattern: str) -> list[str]:
    """Write out the alternatives in braces."""
    found = re.search(r"\{([^}]+)\}", pattern)
    return [pattern.replace(found[0], each) for each in found[1].split(",")] if found else [pattern]


def test_every_subject_of_the_table_is_one() -> None:
    for pattern, *_ in rows(PROTOCOL["subjects"])[1:]:
        for each in expand(pattern.strip("`")):
            subject = re.sub(r"<(\w+)>", lambda name: NAMES.get(name[1], name[0]), each)
            # `parse` takes agents' names alone.
            subject = subject.removesuffix("._registry")
            if subject.startswith("tensorhub"):
                subjects.parse_subject(subject)
    with pytest.raises(InvalidName):
        subjects.parse_subject("tensorhub.v1.run-7.flights.berlin")


def test_the_program_without_the_sdk_sends_what_is_read() -> None:
    program = re.findall(r"```python\n(.*?)```", (DOCS / "guides" / "no-sdk.md").read_text(), re.DOTALL)[0]
    tree = ast.parse(program)
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and "verb" in ast.unparse(node)]
    (body,) = [ast.literal_eval(node) for node in bodies]
    said = decode_command("publish", None, json.dumps(body).encode(), NEWEST_LEVEL)
    assert said == Publish(model="policy", replica="trainer", version=12)
    for subject in re.findall(r'"(tensorhub\.[\w.-]+)"', program):
        subjects.parse_subject(subject)
    world = CatalogDriver()
    world.replica_of("trainer", "a")
    assert kind_of(world.wish("trainer", 12)[0]) == "publish.wished"


# ------------------------------------------------------------------------------------------- the AsyncAPI document

ROOT_KEYS = {"asyncapi", "id", "info", "servers", "defaultContentType", "channels", "operations", "components"}


def references(part: Any) -> Iterator[str]:
    """Yield every `$ref` in the document."""
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"]
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from references(each)


def test_the_document_is_that_of_asyncapi_3_and_stands_in_docs() -> None:
    """After a change of a struct: `make docs`."""
    assert (DOCS / "reference" / "asyncapi.json").read_text() == asyncapi.text()
    assert re.fullmatch(r"3\.\d+\.\d+", BOOK["asyncapi"])
    assert set(BOOK) <= ROOT_KEYS
    assert isinstance(BOOK["info"]["title"], str)
    assert isinstance(BOOK["info"]["version"], str)
    assert all({"host", "protocol"} <= set(server) for server in BOOK["servers"].values())
    for reference in references(BOOK):
        part: Any = {"#": BOOK}
        for step in reference.split("/"):
            part = part[step.replace("~1", "/").replace("~0", "~")]
        assert part is not None


@pytest.mark.parametrize("name", BOOK["channels"])
def test_a_channel_has_a_subject_that_the_hub_uses_and_exactly_its_parameters(name: str) -> None:
    channel = BOOK["channels"][name]
    assert set(channel) <= {"address", "title", "description", "messages", "parameters", "servers"}
    wanted = set(re.findall(r"\{(\w+)\}", channel["address"] or ""))
    assert set(channel.get("parameters", {})) == wanted
    assert all(message["$ref"].startswith("#/components/messages/") for message in channel["messages"].values())
    if channel["address"]:
        subjects.parse_subject(channel["address"].format(**NAMES))


def test_an_operation_uses_messages_of_its_channel_and_a_message_says_how_it_is_written() -> None:
    for operation in BOOK["operations"].values():
        assert operation["action"] in ("send", "receive")
        for side in [operation, operation["reply"]] if "reply" in operation else [operation]:
            channel = side["channel"]["$ref"]
            assert channel.startswith("#/channels/")
            assert all(message["$ref"].startswith(f"{channel}/messages/") for message in side["messages"])
    for name, message in BOOK["components"]["messages"].items():
        assert {"name", "summary", "payload", "contentType"} <= set(message)
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)


@pytest.mark.parametrize("kind", [*COMMANDS, *EVENTS])
def test_every_command_and_event_is_there_with_an_example_that_reads(kind: type[Command | Event]) -> None:
    (payload,) = [each["payload"] for each in BOOK["components"]["messages"][kind.__name__]["examples"]]
    said: Any = example(kind)
    if isinstance(said, Command):
        verb = str(kind.__struct_config__.tag)
        process = None if said.by is None else said.by.process
        assert decode_command(verb, process, json.dumps(payload).encode(), NEWEST_LEVEL) == said
        assert not isinstance(decode_command(verb, process, encode(example(kind)), NEWEST_LEVEL), Unreadable)
        assert (f"cmd.{verb}.outside" in BOOK["channels"]) == (verb in OUTSIDE_VERBS)
        return
    assert decode_event(json.dumps(payload).encode()) == said
    address = BOOK["channels"][f"event.{kind_of(said)}"]["address"]
    noun, _, what = kind_of(said).partition(".")
    assert address.format(**NAMES | {"model": model_of(said)}) == subjects.event("run-7", model_of(said), noun, what)


@pytest.mark.parametrize("kind", ENTRIES)
def test_every_entry_of_rollouts_is_there_with_an_example_that_reads(kind: type[msgspec.Struct]) -> None:
    verb = str(kind.__struct_config__.tag)
    (name,) = BOOK["channels"][f"rollout.{verb}"]["messages"]
    (payload,) = [each["payload"] for each in BOOK["components"]["messages"][name]["examples"]]
    assert decode(verb, json.dumps(payload).encode()) == example(kind)
    assert BOOK["components"]["schemas"][name]["properties"]["verb"] == {"enum": [verb]}


@pytest.mark.parametrize("what", ASKS_OF_ROLLOUTS)
def test_every_question_to_a_rollout_manager_is_there_with_examples_that_read(what: str) -> None:
    operation = BOOK["operations"][f"answer.rollout.{what}"]
    for side in (operation, operation["reply"]):
        for message in side["messages"]:
            name = message["$ref"].rpartition("/")[2]
            kind: type[msgspec.Struct] = getattr(questions, name, QueryError)
            (payload,) = [each["payload"] for each in BOOK["components"]["messages"][name]["examples"]]
            assert msgspec.json.decode(json.dumps(payload), type=kind) == example(kind)
            assert kind.__name__ == name


def test_a_field_that_nobody_thought_of_is_noticed() -> None:
    class Odd(msgspec.Struct):
        flight: int

    with pytest.raises(KeyError):
        example(Odd)
