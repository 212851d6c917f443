"""`tensorhub demo`: a model learns, engines generate with what it has learnt so far; every byte is checked."""

import importlib.util

from tensorhub.cli import options
from tensorhub.cli.running import job_of, settings_of
from tensorhub_common.errors import NotInThisVersion, TensorHubError


def demo(job: options.Job = None, directory: options.Directory = None) -> None:
    """Show a training run with its engines on this machine."""
    if importlib.util.find_spec("tensorhub.demo.run") is None:
        raise NotInThisVersion("demo is not in this version of TensorHub: see examples/ for programs to copy from")
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise TensorHubError(f"the demo needs {needed}: pip install 'tensorhub[demo]'")
    settings = settings_of(directory)
    runner = importlib.import_module("tensorhub.demo.run")
    runner.run(job=job_of(job, settings), directory=directory)
