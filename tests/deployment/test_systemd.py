"""The units in a booted systemd: ready when they say so, killed, hung, stopped in the middle of a read."""

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.deployment.machine import ROOT, Machine, install_programs, missing
from tests.kit.waiting import wait_until

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub_common.auth.permissions import Role, User

PROGRAMS = "/opt/tensorhub"
WORKER = ROOT / "tests/deployment/worker.py"
USER = "tensorhub"
UNITS = [
    "tensorhub-nats",
    "tensorhub-registry",
    "tensorhub-planner",
    "tensorhub-rollout",
    "tensorhub-agent@0",
    "tensorhub-agent@1",
    "tensorhub-agent@2",
]
WATCHDOG_S = 20.0
STOP_S_MAX = 20.0
BACK_S_MAX = 30.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Install as docs/operate/deploy.md says, and start all units. `start` returns once each says that it is ready."""
    with Machine.booted() as booted:
        install(booted)
        booted.run("systemctl", "start", *UNITS)
        yield booted


def install(machine: Machine) -> None:
    install_programs(machine, PROGRAMS)
    etc = machine.root / "etc/tensorhub"
    etc.mkdir()
    for source in (*sorted((ROOT / "systemd/env").glob("*.env")), ROOT / "systemd/nats.conf"):
        (etc / source.name).write_text(source.read_text())
    # The second agent pretends another host: what goes there goes by UCXX. The third is beside the first.
    (etc / "agent-1.env").write_text("TENSORHUB_HOST=elsewhere\n")
    keys = etc / "credentials"
    hostname = machine.run("hostname", "--short").strip()
    Keyring(keys).make([*OF_EVERY_HUB, *(User(Role.AGENT, f"{hostname}-{number}") for number in range(3))])
    subject = ("-subj", "/CN=nats", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    kind = ("-x509", "-newkey", "ed25519", "-noenc", "-days", "1")
    files = ("-keyout", keys / "nats.key", "-out", keys / "nats.pem")
    subprocess.run(["openssl", "req", *kind, *subject, *files], check=True, capture_output=True)
    (etc / "nats.pem").write_bytes((keys / "nats.pem").read_bytes())
    (machine.root / "usr/lib/sysusers.d/tensorhub.conf").write_text((ROOT / "systemd/tensorhub.sysusers").read_text())
    for unit in (ROOT / "systemd").glob("*.service"):
        (machine.root / "etc/systemd/system" / unit.name).write_text(unit.read_text())
    machine.run("systemd-sysusers")
    machine.run("chown", "--recursive", f"root:{USER}", "/etc/tensorhub")
    machine.run("chown", "--recursive", f"{USER}:{USER}", "/etc/tensorhub/credentials")
    machine.run("systemctl", "daemon-reload")


def property_of(machine: Machine, unit: str, name: str) -> str:
    return machine.run("systemctl", "show", "--property", name, "--value", unit)


def pid_of(machine: Machine, unit: str) -> int:
    return int(property_of(machine, unit, "MainPID"))


def is_active_again(machine: Machine, unit: str, old: int) -> bool:
    state = property_of(machine, unit, "ActiveState")
    return state == "active" and pid_of(machine, unit) not in (0, old)


def worker(agent: int, *command: str) -> tuple[str, ...]:
    socket = f"TENSORHUB_SOCKET=/run/tensorhub/agent-{agent}/agent.sock"
    return ("env", socket, "TENSORHUB_JOB=units", f"{PROGRAMS}/bin/python", "-P", str(WORKER), *command)


def pull(agent: int, *stopped: str) -> tuple[str, ...]:
    return worker(agent, "pull", f"rollout-{agent}", *stopped)


def segments(machine: Machine) -> list[str]:
    return machine.run("find", "/dev/shm", "-name", "*.seg", "-printf", "%f %i\n").splitlines()  # noqa: S108


def test_all_are_ready_and_say_what_they_do(machine: Machine) -> None:
    for unit in UNITS:
        assert property_of(machine, unit, "ActiveState") == "active"
        assert property_of(machine, unit, "NRestarts") == "0"
    host = machine.run("hostname", "--short")
    said = property_of(machine, "tensorhub-agent@1", "StatusText")
    assert said == f"agent {host}-1 serves workers at /run/tensorhub/agent-1/agent.sock"


def test_verify_finds_nothing_to_say(machine: Machine) -> None:
    """It returns 0 for unknown keys too, so what it writes is what counts."""
    paths = [f"/etc/systemd/system/{unit.name}" for unit in sorted((ROOT / "systemd").glob("*.service"))]
    assert machine.run("systemd-analyze", "verify", *paths) == ""


def test_a_killed_agent_comes_back_with_its_memory(machine: Machine) -> None:
    published = machine.run(*worker(0, "publish", "1"), user=USER)
    before, old = segments(machine), pid_of(machine, "tensorhub-agent@0")
    machine.run("systemctl", "kill", "--signal=SIGKILL", "--kill-whom=main", "tensorhub-agent@0")
    wait_until(lambda: is_active_again(machine, "tensorhub-agent@0", old), BACK_S_MAX)
    assert before
    assert segments(machine) == before
    assert machine.run(*pull(1), user=USER) == published


@pytest.mark.parametrize("unit", ["tensorhub-registry", "tensorhub-planner", "tensorhub-agent@1"])
def test_a_service_that_hangs_is_ended_and_started_again(machine: Machine, unit: str) -> None:
    old, restarts = pid_of(machine, unit), int(property_of(machine, unit, "NRestarts"))
    began = time.monotonic()
    machine.run("systemctl", "kill", "--signal=SIGSTOP", "--kill-whom=main", unit)
    wait_until(lambda: is_active_again(machine, unit, old), WATCHDOG_S + BACK_S_MAX)
    assert int(property_of(machine, unit, "NRestarts")) == restarts + 1
    assert "Watchdog timeout" in machine.run("journalctl", "--unit", unit, "--output=cat")
    assert time.monotonic() - began > WATCHDOG_S / 2, "something else than the watchdog ended it"


@pytest.mark.parametrize(("agent", "version"), [(1, "2"), (2, "3")], ids=["ucxx", "local"])
def test_a_stop_during_a_read_is_bounded_and_gives_no_wrong_bytes(machine: Machine, agent: int, version: str) -> None:
    published = machine.run(*worker(0, "publish", version), user=USER)
    before, reader = segments(machine), pid_of(machine, f"tensorhub-agent@{agent}")
    # The reader's agent is stopped in the middle of its read, so the read stays open however fast this machine is.
    with machine.start(*pull(agent, str(reader), version), user=USER) as pulling:
        try:
            assert pulling.stdout is not None
            assert pulling.stdout.readline() == "STOPPED\n"
            began = time.monotonic()
            machine.run("systemctl", "stop", "tensorhub-agent@0")
            took_s = time.monotonic() - began
        finally:
            machine.run("kill", f"-{signal.SIGCONT}", str(reader))
        said = pulling.stdout.readline().strip()
    print(f"the stop took {took_s:.1f} s; the reader got {said}")
    assert took_s < STOP_S_MAX
    assert property_of(machine, "tensorhub-agent@0", "Result") == "success", "it had to be killed"
    assert said in ("VersionUnavailable", published)
    # What it served stands there still, and is served again.
    assert set(before) <= set(segments(machine))
    machine.run("systemctl", "start", "tensorhub-agent@0")
    assert machine.run(*pull(agent), user=USER) == published


def test_memory_and_catalog_stay_when_all_units_stop(machine: Machine) -> None:
    """The last unit of a user that stops is the one with which systemd would remove what the user has in memory."""
    published = machine.run(*worker(0, "publish", "4"), user=USER)
    before = segments(machine)
    machine.run("systemctl", "stop", *UNITS)
    assert before
    assert segments(machine) == before
    machine.run("systemctl", "start", *UNITS)
    assert machine.run(*pull(1), user=USER) == published


def test_a_worker_of_another_user_is_refused(machine: Machine) -> None:
    with pytest.raises(AssertionError, match=r"PermissionError|Permission denied|AgentUnavailable"):
        machine.run(*pull(0), user="nobody")


def test_settings_that_can_not_be_are_reported_once(machine: Machine) -> None:
    """A service that was started wrongly fails with its one line; systemd doesn't try it again and again."""
    machine.run("sh", "-c", "echo TENSORHUB_BEAT_S=often > /etc/tensorhub/agent-9.env")
    with pytest.raises(AssertionError, match="failed"):
        machine.run("systemctl", "start", "tensorhub-agent@9")
    assert property_of(machine, "tensorhub-agent@9", "NRestarts") == "0"
    logged = machine.run("journalctl", "--unit", "tensorhub-agent@9", "--output=cat")
    assert "TENSORHUB_BEAT_S is often and must be a number of seconds" in logged


def test_no_unit_stands_open(machine: Machine) -> None:
    for unit in UNITS:
        rated = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=20", ROOT / "systemd" / file_of(unit)],
            check=False,
            capture_output=True,
            text=True,
        )
        assert rated.returncode == 0, rated.stdout


def file_of(unit: str) -> str:
    return f"{unit.partition('@')[0]}@.service" if "@" in unit else f"{unit}.service"
