"""The `tensorhub` command: its commands, each in a file of its own."""

import sys
from typing import Annotated

import typer

from tensorhub import __version__
from tensorhub.cli.commands.bench import bench
from tensorhub.cli.commands.credentials import credentials
from tensorhub.cli.commands.delete import delete
from tensorhub.cli.commands.demo import demo
from tensorhub.cli.commands.doctor import doctor
from tensorhub.cli.commands.drain import drain
from tensorhub.cli.commands.publish import publish
from tensorhub.cli.commands.pull import pull
from tensorhub.cli.commands.replay import replay
from tensorhub.cli.commands.retention import pin, quota, retain, rewind, unpin
from tensorhub.cli.commands.rollouts import rollouts
from tensorhub.cli.commands.runner import runner
from tensorhub.cli.commands.simulate import simulate
from tensorhub.cli.commands.status import status
from tensorhub.cli.commands.trace import trace
from tensorhub.cli.commands.up import up
from tensorhub.cli.commands.upgrade import upgrade
from tensorhub.cli.commands.versions import versions
from tensorhub.cli.commands.watch import watch
from tensorhub.cli.runner import ErrorHandlingGroup

app = typer.Typer(
    name="tensorhub",
    help="Moves model weights from the GPUs that train to the GPUs that generate.",
    cls=ErrorHandlingGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command, example in (
    (up, "tensorhub up --agents 2"),
    (demo, "tensorhub demo"),
    (status, "tensorhub status --job run-7"),
    (versions, "tensorhub versions policy --json"),
    (watch, "tensorhub watch policy --json --after 120"),
    (rollouts, "tensorhub rollouts --job run-7, or tensorhub rollouts why p-17 3"),
    (runner, "tensorhub runner --model ./my-model --hub-model policy --replica runner-7"),
    (replay, "tensorhub replay rollouts.jsonl --model ./my-model"),
    (publish, "tensorhub publish policy --version 12 model-*.safetensors"),
    (pull, "tensorhub pull policy --version latest policy.safetensors"),
    (trace, "tensorhub trace --version 12 --replica rollout-3"),
    (retain, "tensorhub retain policy --last 2"),
    (pin, "tensorhub pin policy 12"),
    (unpin, "tensorhub unpin policy 12"),
    (rewind, "tensorhub rewind policy --to 8"),
    (delete, "tensorhub delete policy, or tensorhub delete --job run-7"),
    (quota, "tensorhub quota 68719476736 --job run-7"),
    (drain, "tensorhub drain node-12-0"),
    (upgrade, "tensorhub upgrade --job run-7"),
    (credentials, "tensorhub credentials /etc/tensorhub/credentials --agent node-12-0 --job run-7"),
    (doctor, "tensorhub doctor"),
    (bench, "tensorhub bench"),
    (simulate, "tensorhub simulate elastic --alone --picture elastic.svg"),
):
    app.command(epilog=f"Example: {example}")(command)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if wanted:
        sys.stdout.write(f"tensorhub {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Moves model weights from the GPUs that train to the GPUs that generate."""


def main() -> None:
    """Run the command that the arguments name."""
    app(prog_name="tensorhub")
