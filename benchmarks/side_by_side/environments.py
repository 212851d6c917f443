"""The environment of each peer, made when it is first asked for: `.benchmarks/NAME`, never our own.

`peers/NAME.txt` pins what is installed. `peers/NAME.debian` names libraries that its wheel expects of the host; they
are unpacked beside it, so that nothing is installed on the machine. Always true: an environment that carries the mark
of its pins is whole.
"""

import asyncio
import ctypes.util
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.contender import Failed

HERE: Final = Path(__file__).parent / "peers"
KEPT: Final = Path(__file__).parents[2] / ".benchmarks"
INSTALL_S: Final = 900.0
TAIL_CHARS: Final = 400
NAMES: Final = ("ray", "nixl", "mooncake", "monarch")


@dataclass(frozen=True, slots=True)
class Environment:
    """How to run a program in it."""

    python: str
    variables: Mapping[str, str]


async def prepare(name: str) -> Environment:
    """Make a peer's environment, or find it made. Raises `Failed` if it can't be."""
    folder = KEPT / name
    mark = f"{hashlib.blake2b(_read(HERE / f'{name}.txt').encode(), digest_size=8).hexdigest()} of {sys.version}"
    if _read(folder / "whole") != mark:
        print(f"making {folder} for {name}; this is done once", file=sys.stderr)
        await _make(name, folder)
        _write(folder / "whole", mark)
    libraries = _folders_of_libraries(folder / "system")
    variables = {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    return Environment(str(folder / "bin" / "python"), variables)


async def _make(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    await _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "pip"), "install", "--disable-pip-version-check")
    await _run(*pip, "-r", str(HERE / f"{name}.txt"))
    if missing := _missing(name):
        await _unpack(missing, folder / "system")


async def _unpack(packages: list[str], folder: Path) -> None:
    """Bring Debian's packages into a folder, without installing them."""
    await _run("mkdir", "-p", str(folder))
    await _run("apt-get", "download", *packages, folder=folder)
    for package in _packages(folder):
        await _run("dpkg-deb", "-x", package, ".", folder=folder)


async def _run(*command: str, folder: Path | None = None) -> None:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ)
        )
    except FileNotFoundError:
        raise Failed(f"there is no {command[0]} on this machine") from None
    try:
        async with asyncio.timeout(INSTALL_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Failed(f"'{' '.join(command)}' has not ended within {INSTALL_S:g} s") from None
    if process.returncode != 0:
        raise Failed(f"'{' '.join(command)}' failed: {out.decode(errors='replace')[-TAIL_CHARS:]}")


def _packages(folder: Path) -> list[str]:
    return [package.name for package in folder.glob("*.deb")]


def _missing(name: str) -> list[str]:
    """Return what its wheel expects of the host and the host lacks: all of it, or nothing."""
    listed = _read(HERE / f"{name}.debian").split()
    return listed if ctypes.util.find_library("ibverbs") is None else []


def _folders_of_libraries(system: Path) -> list[str]:
    return sorted({str(path.parent) for path in system.glob("**/*.so.*")})


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
