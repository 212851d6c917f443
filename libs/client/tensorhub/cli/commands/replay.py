"""`tensorhub replay`: responses of rollouts, scored again with the weights of the versions that made them."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tensorhub.cli import options
from tensorhub.cli.output import json_line
from tensorhub.cli.runner import SAID_NO, door_of, need, run, settings_of
from tensorhub_common.config.settings import Settings
from tensorhub_common.protocol.subjects import check_job

if TYPE_CHECKING:
    from tensorhub._rollouts.records import ResponseRecord

GONE: Final = 3
"""The exit code where nothing differs, and a version is in the hub no more."""
TOLERANCE_MAX: Final = 1e3


def _nats(given: object) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if not 0 <= value <= TOLERANCE_MAX:
        raise typer.BadParameter(f"{given!s:.40} is no number from 0 to {TOLERANCE_MAX:.0f}")
    return value


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Responses, as batch.save has written them.")],
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model's config.json; by default TENSORHUB_RUNNER_MODEL.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far log-probabilities may be off, in nats; by default as exact as their engine.",
            parser=_nats,
            metavar="X",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            help="The job that has the versions; by default the one that the file names.",
            show_default=False,
            parser=check_job,
            metavar="NAME",
        ),
    ] = None,
    json: options.Json = False,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for the hub, for each version.", parser=options.seconds(), metavar="S"),
    ] = 120,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Score responses again with the weights that made them, and say what differs."""
    from tensorhub._rollouts.replay import counts  # noqa: PLC0415 (it imports numpy, which other commands do without)
    from tensorhub.cli.replay import scoring, verdict_table  # noqa: PLC0415 (as above)

    found = _read(file)
    settings = _model_settings(settings_of(directory), model)
    need("replay", "torch", "transformers", extra="engine-torch")
    loaded = scoring.load_engine(settings)
    scores = run(scoring.score(door_of(job or found[0].job, directory, nats, agent), loaded, found, timeout))
    verdicts = [scoring.judged(record, number, scores, tolerance) for number, record in enumerate(found)]
    if json:
        for verdict in verdicts:
            json_line(verdict)
    else:
        verdict_table.print_verdicts(verdicts, scoring.engine_facts(loaded))
    totals = counts(each.verdict for each in verdicts)
    code = SAID_NO if totals.get("differs") else GONE if totals.get("gone") else 0
    if code:
        raise typer.Exit(code)


def _read(file: Path) -> "list[ResponseRecord]":
    """Return the responses of a file, which are of one job and one model."""
    from tensorhub._rollouts import records  # noqa: PLC0415 (it imports numpy, which other commands do without)

    try:
        found = list(records.read(file))
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}", param_hint="FILE") from None
    except ValueError as why:
        raise typer.BadParameter(f"{file}: {why}", param_hint="FILE") from None
    if not found:
        raise typer.BadParameter(f"{file} has no response: batch.save writes some", param_hint="FILE")
    places = sorted({(each.job, each.model) for each in found})
    if len(places) > 1:
        named = ", ".join(f"{model} of job {job}" for job, model in places)
        raise typer.BadParameter(f"{file} has responses of several models: {named}; split it", param_hint="FILE")
    return found


def _model_settings(settings: Settings, model: Path | None) -> Settings:
    """Return settings that load the exact torch engine of the model."""
    folder = settings.runner_model if model is None else model
    if folder is None:
        raise typer.BadParameter("the model that made them is needed, as in --model ./my-model", param_hint="--model")
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(f"there is no config.json in {folder}", param_hint="--model")
    return dataclasses.replace(
        settings, runner_engine="torch", runner_model=folder, runner_exact=True, runner_device="cpu"
    )
