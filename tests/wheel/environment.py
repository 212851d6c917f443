"""An empty environment outside the checkout, and what is run in it: the wheel alone, never the checkout's modules."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL_S = 1800  # Torch alone is 750 MB on disk.
RUN_S = 300


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which the wheel is installed, and an empty folder to run programs in."""

    folder: Path

    @property
    def elsewhere(self) -> Path:
        return self.folder / "elsewhere"

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def environ(self) -> dict[str, str]:
        """Return this process's variables without those that lead to the checkout or to another hub."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TENSORHUB_", "COVERAGE", "VIRTUAL_ENV"))
        }
        return {**kept, "TENSORHUB_DIR": str(self.elsewhere / "hub")}

    def run(self, name: str, *arguments: str, timeout_s: float = RUN_S) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment until it ends."""
        return subprocess.run(
            [self.program(name), *arguments],
            cwd=self.elsewhere,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def python(self, code: str) -> "subprocess.CompletedProcess[str]":
        """Run Python code that finds nothing but the environment's packages."""
        return self.run("python", "-I", "-c", code)


def build(folder: Path) -> Path:
    """Build the wheel of this checkout into a folder."""
    _pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [wheel] = folder.glob("tensorhub-*.whl")
    return wheel


def installed(folder: Path, wheel: Path, extras: Iterable[str] = ()) -> Environment:
    """Make an empty environment and install the wheel into it, with the versions of constraints.txt."""
    venv.create(folder, with_pip=True)
    environment = Environment(folder)
    environment.elsewhere.mkdir()
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    _pip(folder / "bin" / "python", "install", wanted, "--constraint", str(ROOT / "constraints.txt"))
    return environment


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
