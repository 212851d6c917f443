"""docs/design/protocol/: the generated parts are as the code is, and the parts written by hand name what exists."""

import ast
import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
from tests.property.test_catalog import run
from tools.docs import protocol_page

from tensorhub_common import errors
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_command, decode_event
from tensorhub_common.protocol.log.commands import Publish, Unreadable
from tensorhub_common.protocol.log.events import CommandRejected, Event, kind_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_simulator.drivers.catalog import CatalogDriver

ROOT = Path(__file__).parents[3]
DESIGN = ROOT / "docs" / "design" / "protocol"
PAGES = {path.stem: path.read_text() for path in sorted(DESIGN.glob("*.md"))}
INTERLEAVINGS = PAGES["failures-log"] + PAGES["failures-reads"]
ANY_COMMAND = frozenset({"BadCommand", "StaleSender", "VersionUnavailable", "command.repeated"})


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every table, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s-]+", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --------------------------------------------------------------------------------------------------------- generated


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_is(name: str) -> None:
    """After a change of a message, a transition or a bound: `make docs`."""
    assert protocol_page.generated(PAGES[name]) == PAGES[name], "run: make docs"


def test_every_generated_section_is_in_one_page() -> None:
    named = [each for page in PAGES.values() for each in re.findall(r"<!-- generated: ([\w-]+) -->", page)]
    assert sorted(named) == sorted(protocol_page.SECTIONS)


def test_what_is_written_by_hand_stays() -> None:
    page = "before\n<!-- generated: states-agent -->\nold\n<!-- end -->\nafter\n"
    made = protocol_page.generated(page)
    assert made.startswith("before\n<!-- generated: states-agent -->\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    assert protocol_page.generated(made) == made


def test_an_unknown_section_is_noticed() -> None:
    with pytest.raises(KeyError):
        protocol_page.generated("<!-- generated: nonsense -->\n<!-- end -->\n")


def test_every_example_reads() -> None:
    told = re.findall(r"## `([\w.]+)`\n.*?```json\n(.*?)\n```", PAGES["commands"], re.DOTALL)
    assert told
    for verb, body in told:
        sender = json.loads(body)["by"]
        process = None if sender is None else sender["lane"].partition("/")[0]
        assert not isinstance(decode_command(verb, process, body.encode(), NEWEST_LEVEL), Unreadable), body
    told = re.findall(r"## `([\w.]+)`\n.*?```json\n(.*?)\n```", PAGES["events"], re.DOTALL)
    assert told
    for kind, body in told:
        assert kind_of(decode_event(body.encode())) == kind


def test_bounds_are_read_as_python_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_page, "ROOT", tmp_path)
    path = tmp_path / "some.py"
    lines = ["A: Final = 4 * 1024", "WAIT_S: Final = -1.5", '"""Why', '  so."""', "THINGS_MAX = (1 << 4) - A // 1024"]
    path.write_text("\n".join([*lines, 'B_MAX: Final = len("x")']))
    found = [(bound.name, bound.value, bound.why) for bound in protocol_page.bounds_of(path)]
    assert found == [("WAIT_S", -1.5, "Why so."), ("THINGS_MAX", 12, "")]


# -------------------------------------------------------------------------------------------------------------- by hand


def test_the_map_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+)\.md\)", PAGES["index"]))
    assert linked == PAGES.keys() - {"index"}


def test_outcomes_that_occur_are_those_that_are_told() -> None:
    """By chance as in tests/property: no command had another outcome, and none is told that no event or error has."""
    told: dict[str, set[str]] = {}
    for command, outcomes, refusals in rows(PAGES["log"])[1:]:
        told[command.strip("`")] = {*re.findall(r"`([\w.]+)`", outcomes), *filter(None, refusals.split(", "))}
    for verb, found in seen_outcomes().items():
        assert found - ANY_COMMAND <= told[verb], f"{verb}: {found - ANY_COMMAND - told[verb]} is not told"
    for outcome in set().union(*told.values()):
        assert "." in outcome or hasattr(errors, outcome), outcome


def seen_outcomes() -> dict[str, set[str]]:
    """Return what became of commands by chance: the kind of the first event, or the error."""
    seen: dict[str, set[str]] = defaultdict(set)
    for seed in range(20):
        world = run(random.Random(seed).choice, 300)
        first = {event.cmd: event for event in world.events if event.i == 1}
        for seq, _, command in world.log:
            if not isinstance(command, Unreadable):
                seen[str(command.__struct_config__.tag)].add(outcome_of(first[seq]))
    return seen


def outcome_of(event: Event) -> str:
    return event.error if isinstance(event, CommandRejected) else kind_of(event)


@pytest.mark.parametrize("row", rows(INTERLEAVINGS), ids=lambda row: row[0][:60])
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
        assert (ROOT / path).is_file(), path
        if test:
            assert re.search(rf"def {test}\b", (ROOT / path).read_text()), place


def test_every_subject_of_the_table_is_one() -> None:
    names = {
        "<job>": "run-7",
        "<verb>": "want",
        "<agent>": "a",
        "<asker>": "b",
        "<model>": "m",
        "<noun>": "version",
        "<what>": "retired",
    }
    names |= {"<digest>": "0" * 64, "<i>": "0", "<process>": "registry-0"}
    for pattern, *_ in rows(PAGES["subjects"])[1:]:
        for subject in expand(pattern.strip("`")):
            for name, value in names.items():
                subject = subject.replace(name, value)  # noqa: PLW2901 (filled in step by step)
            if subject.endswith("._registry"):
                subject = subject.removesuffix("._registry")  # noqa: PLW2901 (`parse` takes agents' names alone)
            if subject.startswith("tensorhub"):
                subjects.parse_subject(subject)


def expand(pattern: str) -> list[str]:
    """Write out the alternatives in braces."""
    found = re.search(r"\{([^}]+)\}", pattern)
    if found is None:
        return [pattern]
    return [pattern.replace(found[0], each) for each in found[1].split(",")]


def test_the_program_without_the_sdk_sends_what_is_read() -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "no-sdk.md").read_text(), re.DOTALL)[0]
    tree = ast.parse(program)
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and "verb" in ast.unparse(node)]
    (body,) = [ast.literal_eval(node) for node in bodies]
    assert decode_command("publish", None, json.dumps(body).encode(), NEWEST_LEVEL) == Publish(
        model="policy", replica="trainer", version=12
    )
    for subject in re.findall(r'"(tensorhub\.[\w.-]+)"', program):
        subjects.parse_subject(subject)
    world = CatalogDriver()
    world.replica_of("trainer", "a")
    assert kind_of(world.wish("trainer", 12)[0]) == "publish.wished"
