"""The options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

Job = Annotated[
    str | None,
    typer.Option("--job", help="The job to speak of; by default TENSORHUB_JOB, else 'default'.", show_default=False),
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
    ),
]
Agent = Annotated[
    str | None,
    typer.Option("--agent", help="The agent's id or socket; by default TENSORHUB_AGENT, else the first on this host."),
]
Json = Annotated[bool, typer.Option("--json", help="For programs: one JSON object a line.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait at most.", min=0)]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.", show_default=False)]
