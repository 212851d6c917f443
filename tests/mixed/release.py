"""Another release beside this one: a wheel of its commit, in an environment of its own that shares the dependencies.

Nothing is downloaded. A wheel of ours is the packages that `pyproject.toml` names, so it is put together here. It is
installed into an environment whose other packages are those of the running interpreter. Both are kept for the next run.
"""

import fcntl
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BEFORE: Final = "7ff7cd1"
"""The commit of the release before this one: the last whose jobs have no level."""
KEPT: Final = ROOT / ".mixed"


class NoRelease(Exception):
    """The release can't be had here, and why."""


def commit_of(release: str) -> str:
    """Return the whole name of a commit. Raises `NoRelease` where this checkout does not have it."""
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{release}^{{commit}}"],  # noqa: S607 (the machine's own git)
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise NoRelease(f"this checkout has no commit {release}: fetch the whole history, or name one with RELEASE=…")
    return found.stdout.strip()


def python_of(release: str = BEFORE) -> Path:
    commit = commit_of(release)
    home = KEPT / commit[:12]
    KEPT.mkdir(exist_ok=True)
    # Tests run side by side, and two of them may want it at once.
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            _make(commit, home)
    return home / "env" / "bin" / "python"


def _make(commit: str, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    source = home / "source"
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)  # noqa: S607
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(source, filter="data")
    environment(home / "env", wheel_of(source, home))
    shutil.rmtree(source)
    (home / "ready").touch()


def environment(home: Path, wheel: Path) -> None:
    venv.create(home, with_pip=False)
    (packages,) = (home / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    # A .pth file adds these folders, and not what their own .pth files name: an editable installation is left out.
    (packages / "dependencies.pth").write_text("\n".join(shared) + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(home / "bin/python")]
    done = subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", str(wheel)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoRelease(f"{wheel.name} can't be installed: {done.stderr[-1000:]}")


def wheel_of(source: Path, into: Path) -> Path:
    """Put the packages of a source tree into a wheel, as its pyproject.toml says."""
    project = tomllib.loads((source / "pyproject.toml").read_text())
    name, version = project["project"]["name"], project["project"]["version"]
    wheel = into / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        names = [
            _add(file, path, path.relative_to(package.parent).as_posix())
            for package in map(source.__truediv__, project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
            for path in sorted(package.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]
        for said, text in _metadata(project["project"], name, version).items():
            file.writestr(f"{info}/{said}", text)
            names.append(f"{info}/{said}")
        names.append(f"{info}/RECORD")
        file.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in names))
    return wheel


def _add(file: zipfile.ZipFile, path: Path, name: str) -> str:
    file.write(path, name)
    return name


def _metadata(project: dict[str, Any], name: str, version: str) -> dict[str, str]:
    scripts = "".join(f"{command} = {target}\n" for command, target in project["scripts"].items())
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests/mixed\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[console_scripts]\n{scripts}",
    }
