"""Writes the table of all settings into docs/operate/settings.md.

    python -m tools.docs.settings_page < docs/operate/settings.md

Always true: nothing outside of the markers is changed, and what stands between them follows from `settings.VARIABLES`.
"""

import sys
from typing import Final

from tensorhub_common.config.settings import VARIABLES

TABLE_BEGIN: Final = "<!-- settings: begin (written by `make docs`) -->"
TABLE_END: Final = "<!-- settings: end -->"


def table_markdown() -> str:
    """Return the table as Markdown, without a newline at its end."""
    rows = ["| variable | default | unit | meaning |", "|---|---|---|---|"]
    for name, variable in VARIABLES.items():
        default = f"`{variable.default}`" if variable.default else "none"
        rows.append(f"| `{name}` | {default} | {variable.unit} | {variable.meaning} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return a page of documentation with the table, as it is now, between the page's markers."""
    before, begin, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers of the settings: put {TABLE_BEGIN} and {TABLE_END} into it")
    return f"{before}{begin}\n\n{table_markdown()}\n\n{end}{after}"


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
