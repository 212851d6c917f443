"""Programs whose packages come with an extra of the distribution, and what is said where they are missing."""

import sys
from importlib import import_module


def run_main(module: str, program: str, extra: str) -> None:
    """Run `main` of a program's module; where a package of its extra is missing, end with one line that names both."""
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0].startswith("tensorhub"):
            raise
        sys.exit(missing(program, [error.name], extra))
    main()


def missing(what: str, modules: list[str], extra: str) -> str:
    """Return the sentence about modules that `what` needs and that are not installed."""
    *first, last = modules
    named = f"{', '.join(first)} and {last}" if first else last
    return f"{what} needs {named}, not installed here: pip install 'tensorhub[{extra}]'"
