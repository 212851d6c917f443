"""What can be said of the deployment's files without running them: they name what the code has, and hold together."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub.local.nats_server import find_program
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.config.settings import VARIABLES, load

ROOT = Path(__file__).parents[2]
ENV_SAMPLES = sorted((ROOT / "systemd/env").glob("*.env"))
UNITS = sorted((ROOT / "systemd").glob("*.service"))
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_CLUSTER = ROOT / "docker-compose.cluster.yml"
OF_COMPOSE = {"TENSORHUB_NATS_PORT", "TENSORHUB_JAEGER_PORT", "TENSORHUB_MEMORY"}
"""What docker-compose.yml itself reads, and no process of the hub."""


def assignments(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", text, re.MULTILINE))


def named(text: str) -> set[str]:
    return set(re.findall(r"TENSORHUB_[A-Z0-9_]+", text))


@pytest.mark.parametrize("sample", ENV_SAMPLES, ids=lambda path: path.name)
def test_an_env_sample_sets_what_there_is_to_what_it_can_be(sample: Path) -> None:
    ours = {key: value for key, value in assignments(sample.read_text()).items() if key.startswith("TENSORHUB_")}
    assert set(ours) <= set(VARIABLES)
    load(ours)


@pytest.mark.parametrize(
    "file", [COMPOSE, COMPOSE_CLUSTER, ROOT / "docker/Dockerfile", *UNITS], ids=lambda path: path.name
)
def test_only_variables_that_there_are_are_named(file: Path) -> None:
    assert named(file.read_text()) <= set(VARIABLES) | OF_COMPOSE


def test_each_file_of_settings_that_a_unit_reads_has_a_sample() -> None:
    read = {each for unit in UNITS for each in re.findall(r"^EnvironmentFile=-?(\S+)$", unit.read_text(), re.MULTILINE)}
    names = {Path(each).name.replace("%i", "0") for each in read}
    assert names == {sample.name for sample in ENV_SAMPLES}


def test_the_two_configurations_of_nats_say_the_same_of_its_store() -> None:
    """What an acknowledgement promises must not depend on how NATS was started."""
    for config in (ROOT / "docker/nats.conf", ROOT / "systemd/nats.conf"):
        assert re.search(r"^\s*sync_interval: always$", config.read_text(), re.MULTILINE)
        assert named(config.read_text()) == set()


def certify(folder: Path) -> None:
    """Make the certificate of NATS in a folder as its script does."""
    make = re.search(r"openssl req .*? -out nats.pem", (ROOT / "docker/start-nats.sh").read_text(), re.DOTALL)
    assert make is not None
    subprocess.run(["sh", "-c", make[0]], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("config", [ROOT / "docker/nats.conf", ROOT / "systemd/nats.conf"], ids=str)
def test_nats_knows_its_users_and_speaks_tls(config: Path, tmp_path: Path) -> None:
    """The server itself reads the sample, with keys and a certificate that were made as the docs say."""
    text = config.read_text()
    assert 'include "credentials/nats-users.conf"' in text
    folder = tmp_path / "credentials"
    Keyring(folder).make([*OF_EVERY_HUB, User(Role.AGENT, "node-0")])
    certify(folder)
    sample = tmp_path / "nats.conf"
    sample.write_text(text.replace("/etc/tensorhub", str(tmp_path)).replace("/var/lib", str(tmp_path)))
    done = subprocess.run([find_program(), "-t", "-c", sample], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_nodes_of_the_cluster_are_told_to_all() -> None:
    """A process that knew one of them alone would be lost with it, or not know how many there are."""
    text = COMPOSE_CLUSTER.read_text()
    nodes = re.findall(r"NATS_NODE: ([a-z0-9-]+)", text)
    assert nodes == ["nats", "nats-1", "nats-2"]
    assert f"TENSORHUB_NATS: {','.join(f'tls://{node}:4222' for node in nodes)}\n" in text
    routes = re.findall(r"nats-route://([a-z0-9-]+):6222", (ROOT / "docker/nats-cluster.conf").read_text())
    assert routes == nodes
    certified = re.search(r"subjectAltName=([^\"]+)", (ROOT / "docker/start-nats.sh").read_text())
    assert certified is not None
    assert {f"DNS:{node}" for node in nodes} <= set(certified[1].split(","))


def options_of(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_no_unit_takes_an_agents_memory_away(unit: Path) -> None:
    """What is removed is all that the user has in /dev/shm, whichever of its units says so and stops last."""
    options = options_of(unit)
    assert options["User"] == "tensorhub"
    assert options.get("RemoveIPC", "no") == "no"
    assert "DynamicUser" not in options


def test_an_agent_sees_the_real_memory() -> None:
    options = options_of(ROOT / "systemd/tensorhub-agent@.service")
    assert not {"PrivateDevices", "TemporaryFileSystem", "InaccessiblePaths"} & set(options)


def test_ports_are_published_on_this_machine_alone() -> None:
    ports = re.findall(r"^ *ports: \[(.*)\]$", COMPOSE.read_text(), re.MULTILINE)
    assert ports
    assert all(port.strip().startswith('"127.0.0.1:') for port in ports)


def test_what_the_image_is_built_from_is_there() -> None:
    """The list names what may come in; a folder that moves would otherwise be missing from the wheel."""
    ignore = (ROOT / "docker/Dockerfile.dockerignore").read_text()
    allowed = re.findall(r"^!(\S+)$", ignore, re.MULTILINE)
    assert allowed
    assert [each for each in allowed if not (ROOT / each).exists()] == []


def test_the_runner_in_containers_has_the_model_of_the_guide() -> None:
    """So that the guide's trainer runs against either."""
    page = (ROOT / "docs/guides/rollouts.md").read_text()
    (config,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads((ROOT / "docker/model/config.json").read_text()) == json.loads(config)
    keys = re.search(r"tensorhub credentials \. (.*) > /dev/null", (ROOT / "docker/start-nats.sh").read_text())
    assert keys is not None
    for named in re.findall(r"/credentials/(?:agents|runners)/([\w-]+)\.nk", COMPOSE.read_text()):
        assert f" {named} " in f" {keys[1]} "


def test_a_runner_is_of_the_user_and_at_the_socket_of_its_agent() -> None:
    runner, agent = (options_of(ROOT / f"systemd/tensorhub-{name}@.service") for name in ("runner", "agent"))
    assert runner["User"] == agent["User"]
    text = (ROOT / "systemd/tensorhub-runner@.service").read_text()
    assert f"TENSORHUB_SOCKET=/run/{agent['RuntimeDirectory']}/agent.sock\n" in text
    assert "tensorhub-agent@%i.service" in runner["After"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_understood(unit: Path, tmp_path: Path) -> None:
    """It returns 0 for unknown keys too, so what it writes is what counts. The programs need not be installed here."""
    text = unit.read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program is not None
    copy = tmp_path / unit.name
    copy.write_text(text.replace(program[1], shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], check=False, capture_output=True, text=True)
    assert done.stderr + done.stdout == ""
