"""Links: every one of this repository's pages leads somewhere, and one that does not is found."""

from pathlib import Path

import pytest
from tools.docs import links


def test_every_link_of_the_pages_leads_somewhere() -> None:
    assert links.broken() == []


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_md", ".md").replace("_html", ".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("page", "broken"),
    [
        (
            "# One\n[a](docs/two.md) [b](docs/two.md#there-it-is) [c](#one) [d](docs/no.md) [e](docs/two.md#n) [f](#n)",
            ["docs/no.md", "docs/two.md#n", "#n"],
        ),
        # Out of the repository.
        ("[a](../elsewhere.md)", ["../elsewhere.md"]),
        ("[a](https://example.com/x#y) [b](https://example) [c](htps://a.com)", ["https://example", "htps://a.com"]),
        ("`[a](no.md)`\n```\n[b](no.md)\n```\n", []),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, page: str, broken: list[str]) -> None:
    (tmp_path / "elsewhere.md").write_text("")
    two = "## There *it* is\n```\n# no\n```\n[up](../README.md)"
    assert links.broken(tree(tmp_path / "it", README_md=page, docs__two_md=two)) == [f"README.md: {e}" for e in broken]


def test_a_built_page_that_is_missing_or_loads_from_outside_is_found(tmp_path: Path) -> None:
    page = '<h1 id="one"></h1><a href="two.html#two"></a><a href="two.html#no"></a><a href="three.html"></a>'
    page += '<script src="https://cdn.example.com/x.js"></script><a href="https://example.com"></a>'
    site = tree(tmp_path, index_html=page, two_html='<a name="two" href="#two"></a><link rel="x" href="//cdn/x.css">')
    assert links.broken_in_site(site) == [
        "index.html: loads https://cdn.example.com/x.js from outside",
        "index.html: two.html#no has no such anchor",
        "index.html: three.html leads nowhere",
        "two.html: loads //cdn/x.css from outside",
    ]
