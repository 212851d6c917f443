"""Checks the links of the pages in this repository, and of the site that is built from them.

    python -m tools.docs.links            README.md, ARCHITECTURE.md, … and docs/: files and headings
    python -m tools.docs.links site       the built site too: files, anchors, and that no page loads from outside

Addresses outside of the repository are checked for their form and not visited.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES_AT_ROOT: Final = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")

_FENCE: Final = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]*`")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FOREIGN: Final = re.compile(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?([/?#]\S*)?")


def pages(root: Path = ROOT) -> list[Path]:
    """Return every page that a reader sees: those at the root, and docs/ without plans."""
    docs = [page for page in sorted((root / "docs").rglob("*.md")) if "plans" not in page.relative_to(root).parts]
    return [*(root / name for name in PAGES_AT_ROOT if (root / name).is_file()), *docs]


def slug(heading: str) -> str:
    """Return the anchor of a heading, as Markdown's table of contents and code hosts make it."""
    text = re.sub(r"<[^>]+>|[`*]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip())


def links(text: str) -> list[str]:
    """Return the links of a page, without those in code."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    return {slug(heading) for heading in _HEADING.findall(_FENCE.sub("", page.read_text()))}


def broken(root: Path = ROOT) -> list[str]:
    """Return a line for each link of the pages that leads nowhere."""
    return [f"{page.relative_to(root)}: {link}" for page in pages(root) for link in _broken_of(page, root)]


def _broken_of(page: Path, root: Path) -> Iterator[str]:
    for link in links(page.read_text()):
        if urlsplit(link).scheme:
            if not _FOREIGN.fullmatch(link):
                yield link
            continue
        path, _, anchor = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        inside = found.is_relative_to(root.resolve()) or found == page
        if not inside or not found.exists() or (anchor and (found.is_dir() or anchor not in anchors(found))):
            yield link


# -------------------------------------------------------------------------------------------------------------- built


@dataclass(slots=True)
class _Built:
    """One page of the built site: its anchors, its links, and what a browser loads with it."""

    ids: set[str] = field(default_factory=set)
    hrefs: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = _Built()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.page.ids |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.page.hrefs.append(named["href"])
        elif tag == "link" and named.get("rel") != "canonical" and "href" in named:
            self.page.loads.append(named["href"])
        elif "src" in named:
            self.page.loads.append(named["src"])


def broken_in_site(site: Path) -> list[str]:
    """Return a line for each link of a built site that leads nowhere, and for each load from outside."""
    built: dict[Path, _Built] = {}
    for path in sorted(site.rglob("*.html")):
        reader = _Reader()
        reader.feed(path.read_text())
        built[path.resolve()] = reader.page
    return [
        f"{path.relative_to(site.resolve())}: {wrong}"
        for path, page in built.items()
        for wrong in _broken_in(path, page, built, site.resolve())
    ]


def _broken_in(path: Path, page: _Built, built: Mapping[Path, _Built], site: Path) -> Iterator[str]:
    for load in page.loads:
        if urlsplit(load).scheme not in ("", "data") or load.startswith("//"):
            yield f"loads {load} from outside"
    for href in [*page.hrefs, *page.loads]:
        parts = urlsplit(href)
        if parts.scheme or parts.netloc:
            continue
        # A page that is not found is shown at any address, so its links begin at the site's root.
        start = site if parts.path.startswith("/") else path.parent
        found = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        found = found / "index.html" if found.is_dir() else found
        if not found.is_file():
            yield f"{href} leads nowhere"
        elif parts.fragment and found in built and unquote(parts.fragment) not in built[found].ids:
            yield f"{href} has no such anchor"


def main() -> int:
    """Print the broken links. Returns 1 if there are any."""
    wrong = [*broken(), *(line for site in sys.argv[1:] for line in broken_in_site(Path(site)))]
    for line in wrong:
        print(line, file=sys.stderr)  # noqa: T201 (a program of the checkout)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
