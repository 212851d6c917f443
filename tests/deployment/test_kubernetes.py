"""What can be said of the manifests without a cluster: valid, of names that there are, and saying what compose says."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub.local.nats_server import find_program
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.config.settings import VARIABLES, load

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "kubernetes"
KUSTOMIZATION: Final = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: Final = [FOLDER / name for name in KUSTOMIZATION["resources"]]
PAGE: Final = (ROOT / "docs/operate/kubernetes.md").read_text()
OLDEST: Final = "1.29"
USER: Final = 10001
POD: Final = "pod-0"

Object = dict[str, Any]


def objects() -> Iterator[Object]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def named(item: Object) -> str:
    return f"{item['kind']} {item['metadata']['name']}"


WORKLOADS: Final = [each for each in objects() if "template" in each["spec"]]


def pod_of(workload: Object) -> Object:
    return dict(workload["spec"]["template"]["spec"])


def containers() -> dict[str, Object]:
    """Return every container, by its workload and its name, but those that end before others begin."""
    return {
        f"{workload['metadata']['name']}/{each['name']}": each
        for workload in WORKLOADS
        for each in (*pod_of(workload)["containers"], *pod_of(workload).get("initContainers", ()))
        if each["name"] != "folders"
    }


CONTAINERS: Final = containers()
HUB: Final = {name: each for name, each in CONTAINERS.items() if not name.startswith("nats")}
COMMON: Final = dict(
    each.split("=", 1) for gen in KUSTOMIZATION["configMapGenerator"] for each in gen.get("literals", ())
)


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return what the process is told, with the fields of its pod as they may be."""
    found = dict(COMMON) if "envFrom" in container else {}
    for each in container["env"]:
        text = each.get("value") or {"status.podIP": "10.0.0.1", "status.hostIP": "10.0.0.1"}.get(
            each["valueFrom"]["fieldRef"]["fieldPath"], POD
        )
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], text)
    return found


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("item", [*objects()], ids=named)
def test_a_manifest_is_valid(item: Object, version: str) -> None:
    """By the strict schema: a field that Kubernetes does not know would be passed over without a word."""
    kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_kustomize_builds_them_and_they_are_valid() -> None:
    built = subprocess.run(["kubectl", "kustomize", FOLDER], check=True, capture_output=True, text=True).stdout
    made = [*yaml.safe_load_all(built)]
    assert len(made) == len([*objects()]) + len(KUSTOMIZATION["configMapGenerator"])
    for each in made:
        assert each["metadata"]["namespace"] == "tensorhub"
        kubernetes_validate.validate(each, OLDEST, strict=True)


def test_every_manifest_is_built() -> None:
    assert {*MANIFESTS} == {*FOLDER.glob("*.yaml")} - {FOLDER / "kustomization.yaml"}


@pytest.mark.parametrize("name", HUB)
def test_a_process_is_told_what_there_is(name: str) -> None:
    found = environment_of(HUB[name])
    ours = {key: text for key, text in found.items() if key.startswith("TENSORHUB_")}
    assert {*ours} <= {*VARIABLES}
    load(ours)


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_image_and_a_command_are_those_of_the_project(name: str) -> None:
    container = CONTAINERS[name]
    image = container["image"].removeprefix("tensorhub-")
    assert re.search(rf"^FROM \S+ AS {image}$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert container["image"] in {each["name"] for each in KUSTOMIZATION["images"]}
    scripts = (ROOT / "pyproject.toml").read_text()
    program = container["command"][0]
    assert program == "nats-server" or re.search(rf"^{program} = ", scripts, re.MULTILINE)


@pytest.mark.parametrize("name", HUB)
def test_a_probe_asks_the_process_by_its_own_name(name: str) -> None:
    container, found = HUB[name], environment_of(HUB[name])
    probes = [probe for key, probe in container.items() if key.endswith("Probe")]
    assert container["startupProbe"] in probes
    assert container["livenessProbe"] in probes
    role = container["command"][0].removeprefix("tensorhub-")
    for probe in probes:
        asked = re.search(r'tensorhub_common\.introspection\.ping "\$(\w+)"', probe["exec"]["command"][-1])
        assert asked is not None
        assert asked[1] == f"TENSORHUB_{role.upper()}_ID"
        assert found[asked[1]].startswith(POD)
    names = [
        environment_of(each)[f"TENSORHUB_{each['command'][0].removeprefix('tensorhub-').upper()}_ID"]
        for key, each in HUB.items()
        if key.startswith("engine/")
    ]
    assert len({*names}) == 2, "an agent and a runner of one pod have names of their own"


def composed() -> dict[str, Object]:
    """Return the services of the compose file, and what the cluster's adds to their environment."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    text = (ROOT / "docker-compose.cluster.yml").read_text().replace("!override", "")
    for name, more in yaml.safe_load(text)["services"].items():
        if name in services:
            services[name].setdefault("environment", {}).update(more.get("environment", {}))
    return dict(services)


SERVICES: Final = {
    "registry": "registry/registry",
    "planner": "planner/planner",
    "rollout": "rollout/rollout",
    "agent-0": "engine/agent",
    "runner-0": "engine/runner",
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_is_what_it_is_in_compose(service: str) -> None:
    """The same command, image and settings; what the values of a pod must be, `load` has seen."""
    theirs, ours = composed()[service], CONTAINERS[SERVICES[service]]
    assert ours["image"] == theirs["image"]
    default = [f"tensorhub-{ours['command'][0].removeprefix('tensorhub-')}"]
    assert ours["command"] == theirs.get("command", default)
    assert {*theirs["environment"]} <= {*environment_of(ours)}
    assert environment_of(ours).get("TENSORHUB_LOG_REPLICAS") == (
        None if (replicas := theirs["environment"].get("TENSORHUB_LOG_REPLICAS")) is None else str(replicas)
    )
    read_only, capabilities = ours["securityContext"]["readOnlyRootFilesystem"], ours["securityContext"]["capabilities"]
    assert (read_only, capabilities["drop"]) == (theirs["read_only"], theirs["cap_drop"])


def test_each_service_of_compose_is_there() -> None:
    hub = {name.rstrip("-0123456789") for name in composed()} - {"jaeger", "demo"}
    assert hub == {name.partition("/")[2] for name in CONTAINERS}


def secrets_of_the_page(folder: Path) -> dict[str, set[str]]:
    """Run the page's commands that make keys and certificate; return the files of each Secret that it has made."""
    keys = Keyring(folder / "keys")
    (made,) = re.findall(r"^\$ tensorhub credentials keys (.*?)^\$", PAGE, re.MULTILINE | re.DOTALL)
    users = [User(Role.AGENT, name) for name in re.findall(r"--agent (\S+)", made)]
    users += [User(Role.RUNNER, name) for name in re.findall(r"--runner (\S+)", made)]
    keys.make([*OF_EVERY_HUB, *users])
    (certify,) = re.findall(r"^\$ (openssl .*?-out \S+)$", PAGE, re.MULTILINE | re.DOTALL)
    subprocess.run(["sh", "-c", certify], cwd=folder, check=True, capture_output=True)
    found: dict[str, set[str]] = {}
    for name, files in re.findall(r"create secret generic (\S+)((?:\s+\\?\s*--from-file=\S+)+)", PAGE):
        for each in re.findall(r"--from-file=(\S+)", files):
            path = folder / each
            assert path.exists(), f"{each} is not made by the page's commands"
            found.setdefault(name, set()).update([path.name] if path.is_file() else [x.name for x in path.iterdir()])
    return found


def test_each_secret_that_is_mounted_is_made_as_the_page_says(tmp_path: Path) -> None:
    made = secrets_of_the_page(tmp_path)
    mounted: set[str] = set()
    for workload in WORKLOADS:
        pod = pod_of(workload)
        volumes = {each["name"]: each.get("secret", {}).get("secretName") for each in pod["volumes"]}
        mounted |= {name for name in volumes.values() if name}
        replicas = workload["spec"].get("replicas", 1)
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            for mount in container["volumeMounts"]:
                secret = volumes.get(mount["name"])
                if secret is None:
                    continue
                if "subPath" in mount:
                    assert mount["subPath"] in made[secret]
                elif "subPathExpr" in mount and workload["kind"] == "StatefulSet":
                    for number in range(replicas):
                        pod_name = f"{workload['metadata']['name']}-{number}"
                        known = environment_of(container)
                        own = re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], mount["subPathExpr"])  # noqa: B023
                        assert own.replace(POD, pod_name) in made[secret]
                elif "subPathExpr" not in mount and container["name"] != "nats":
                    credentials = environment_of(container).get("TENSORHUB_CREDENTIALS", "")
                    ca = environment_of(container).get("TENSORHUB_NATS_CA", "")
                    assert {Path(credentials).name, Path(ca).name} & made[secret]
    assert mounted == {*made}


def test_a_container_is_given_no_key_but_its_own() -> None:
    """Secrets that hold the keys of all agents or runners are mounted file by file."""
    for workload in WORKLOADS:
        pod = pod_of(workload)
        of_all = {
            each["name"]
            for each in pod["volumes"]
            if each.get("secret", {}).get("secretName") in {"tensorhub-agents", "tensorhub-runners"}
        }
        mounts = [m for c in (*pod["containers"], *pod.get("initContainers", ())) for m in c["volumeMounts"]]
        assert all(mount["subPathExpr"] for mount in mounts if mount["name"] in of_all)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsUser"] == USER


def test_the_server_reads_its_configuration(tmp_path: Path) -> None:
    """With the keys and the certificate that the page makes, whose names are those of the routes and of clients."""
    secrets_of_the_page(tmp_path)
    folder = tmp_path / "credentials"
    (tmp_path / "keys").rename(folder)
    text = (FOLDER / "nats.conf").read_text()
    sample = tmp_path / "nats.conf"
    sample.write_text(text.replace("/etc/tensorhub", str(tmp_path)).replace("/var/lib", str(tmp_path)))
    command = [find_program(), "-t", "-c", str(sample)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"NATS_NODE": "nats-0"})
    assert done.returncode == 0, done.stderr
    nodes = [f"nats-{number}.nats" for number in range(3)]
    assert re.findall(r"nats-route://([a-z0-9.-]+):6222", text) == nodes
    assert COMMON["TENSORHUB_NATS"] == ",".join(f"tls://{node}:4222" for node in nodes)
    assert re.findall(r"DNS:([a-z0-9.-]+)", PAGE) == nodes


def test_nats_says_what_it_says_in_compose() -> None:
    """What an acknowledgement promises, and how nodes know each other, must not depend on where NATS runs."""

    def statements(*files: Path) -> set[str]:
        lines = [line.strip() for file in files for line in file.read_text().splitlines()]
        return {
            line for line in lines if line and not line.startswith(("#", "include", "server_name", "routes", "http"))
        }

    assert statements(FOLDER / "nats.conf") == statements(ROOT / "docker/nats.conf", ROOT / "docker/nats-cluster.conf")


def test_the_model_is_that_of_compose() -> None:
    assert json.loads((FOLDER / "model/config.json").read_text()) == json.loads(
        (ROOT / "docker/model/config.json").read_text()
    )


def test_a_runner_gets_its_notice_before_its_agent_ends() -> None:
    """The runner is the pod's own container, and the agent one beside it, which ends after all of those."""
    runner, agent = CONTAINERS["engine/runner"], CONTAINERS["engine/agent"]
    assert agent["restartPolicy"] == "Always"
    (pod,) = (pod_of(each) for each in WORKLOADS if each["metadata"]["name"] == "engine")
    assert agent in pod["initContainers"]
    notice = runner["lifecycle"]["preStop"]["exec"]["command"][-1]
    waited = re.fullmatch(r"kill -USR1 1 && sleep (\d+)", notice)
    assert waited is not None
    assert pod["terminationGracePeriodSeconds"] >= int(waited[1]) + 2 * 20


@pytest.mark.parametrize("name", HUB)
def test_a_metrics_port_is_the_one_that_is_declared(name: str) -> None:
    container = HUB[name]
    (port,) = [each["containerPort"] for each in container["ports"]]
    assert environment_of(container)["TENSORHUB_METRICS"] == f"0.0.0.0:{port}"


def test_a_drain_takes_one_at_a_time() -> None:
    budgets = {each["spec"]["selector"]["matchLabels"]["app"] for each in objects() if "Budget" in each["kind"]}
    assert budgets == {each["metadata"]["name"] for each in WORKLOADS if each["kind"] != "DaemonSet"}
    for each in WORKLOADS:
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
