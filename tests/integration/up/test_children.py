"""Child processes: started again when they die, and gone when their parent is, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.bounds import BUSY_S
from tests.kit.waiting import is_alive, until, wait_until

from tensorhub.local import children as children_module
from tensorhub.local.children import Child, ChildDied, Children, ChildSpec, tail

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


class Scene:
    """A set of children in a folder, and when each was started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restarts: list[tuple[str, int, float]] = []
        self.children = Children(self._note)

    def _note(self, child: Child) -> None:
        self.restarts.append((child.spec.name, child.pid, time.monotonic()))

    async def start(self, name: str, *command: str, is_last: bool = False) -> Child:
        return await self.children.start(ChildSpec(name, command, {"MARK": name}, self.log(name), is_last))

    async def settled(self, code: str = SLEEP) -> Child:
        child = await self.start("one", *python(code))
        self.children.settle()
        return child

    async def until_restarted(self, times: int) -> None:
        await until(lambda: len(self.restarts) >= times)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def until_logged(self, name: str, text: str) -> str:
        await until(lambda: text in self.log(name).read_text())
        return self.log(name).read_text()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    await made.children.stop()


async def test_a_child_sees_its_environment_and_writes_to_its_log(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has grown large is set aside."""
    monkeypatch.setattr(children_module, "LOG_BYTES_MAX", 100)
    scene.log("one").write_text("x" * 101)
    child = await scene.start("one", *python("import os, sys; print(sorted(os.environ)); sys.stderr.write('err')"))
    await child.process.wait()
    text = scene.log("one").read_text()
    assert "'MARK'" in text
    assert "PATH" not in text
    assert text.endswith("err")
    assert (scene.folder / "one.old.log").read_text() == "x" * 101


async def test_a_dead_child_is_started_again_after_longer_and_longer_waits(scene: Scene) -> None:
    child = await scene.settled()
    pids = [child.pid]
    for number in range(3):
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        await scene.until_restarted(number + 1)
        waited = scene.restarts[-1][2] - killed
        assert 0.1 * 2**number <= waited < 0.1 * 2**number + BUSY_S
        assert child.pid == scene.restarts[-1][1]
        pids.append(child.pid)
    assert len(set(pids)) == 4
    assert child.restarts == 3


async def test_a_child_that_ends_again_and_again_is_reported_once_with_its_own_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And again only after a while, however often it ends meanwhile: the line is what `tensorhub up` prints."""
    monkeypatch.setattr(children_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(children_module, "BACKOFF_MAX_S", 0.02)
    broken = scene.folder / "broken"
    code = f"import os, sys, time\nif os.path.exists({str(broken)!r}): sys.exit('noise\\nthe GPU is gone')\n{SLEEP}"
    child = await scene.settled(code)
    broken.touch()
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child.restarts >= 2 * children_module.LOOP_DEATHS)
    singly, loop = (
        [each.getMessage() for each in caplog.records if each.levelname == level] for level in ("WARNING", "ERROR")
    )
    assert len(singly) == children_module.LOOP_DEATHS - 1
    for line, why in zip(singly, ("by SIGKILL", "with exit code 1"), strict=False):
        assert line.endswith(f"ended {why}; it is started again")
    line = "one has ended 3 times in a row, the last time with exit code 1: the GPU is gone. It is started again "
    assert loop == [f"{line}every 0.02 s; see {child.spec.log}"]
    monkeypatch.setattr(children_module, "LOOP_TOLD_S", 0.0)
    await until(lambda: sum(each.levelname == "ERROR" for each in caplog.records) > 1)


async def test_the_wait_is_short_again_once_a_child_was_up_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the waits went on doubling, the last one would be longer than anything is waited for here."""
    monkeypatch.setattr(children_module, "BACKOFF_MAX_S", 600.0)
    monkeypatch.setattr(children_module, "STEADY_S", 0.0)
    child = await scene.settled()
    for number in range(1, 14):
        os.kill(child.pid, signal.SIGKILL)
        await scene.until_restarted(number)


async def test_a_child_that_dies_while_the_set_starts_is_reported_with_the_end_of_its_log(scene: Scene) -> None:
    scene.log("bad").write_text("from an earlier start\n")
    await scene.start("good", *python(SLEEP))
    child = await scene.start(
        "bad", *python("import sys; print('x' * 5000, flush=True); sys.exit('the port is taken')")
    )
    line = r"(?s)bad ended with exit code 1 while it was starting.*the port is taken"
    with pytest.raises(ChildDied, match=line) as death:
        await scene.children.while_starting(asyncio.sleep(60))
    assert "earlier" not in str(death.value)
    assert len(str(death.value)) < 3000
    with pytest.raises(ChildDied):
        scene.children.settle()
    assert child.restarts == 0


async def test_a_program_that_does_not_exist_is_reported_and_else_the_work_while_starting(scene: Scene) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    await scene.start("one", *python(SLEEP))
    assert await scene.children.while_starting(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ZeroDivisionError):
        await scene.children.while_starting(fail())
    await scene.start("none", "/no/such/program")
    with pytest.raises(ChildDied, match=r"(?s)exit code 127.*/no/such/program can't be started: .*No such file"):
        await scene.children.while_starting(asyncio.sleep(60))


async def test_stop_ends_a_child_that_is_just_being_started_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await scene.settled()
    spawn, spawned = scene.children._spawn, asyncio.Event()
    pids: list[int] = []

    async def slowly(spec: ChildSpec) -> tuple[asyncio.subprocess.Process, int]:
        made = await spawn(spec)
        pids.append(made[0].pid)
        spawned.set()
        await asyncio.sleep(0.05)  # By then `stop` has found that the old process has ended.
        return made

    monkeypatch.setattr(scene.children, "_spawn", slowly)
    child.process.kill()
    async with asyncio.timeout(BUSY_S):
        await spawned.wait()
        await scene.children.stop()
    assert [is_alive(pid) for pid in pids] == [False]


async def test_stop_does_not_start_again_a_child_that_waits_for_that(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "BACKOFF_FIRST_S", 600.0)
    child = await scene.settled()
    os.kill(child.pid, signal.SIGKILL)
    await child.process.wait()
    await asyncio.wait_for(scene.children.stop(), BUSY_S)
    assert scene.restarts == []


async def test_stop_asks_first_and_kills_then_with_all_that_a_child_has_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "STOP_S", 0.5)
    started = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]); print(p.pid)"
    polite = await scene.start("polite", *python(SLEEP))
    deaf = await scene.start("deaf", *python(f"{started}; {DEAF}"))
    grandchild = int((await scene.until_logged("deaf", "deaf")).split()[0])
    scene.children.settle()
    began = time.monotonic()
    await scene.children.stop()
    assert 0.5 <= time.monotonic() - began < BUSY_S
    assert polite.process.returncode == -signal.SIGTERM
    assert deaf.process.returncode == -signal.SIGKILL
    await until(lambda: not is_alive(grandchild))
    assert scene.restarts == []


async def test_what_the_others_need_ends_last(scene: Scene) -> None:
    note = (
        "import pathlib, signal, sys\n"
        # A handler would not run until a sleep that begins just after the signal has ended.
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('ready', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "pathlib.Path(sys.argv[1]).open('a').write(sys.argv[2])\n"
    )
    order = scene.folder / "order"
    for name, is_last in (("nats", True), ("agent", False)):
        await scene.start(name, *python(note), str(order), f"{name} ", is_last=is_last)
        await scene.until_logged(name, "ready")
    await scene.children.stop()
    assert order.read_text() == "agent nats "


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "can't be read" in tail(log)
    log.write_text("")
    assert tail(log) == "(it is empty)"
    log.write_text("old" + "x" * 5000 + "end")
    assert tail(log).endswith("xend")
    assert len(tail(log)) == children_module.TAIL_BYTES
    assert tail(log, 5003) == "end"


PARENT = f"""
import asyncio, sys
from pathlib import Path
from tensorhub.local.children import Children, ChildSpec

async def main():
    children = Children()
    for name in ("a", "b"):
        spec = ChildSpec(name, (sys.executable, "-S", "-c", {DEAF!r}), {{}}, Path(sys.argv[1]) / f"{{name}}.log")
        print((await children.start(spec)).pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_children_end_however_their_parent_ends(tmp_path: Path, number: int) -> None:
    """A parent that has no chance to do anything about it, and children that don't listen to SIGTERM."""
    command = (sys.executable, "-c", PARENT, str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        wait_until(lambda: all("deaf" in (tmp_path / f"{name}.log").read_text() for name in ("a", "b")))
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(60)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
