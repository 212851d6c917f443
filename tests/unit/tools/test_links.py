"""Links: every one of this repository's pages leads somewhere, and one that does not is found."""

from pathlib import Path

from tools.docs import links


def test_every_link_of_the_pages_leads_somewhere() -> None:
    assert links.broken() == []


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_md", ".md").replace("_html", ".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_page_or_a_heading_that_is_missing_is_found(tmp_path: Path) -> None:
    page = (
        "# One\n[a](docs/two.md) [b](docs/two.md#there-it-is) [c](#one)\n[d](docs/no.md) [e](docs/two.md#no) [f](#no)\n"
    )
    root = tree(tmp_path, README_md=page, docs__two_md="## There *it* is\n```\n# no\n```\n[up](../README.md)")
    assert links.broken(root) == ["README.md: docs/no.md", "README.md: docs/two.md#no", "README.md: #no"]


def test_a_link_out_of_the_repository_is_found(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.md").write_text("")
    root = tree(tmp_path / "repository", README_md="[a](../elsewhere.md)")
    assert links.broken(root) == ["README.md: ../elsewhere.md"]


def test_addresses_are_checked_for_their_form(tmp_path: Path) -> None:
    root = tree(tmp_path, README_md="[a](https://example.com/x#y) [b](https://example) [c](htps://example.com)")
    assert links.broken(root) == ["README.md: https://example", "README.md: htps://example.com"]


def test_what_is_in_code_is_no_link(tmp_path: Path) -> None:
    assert links.broken(tree(tmp_path, README_md="`[a](no.md)`\n```\n[b](no.md)\n```\n")) == []


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
