"""A throwaway copy of this machine, booted with systemd in a container: what it changes is gone when it ends.

Its file system is this machine's own, below an overlay in memory, so nothing is downloaded. Always true: nothing
outside the container is changed; every command in it has a bound; at the end no process of it and no mount is left.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, Self

from tests.kit.waiting import wait_until

from tensorhub.local.nats_server import find_program

NAME: Final = f"tensorhub-test-{os.getpid()}"
BOOT_S_MAX: Final = 60.0
COMMAND_S_MAX: Final = 120.0
END_S_MAX: Final = 30.0
ROOT: Final = Path(__file__).parents[2]
HIDDEN: Final = ("/home/", "/root/", "/tmp/", "/var/tmp/")  # noqa: S108 (the units see none of them)
WAITING_FOR_NETWORKS: Final = tuple(
    f"{manager}-wait-online.service" for manager in ("systemd-networkd", "NetworkManager", "ifupdown")
)
"""In the container there is none but its own loopback."""
NEEDED: Final = ("systemd-nspawn", "systemd-analyze", "nsenter", "mount", "runuser")


def missing() -> str | None:
    """Return why no machine can be booted here, or None."""
    lacking = [program for program in NEEDED if shutil.which(program) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: on Debian 'apt install systemd-container util-linux'"
    if os.geteuid() != 0:
        return "only root may boot a container"
    hidden = [path for path in _paths() if path.startswith(HIDDEN)]
    if hidden:
        return f"the units see no home and have a /tmp of their own, and what is tested stands in {hidden[0]}"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(f"/usr/bin/python{version}").exists():
        return f"this machine has no Python {version} of its own in /usr/bin, and others may stand in homes"
    return None


def _paths() -> list[str]:
    """Return where the modules stand that are tested, and those that they need."""
    return [path for path in sys.path if "site-packages" in path or Path(path).is_relative_to(ROOT)]


def install_programs(machine: "Machine", at: str) -> None:
    """Give the machine an environment with what this one has: the console scripts, and the same modules."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine.run(f"/usr/bin/python{version}", "-m", "venv", "--without-pip", at)
    folder = machine.root / at.lstrip("/")
    (folder / f"lib/python{version}/site-packages/tested.pth").write_text("\n".join(_paths()) + "\n")
    for script in metadata.entry_points(group="console_scripts"):
        if script.name.startswith("tensorhub"):
            program = folder / "bin" / script.name
            program.write_text(f"#!{at}/bin/python\nfrom {script.module} import {script.attr}\n{script.attr}()\n")
            program.chmod(0o755)
    (folder / "bin/nats-server").symlink_to(find_program())


class Machine:
    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tensorhub-machine-"))
        self.root = self._folder / "root"
        self._mounted: list[Path] = []
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._init = 0

    def run(self, *command: str, user: str | None = None, timeout_s: float = COMMAND_S_MAX) -> str:
        """Run a command in it to its end and return what it wrote. Raises `AssertionError` when it fails."""
        done = subprocess.run(
            self._inside(command, user),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout.strip()

    def start(self, *command: str, user: str | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(self._inside(command, user), stdout=subprocess.PIPE, text=True)

    def _inside(self, command: tuple[str, ...], user: str | None) -> list[str]:
        as_user = ["runuser", "-u", user, "--"] if user is not None else []
        return ["nsenter", "--target", str(self._init), "--all", "--", *as_user, *command]

    @classmethod
    @contextmanager
    def booted(cls) -> Iterator[Self]:
        made = cls()
        try:
            made._boot()
            yield made
        finally:
            made._end()

    def _boot(self) -> None:
        memory = self._folder / "memory"
        memory.mkdir()
        self._mount(memory, "-t", "tmpfs", "tmpfs")
        for folder in (memory / "upper", memory / "work", self.root):
            folder.mkdir()
        layers = f"lowerdir=/,upperdir={memory / 'upper'},workdir={memory / 'work'}"
        self._mount(self.root, "-t", "overlay", "-o", layers, "overlay")
        # An id of its own.
        (self.root / "etc/machine-id").unlink(missing_ok=True)
        for unit in WAITING_FOR_NETWORKS:
            masked = self.root / "etc/systemd/system" / unit
            masked.unlink(missing_ok=True)
            masked.symlink_to("/dev/null")
        self._nspawn = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", "--directory", str(self.root), "--machine", NAME, "--boot"),
                *("--register=no", "--keep-unit", "--private-network", "--console=read-only"),
                # Of this machine's own services none is wanted.
                *("--", "systemd.unit=basic.target"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._is_up, BOOT_S_MAX)

    def _mount(self, at: Path, *what: str) -> None:
        subprocess.run(["mount", *what, str(at)], check=True)
        self._mounted.append(at)

    def _is_up(self) -> bool:
        # Looked up each time: the first child of nspawn is one that only prepares the container.
        self._init = self._find_init()
        if not self._init:
            return False
        asked = subprocess.run(
            self._inside(("systemctl", "is-active", "basic.target"), None), check=False, capture_output=True, text=True
        )
        return asked.stdout.strip() == "active"

    def _find_init(self) -> int:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            raise AssertionError(f"systemd-nspawn ended with {self._nspawn.returncode}")
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _end(self) -> None:
        if self._nspawn is not None:
            self._nspawn.terminate()
            try:
                self._nspawn.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(END_S_MAX)
        for at in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", str(at)], check=True)
        shutil.rmtree(self._folder)
