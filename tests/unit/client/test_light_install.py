"""What importing the SDK brings in, and what is said where an extra is missing."""

import subprocess
import sys

import pytest

import tensorhub
from tensorhub import errors
from tensorhub_common.runtime import extras

HEAVY = (
    *("torch", "numpy", "nats", "nkeys", "structlog", "rich", "typer", "uvloop", "prometheus_client", "yaml", "xxhash"),
    *("opentelemetry", "opentelemetry.sdk", "tensorhub_common.telemetry", "tensorhub_common.catalog"),
)


def imported_by(code: str) -> set[str]:
    """Return the modules that a program has imported at its end."""
    program = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else_of_ours() -> None:
    ours = {name for name in imported_by("import tensorhub") if name.startswith("tensorhub")}
    assert ours == {"tensorhub"}


@pytest.mark.parametrize("name", ["connect", "connect_async", "AsyncHub", "TensorSpec", "mapping", "RoundTimeout"])
def test_a_name_of_the_sdk_imports_none_of_what_programs_need(name: str) -> None:
    assert not imported_by(f"from tensorhub import {name}") & set(HEAVY)


def test_every_public_name_is_there_once_and_an_unknown_one_is_an_error() -> None:
    for name in tensorhub.__all__:
        assert getattr(tensorhub, name) is getattr(tensorhub, name)
        assert name in dir(tensorhub)
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        getattr(tensorhub, "conect")  # noqa: B009 (a misspelt name, which type checkers refuse)


def test_what_type_checkers_see_is_what_there_is() -> None:
    """`tensorhub/__init__.py` names each thing twice: for type checkers, and with the module that it comes from."""
    listed = set(tensorhub._MODULES) | set(errors.__all__) | {"mapping", "__version__"}
    assert set(tensorhub.__all__) == listed
    seen = {line.split()[-1] for line in _type_checking_block() if " as " in line}
    assert seen | set(errors.__all__) | {"__version__"} == listed


def _type_checking_block() -> list[str]:
    assert tensorhub.__file__ is not None
    with open(tensorhub.__file__, encoding="utf-8") as file:  # noqa: PTH123 (a file of our own)
        text = file.read()
    return text.partition("if TYPE_CHECKING:")[2].partition("_MODULES")[0].splitlines()


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_shows_under_the_package_that_users_import(name: str) -> None:
    kind = getattr(tensorhub, name)
    assert (kind.__module__, issubclass(kind, tensorhub.TensorHubError)) == ("tensorhub", True)
    assert issubclass(kind, TimeoutError) == (name in ("DrainTimeout", "RoundTimeout"))


def test_a_program_without_its_extra_says_which_one_it_is() -> None:
    assert extras.missing("x", ["a", "b", "c"], "server") == (
        "x needs a, b and c, not installed here: pip install 'tensorhub[server]'"
    )
    program = "import sys; sys.modules['uvloop'] = None; from tensorhub_planner.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "tensorhub-planner needs uvloop, not installed here: pip install 'tensorhub[server]'\n",
    )
