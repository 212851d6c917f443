"""The commands of `tensorhub` as Markdown, from the program itself: the site puts it into docs/reference/cli.md."""

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from tensorhub.cli.main import app


def commands_markdown() -> str:
    """Return a section for each command, in the order of `tensorhub --help`."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("tensorhub", [], resilient_parsing=True)
    parts: list[str] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if not command.hidden:
            with command.make_context(name, [], parent=context, resilient_parsing=True) as inner:
                parts.append(_section(name, command, inner))
    return "\n\n".join(parts)


def _section(name: str, command: Any, context: Any) -> str:  # noqa: ANN401 (click's classes change with typer's version)
    usage = " ".join(["tensorhub", name, *command.collect_usage_pieces(context)])
    lines = [f"### `{name}`", "", _paragraphs(command.help or ""), "", f"    {usage}", ""]
    if rows := list(_rows(command, context)):
        lines += ["| argument or option | meaning |", "|---|---|", *rows]
    if command.epilog:
        lines += ["", f"Example: `{command.epilog.removeprefix('Example:').strip()}`"]
    return "\n".join(lines).rstrip()


def _rows(command: Any, context: Any) -> Iterator[str]:  # noqa: ANN401 (as above)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            name = record[0].replace("|", "\\|")
            yield f"| `{name}` | {_cell(record[1])} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _paragraphs(text: str) -> str:
    return re.sub(r"\n{2,}", "\n\n", text.replace("\b\n", "").strip())
