"""The options that several commands have, each defined once, and how the command line's words are read.

Always true: a value that no call could take is wrong usage, told with what it may be, before anything travels.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from tensorhub.arguments import SEQ_MAX, TIMEOUT_S_MAX
from tensorhub_common.config import parsers as values
from tensorhub_common.protocol.log.commands import VERSION_MAX
from tensorhub_common.protocol.subjects import check_job, check_name

T = TypeVar("T")

DIGITS_MAX: Final = 30
"""Python refuses to read thousands of digits, and no bound here has more than these."""

STDIO: Final = "-"
"""What means stdin or stdout to many programs, and is the name of a file to none."""


def seconds(most: float = TIMEOUT_S_MAX) -> Callable[[object], float]:
    """Take a finite number of seconds from 0 to `most`."""

    def parse(given: object) -> float:
        try:
            value = float(str(given))
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            raise typer.BadParameter(f"{given!s:.40} is no number of seconds from 0 to {most:.0f}")
        return value

    return parse


def whole(least: int, most: int) -> Callable[[object], int]:
    """Take a whole number within bounds."""

    def parse(given: object) -> int:
        text = str(given)
        digits = text.removeprefix("-")
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= DIGITS_MAX
        if not is_number or not least <= int(text) <= most:
            raise typer.BadParameter(f"{text:.40} is no whole number from {least} to {most}")
        return int(text)

    return parse


def name_of(what: str) -> Callable[[str], str]:
    """Take a name that may be part of a subject."""
    return lambda text: check_name(what, text)


def said(parse: Callable[[str], T], *, is_secret: bool = False) -> Callable[[object], T]:
    """Take what the parser of a setting takes, and complain in its words. A secret is not repeated."""

    def parsed(given: object) -> T:
        text = str(given)
        if not text:
            raise typer.BadParameter("it is empty: leave it out, or give a value")
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{'it' if is_secret else text[:80]} {error}") from None

    return parsed


version_number: Final = whole(0, VERSION_MAX)


def version_or_latest(given: object) -> int | None:
    """Take a version's number, or `latest`, which is None."""
    try:
        return None if given == "latest" else version_number(given)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, nor 'latest'") from None


Job = Annotated[
    str | None,
    typer.Option(
        "--job",
        help="The job to speak of; by default TENSORHUB_JOB, else 'default'.",
        show_default=False,
        parser=check_job,
        metavar="NAME",
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where 'tensorhub up' keeps its state; by default TENSORHUB_DIR, else .tensorhub."),
]
Nats = Annotated[
    str | None,
    typer.Option(
        "--nats",
        help="The NATS server, or several nodes with commas between; by default TENSORHUB_NATS, else hub.json.",
        parser=said(values.nats_urls, is_secret=True),
        metavar="URLS",
    ),
]
Agent = Annotated[
    str | None,
    typer.Option(
        "--agent",
        help="The agent's id or socket; by default TENSORHUB_AGENT, else the first on this host.",
        parser=said(values.agent_name_or_socket),
        metavar="AGENT",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For programs: one JSON object a line.")]
Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait for the hub, all in all.", parser=seconds(), metavar="S")
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's name.", show_default=False, parser=name_of("model"))
]
Version = Annotated[
    int,
    typer.Argument(metavar="VERSION", help="The version's number.", show_default=False, parser=version_number),
]
After = Annotated[
    int | None, typer.Option(help="Go on after the event with this seq.", parser=whole(0, SEQ_MAX), metavar="SEQ")
]
