"""The site: every page is in its navigation, and what is generated into it has everything that the code has."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from tools.docs import links, peers_chart
from tools.docs.bus_page import bus_markdown
from tools.docs.cli_page import commands_markdown
from tools.docs.site_hooks import GENERATED, PAGES, place_of, relinked, shown

import tensorhub
from tensorhub.cli.main import app

DOCS = links.ROOT / "docs"


class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml brings no annotations
    """Reads mkdocs.yml, in which some values are names of Python's."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, name, _node: name)


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_of(each)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((links.ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506 (a safe loader, and our own file)
    named = sorted(pages_of(settings["nav"]))
    there = [page.relative_to(DOCS).as_posix() for page in links.pages() if page.is_relative_to(DOCS)]
    assert named == sorted({*there, *PAGES.values()} - {"design/adr/template.md"})


def test_concepts_are_at_most_three_pages() -> None:
    assert len(list((DOCS / "concepts").glob("*.md"))) <= 3


def test_every_marker_of_a_page_is_filled() -> None:
    named = [name for page in links.pages() for name in re.findall(r"<!-- site: (\w+) -->", page.read_text())]
    assert sorted(named) == sorted(GENERATED)


def test_every_command_has_a_section() -> None:
    text = commands_markdown()
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        assert f"### `{name}`" in text
        assert f"    tensorhub {name}" in text


def test_every_message_has_a_section_and_every_channel_a_row() -> None:
    document = json.loads((DOCS / "reference" / "asyncapi.json").read_text())
    text = bus_markdown(document)
    for name in document["components"]["messages"]:
        assert f"### `{name}`\n" in text
    for channel in document["channels"].values():
        assert channel["address"] is None or f"| `{channel['address']}` |" in text
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= {name.lower() for name in document["components"]["messages"]}


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    for name in dir(tensorhub):
        found = getattr(tensorhub, name)
        if isinstance(found, type) and issubclass(found, Exception):
            assert f"`{name}`" in text
        elif not name.startswith("_"):
            assert f"::: tensorhub.{name}\n" in f"{text}\n"


def test_the_chart_is_of_the_figures_in_the_page() -> None:
    """After a new run of the benchmarks: `make docs`."""
    assert peers_chart.CHART.read_text() == peers_chart.chart(peers_chart.PAGE.read_text())


def test_the_chart_has_tensorhub_and_its_peers() -> None:
    for heading in peers_chart.PARTS.values():
        found = peers_chart.rows(peers_chart.PAGE.read_text(), heading)
        assert [is_ours for *_, is_ours in found].count(True) == 1
        assert len(found) > 5


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](../../examples/trainer.py) [b](../../ARCHITECTURE.md#the-picture) [c](engine.md) [d](https://example.com)"
    )
    assert relinked(text, "docs/guides", "guides/trainer.md") == (
        "[a](../source/examples/trainer.py.md) [b](../design/architecture.md#the-picture) [c](engine.md) [d](https://example.com)"
    )
    assert place_of("docs/guides/engine.md") == "guides/engine.md"


def test_a_file_is_shown_whole_and_a_folder_by_its_names() -> None:
    trainer = links.ROOT / "examples" / "trainer.py"
    assert trainer.read_text().rstrip() in shown(trainer)
    assert "- `trainer.py`" in shown(trainer.parent)
