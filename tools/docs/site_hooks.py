"""Hooks of mkdocs.yml: what `make site` makes of the repository beside the pages in docs/.

- ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site.
- A link to any other file of the repository leads to a page that shows the file.
- `<!-- site: NAME -->` in a page is replaced by what follows from the code.
- Pages with a diagram load Mermaid, from the site itself.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from tools.docs.bus_page import bus_markdown
from tools.docs.cli_page import commands_markdown
from tools.docs.links import ROOT, links, pages

PAGES: Final = {
    "ARCHITECTURE.md": "design/architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages at the root of the repository, and what they are called on the site."""
SOURCES: Final = "source"
MERMAID: Final = "assets/mermaid.min.js"
MERMAID_HERE: Final = ROOT / ".site"
"""The folder that `make site` brings Mermaid into."""
LANGUAGES: Final = {".py": "python", ".yml": "yaml", ".json": "json", ".toml": "toml", ".conf": "text", ".env": "bash"}

GENERATED: Final[dict[str, Callable[[], str]]] = {
    "bus": lambda: bus_markdown(json.loads((ROOT / "docs" / "reference" / "asyncapi.json").read_text())),
    "cli": commands_markdown,
}
_MARKER: Final = re.compile(r"<!-- site: (\w+) -->")
_TABLE_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]*`")
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def place_of(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}.md"


def relinked(text: str, folder: str, page: str) -> str:
    """Return a page's text with its links as they are on the site: `folder` is where it is in the repository."""

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if re.match(r"[a-z]+:", target) or not (ROOT / path).exists():
            return found[0]
        return f"{before}{posixpath.relpath(place_of(path), posixpath.dirname(page) or '.')}{after}"

    return _LINK.sub(link, text)


def shown(path: Path) -> str:
    """Return a page that shows a file, or lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        return "\n".join([f"# {name}/", "", *(f"- `{each}`" for each in names)])
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def outside(all_pages: Iterable[Path]) -> set[Path]:
    """Return the files of the repository that pages link to, and that are no pages themselves."""
    found = set()
    for page in all_pages:
        for link in links(page.read_text()):
            path = (page.parent / link.partition("#")[0]).resolve()
            if "://" not in link and path.exists() and place_of(path.relative_to(ROOT).as_posix()).startswith(SOURCES):
                found.add(path)
    return found


def mermaid() -> Path:
    """Return Mermaid's script. Raises FileNotFoundError."""
    scripts = sorted(MERMAID_HERE.glob("mermaid-*.js"))
    if not scripts:
        raise FileNotFoundError(f"{MERMAID_HERE} lacks Mermaid: build the site with 'make site'")
    return scripts[-1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    known = [page for page in pages() if page.name != "README.md"]
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / name).read_text(), "", page)))
    for path in sorted(outside(known)):
        files.append(File.generated(config, place_of(path.relative_to(ROOT).as_posix()), content=shown(path)))
    files.append(File.generated(config, MERMAID, abs_src_path=str(mermaid())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (mkdocs calls it so)
    """Fill in what follows from the code, and turn links to files of the repository."""
    if page.file.generated_by is not None:
        return markdown
    filled = _MARKER.sub(lambda found: GENERATED[found[1]](), markdown)
    # Markdown of code hosts wants a pipe in a table's code escaped, and Python's shows the backslash.
    filled = _TABLE_ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), filled)
    source = page.file.src_uri
    return relinked(filled, posixpath.dirname(f"docs/{source}"), source)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001 (mkdocs calls it so)
    """Load Mermaid before the theme's own script, which would otherwise fetch it from outside."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    before, found, after = output.rpartition("<script src=")
    return f"{before}{script}{found}{after}"
