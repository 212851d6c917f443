"""The rules of CONTRIBUTING.md that no tool checks, and which tests begin first."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest
from tests import longest_first
from tools.docs import links

from tensorhub_common.config.settings import Settings

ROOT: Final = Path(__file__).parents[1]
INSTALLED: Final = ("libs", "services", "simulator")


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_what_reading_foreign_bytes_raises_has_one_name() -> None:
    """Who names msgspec's own error alone forgets that texts may be no UTF-8, and lists too deep."""
    where = [name_of(path) for path in python_files(*INSTALLED) if "MsgspecError" in path.read_text()]
    assert where == ["libs/common/tensorhub_common/protocol/decoding.py"]


SUPERVISED: Final = ("libs", "services")
"""Folders whose background work runs under a `Supervisor`."""

UNSUPERVISED: Final = re.compile(
    r"(?<!tasks\.)(?<!group\.)\bcreate_task\(|\bensure_future\(|\bcall_(?:later|at|soon|soon_threadsafe)\(|"
    r"(?<!class )\b(?:Thread|Timer)\(|\badd_(?:done_callback|reader|writer)\(|\brun_in_executor\("
)
"""What begins something whose error nobody owns. A task group (`group`, `tasks`) owns those of its tasks; what a signal
calls only begins a process's end."""

SUPERVISED_FORMS: Final = re.compile(
    r"\b_?(?:work|owner)\.(?:call_later|call_at|call_soon)\(|"
    r"\b(?:add_(?:done_callback|reader)|call_soon_threadsafe)\([^#]*work\.guarded\(.*|"
    # These raise nothing, whatever comes.
    r"\badd_done_callback\((?:[\w.]+\.discard|lambda _: [\w.]+\.pop\(\w+, None\))\)|"
    r"\bcall_soon_threadsafe\(self\._work\.fault,"
)

UNSUPERVISED_BUT: Final = {
    "libs/common/tensorhub_common/runtime/supervision.py": "it is what supervises",
    "libs/common/tensorhub_common/telemetry/span_store.py": "a thread of the process; it catches all that it does",
    "libs/common/tensorhub_common/telemetry/process.py": "threads of the process's last moments",
    "libs/client/tensorhub/sync/loop_thread.py": "the thread in which the SDK's event loop itself runs",
    "libs/client/tensorhub/aio/hub.py": "tasks that are awaited where they are made",
    "libs/client/tensorhub/aio/rollouts.py": "a question and an event, both awaited where they are made",
    "libs/client/tensorhub/aio/lifetime.py": "the end of a dropped hub, which has no owner left",
    "libs/client/tensorhub/_tensors/segment_mapping.py": "a timer for the kernel's unmap, begun by a finalizer",
    "libs/client/tensorhub/_tensors/device_memory.py": "a thread for the driver's unmap, begun by a finalizer",
    "libs/client/tensorhub/_agent/call_spans.py": "a thread of the process's last moments",
    "services/agent/tensorhub_agent/compute/pool.py": "a thread tells the loop that a future is over",
    "services/agent/tensorhub_agent/compute/batch.py": "a thread tells the loop that a future is over",
    "services/agent/tensorhub_agent/app/service.py": "the timer that ends a process whose orderly end hangs",
    "services/agent/tensorhub_agent/runtime/shield.py": "a task that is awaited by all who begin it, cancelled or not",
    "services/agent/tensorhub_agent/transports/ucxx/engine.py": "what UCX's thread tells the loop is caught there",
    "services/agent/tensorhub_agent/jobs/worker_server.py": "the end of a worker closes its connection, no more",
    "services/agent/tensorhub_agent/transports/ucxx/gather_client.py": "tasks that are awaited there",
    "services/runner/tensorhub_runner/app/engine_thread.py": "calls of the engine that are awaited there",
    "services/runner/tensorhub_runner/servers/vllm_in_process.py": "a blocking call that is awaited there",
    "libs/client/tensorhub/integrations/vllm/__init__.py": "a thread that ends vLLM's own process",
}
"""Files that may, and why."""


def test_background_work_has_a_supervisor() -> None:
    """Else an error in it is asyncio's "exception was never retrieved", and what it did stays undone without a word."""
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in python_files(*SUPERVISED)
        if name_of(path) not in UNSUPERVISED_BUT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNSUPERVISED.search(SUPERVISED_FORMS.sub("", line)) and not line.lstrip().startswith("#")
    ]
    assert found == [], "run it under a Supervisor (tensorhub_common/runtime/supervision.py)"
    assert all((ROOT / name).is_file() for name in UNSUPERVISED_BUT)


@pytest.mark.parametrize(
    "line",
    [
        "loop.call_soon_threadsafe(self.core.tick, now)",
        "future.add_done_callback(lambda _: self.core.on_outcome(news))",
        "loop.add_reader(fd, self.core.tick)",
        "await loop.run_in_executor(None, work)",
        "Thread(target=work).start()",
        "threading.Timer(1.0, work).start()",
        "asyncio.create_task(work())",
    ],
)
def test_what_nobody_owns_is_found(line: str) -> None:
    assert UNSUPERVISED.search(SUPERVISED_FORMS.sub("", line))


@pytest.mark.parametrize(
    "line",
    [
        "task.add_done_callback(self._busy.discard)",
        'loop.call_soon_threadsafe(self._link.work.guarded(self._tell, "telling"), 1)',
        "making.add_done_callback(lambda _: self._making.pop(key, None))",
        'loop.add_reader(fd, self._work.guarded(self._seen, "the end of a process"))',
        'self._work.call_later(1.0, self._tick, what="a tick")',
        "group.create_task(work())",
    ],
)
def test_what_a_supervisor_owns_is_not(line: str) -> None:
    assert not UNSUPERVISED.search(SUPERVISED_FORMS.sub("", line))


def test_nats_py_is_pinned_to_the_version_whose_insides_are_overridden() -> None:
    """`bus/client.py` replaces its reading loop, its flushing and its transport, which no release promises to keep."""
    pinned = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"nats-py' in line]
    tested = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("nats-py")]
    assert [re.sub(r"[\s\",]|\[nkeys\]", "", line) for line in pinned] == tested
    assert version("nats-py") == tested[0].partition("==")[2]


def test_the_files_that_begin_first_are_there() -> None:
    assert [file for file in longest_first.FILES if not (ROOT / file).is_file()] == []
    assert len(set(longest_first.FILES)) == len(longest_first.FILES)


HISTORY: Final = {"plans", "adr", "CHANGELOG.md"}
"""Pages that say how something was: a name in them may be an earlier one."""

PAGES: Final = [page for page in links.pages() if HISTORY.isdisjoint(page.relative_to(ROOT).parts)]
NAMED: Final = re.compile(r"`([\w./]*\w\.py)`")
"""A file in backticks: a whole path, or the end of one."""


def test_the_files_that_pages_name_exist() -> None:
    """A page that names a file which was moved sends its reader nowhere."""
    files = [f"/{name_of(path)}" for path in python_files(*INSTALLED, "benchmarks", "examples", "tests", "tools")]
    missing = [
        f"{name_of(page)}: {named}"
        for page in PAGES
        for named in NAMED.findall(page.read_text())
        if not any(file.endswith(f"/{named}") for file in files)
    ]
    assert missing == []


PAGE_NAME: Final = re.compile(r"\bdocs/[\w/.-]+\.(?:md|json|svg)\b(?!\.new)")
NO_PAGES: Final = {"tests/unit/tools/test_links.py"}
"""Files that make pages up."""


def test_the_pages_that_code_names_exist() -> None:
    """An error or a docstring that names a page which was moved sends its reader nowhere."""
    named = [
        *python_files(*INSTALLED, "benchmarks", "examples", "tests", "tools"),
        *(path for folder in ("docker", "systemd") for path in sorted((ROOT / folder).rglob("*")) if path.is_file()),
        *(ROOT / name for name in ("Makefile", "pyproject.toml", "mkdocs.yml", "docker-compose.yml", "CHANGELOG.md")),
    ]
    missing = [
        f"{name_of(path)}: {page}"
        for path in named
        if name_of(path) not in NO_PAGES
        for page in PAGE_NAME.findall(path.read_text())
        if not (ROOT / page).is_file()
    ]
    assert missing == []


CHANGES: Final = (ROOT / "CONTRIBUTING.md").read_text().partition("## The commonest changes")[2].partition("\n## ")[0]


def test_the_files_of_the_commonest_changes_exist() -> None:
    """Each whole path in the table, of a file or of a folder."""
    rows = [line for line in CHANGES.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        paths = [path for path in re.findall(r"`([^`]+)`", row) if "/" in path and not path.startswith("app/")]
        assert paths, row
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_setting_is_read_by_a_program() -> None:
    """One that is described, parsed and passed on to none does nothing, and no error says so."""
    code = "\n".join(path.read_text() for path in python_files("libs", "services"))
    assert [each.name for each in fields(Settings) if not re.search(rf"\.{each.name}\b", code)] == []


PACKAGES: Final = (
    "libs/client/tensorhub",
    "libs/common/tensorhub_common",
    "services/agent/tensorhub_agent",
    "services/gateway/tensorhub_gateway",
    "services/planner/tensorhub_planner",
    "services/registry/tensorhub_registry",
    "services/rollout/tensorhub_rollout",
    "services/runner/tensorhub_runner",
    "simulator/tensorhub_simulator",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_names_every_package(package: str) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    _, found, section = page.partition(f"`{package}/`")
    assert found
    named = set(re.findall(r"`(\w+)`", section.partition("\n\n**")[0]))
    there = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert there - named == set()


SEAM: Final = re.compile(r"`(\w+)`")


def seams_of(package: Path, root: Path) -> set[str]:
    """Return the modules that a package's docstring names as its seams; `root`: where names of modules begin."""
    _, _, named = (package / "__init__.py").read_text().partition("Seams: ")
    dotted = ".".join(package.relative_to(root.parent).parts)
    return {f"{dotted}.{module}" for module in SEAM.findall(named)}


SEAMED: Final = {
    **{
        f"services/{each}/tensorhub_{each}": f"tests/unit/{each}"
        for each in ("gateway", "planner", "registry", "rollout", "runner")
    },
    "simulator/tensorhub_simulator/rollout_performance": "tests/unit/simulator/rollout_performance",
}
"""Packages all of whose own packages name their seams, with their tests."""


@pytest.mark.parametrize("package", SEAMED)
def test_unit_tests_of_a_package_import_its_seams_alone(package: str) -> None:
    """So that a module inside a package is renamed without a change of tests."""
    folder = ROOT / package
    root = next(each for each in (folder, *folder.parents) if not (each.parent / "__init__.py").exists())
    dotted = ".".join(folder.relative_to(root.parent).parts)
    seams = set().union(*(seams_of(each.parent, root) for each in folder.rglob("__init__.py")))
    found = set()
    for path in python_files(SEAMED[package]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{dotted}."):
                module = str(node.module)
                is_package = (root.parent / module.replace(".", "/")).is_dir()
                modules = {f"{module}.{each.name}" for each in node.names} if is_package else {module}
                found |= {(name_of(path), each) for each in modules - seams}
    assert not found
    assert len(seams) > len([*folder.glob("*/__init__.py")])
