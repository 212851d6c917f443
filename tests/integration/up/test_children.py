"""Child processes: started again when they die, and gone when their parent is, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.bounds import BUSY_S
from tests.kit.waiting import is_alive, wait_until

from tensorhub.local import children as children_module
from tensorhub.local.children import Child, ChildDied, Children, ChildSpec, tail

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class World:
    """A set of children in a folder, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.restarts: list[tuple[str, int, float]] = []
        self.children = Children(self._note)

    def _note(self, child: Child) -> None:
        self.restarts.append((child.spec.name, child.pid, time.monotonic()))

    async def start(self, name: str, *command: str, is_last: bool = False) -> Child:
        spec = ChildSpec(name, command, {"MARK": name}, self.folder / f"{name}.log", is_last)
        return await self.children.start(spec)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.children.stop()


async def test_a_child_sees_its_environment_and_writes_to_its_log(world: World) -> None:
    child = await world.start("one", *python("import os, sys; print(sorted(os.environ)); sys.stderr.write('err')"))
    await child.process.wait()
    text = (world.folder / "one.log").read_text()
    assert "'MARK'" in text
    assert "PATH" not in text
    assert text.endswith("err")


async def test_a_dead_child_is_started_again_after_longer_and_longer_waits(world: World) -> None:
    child = await world.start("one", *python(SLEEP))
    world.children.settle()
    pids = [child.pid]
    for number in range(3):
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda number=number: len(world.restarts) > number)  # type: ignore[misc]
        waited = world.restarts[-1][2] - killed
        assert 0.1 * 2**number <= waited < 0.1 * 2**number + BUSY_S
        assert child.pid == world.restarts[-1][1]
        pids.append(child.pid)
    assert len(set(pids)) == 4
    assert child.restarts == 3


async def test_a_child_that_ends_again_and_again_is_told_once_with_its_own_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And again only after a while, however often it ends meanwhile: the line is what `tensorhub up` prints."""
    monkeypatch.setattr(children_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(children_module, "BACKOFF_MAX_S", 0.02)
    broken = world.folder / "broken"
    code = f"import os, sys, time\nif os.path.exists({str(broken)!r}): sys.exit('noise\\nthe GPU is gone')\n{SLEEP}"
    child = await world.start("agent-0", *python(code))
    world.children.settle()
    broken.touch()
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child.restarts >= 2 * children_module.LOOP_DEATHS)
    singly = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(singly) == children_module.LOOP_DEATHS - 1
    assert singly[0].endswith("ended by SIGKILL; it is started again")
    assert singly[1].endswith("ended with exit code 1; it is started again")
    loop = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    told = "agent-0 has ended 3 times in a row, the last time with exit code 1: the GPU is gone. It is started again "
    assert loop == [f"{told}every 0.02 s; see {child.spec.log}"]
    monkeypatch.setattr(children_module, "LOOP_TOLD_S", 0.0)
    await until(lambda: sum(each.levelname == "ERROR" for each in caplog.records) > 1)


async def test_the_wait_is_short_again_once_a_child_was_up_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(children_module, "STEADY_S", 0.0)
    child = await world.start("one", *python(SLEEP))
    world.children.settle()
    for number in range(10):
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda number=number: len(world.restarts) > number, 2.0)  # type: ignore[misc]


async def test_a_child_that_dies_while_the_set_starts_is_told_with_the_end_of_its_log(world: World) -> None:
    (world.folder / "bad.log").write_text("from an earlier start\n")
    await world.start("good", *python(SLEEP))
    child = await world.start(
        "bad", *python("import sys; print('x' * 5000, flush=True); sys.exit('the port is taken')")
    )
    told = r"(?s)bad ended with exit code 1 while it was starting.*the port is taken"
    with pytest.raises(ChildDied, match=told) as death:
        await world.children.while_starting(asyncio.sleep(60))
    assert "earlier" not in str(death.value)
    assert len(str(death.value)) < 3000
    with pytest.raises(ChildDied):
        world.children.settle()
    assert child.restarts == 0


async def test_a_program_that_is_not_there_is_told(world: World) -> None:
    await world.start("none", "/no/such/program")
    with pytest.raises(ChildDied, match=r"(?s)exit code 127.*/no/such/program can't be started: .*No such file"):
        await world.children.while_starting(asyncio.sleep(60))


async def test_work_while_starting_gives_its_result_or_its_error(world: World) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    await world.start("one", *python(SLEEP))
    assert await world.children.while_starting(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ZeroDivisionError):
        await world.children.while_starting(fail())


async def test_stop_ends_a_child_that_is_just_being_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await world.start("one", *python(SLEEP))
    world.children.settle()
    spawn, spawned = world.children._spawn, asyncio.Event()
    pids: list[int] = []

    async def slowly(spec: ChildSpec) -> tuple[asyncio.subprocess.Process, int]:
        made = await spawn(spec)
        pids.append(made[0].pid)
        spawned.set()
        await asyncio.sleep(0.05)  # By then `stop` has found that the old process has ended.
        return made

    monkeypatch.setattr(world.children, "_spawn", slowly)
    child.process.kill()
    async with asyncio.timeout(BUSY_S):
        await spawned.wait()
        await world.children.stop()
    assert [is_alive(pid) for pid in pids] == [False]


async def test_stop_asks_first_and_kills_then_with_all_that_a_child_has_started(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "STOP_S", 0.5)
    started = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]); print(p.pid)"
    polite = await world.start("polite", *python(SLEEP))
    deaf = await world.start("deaf", *python(f"{started}; {DEAF}"))
    log = world.folder / "deaf.log"
    await until(lambda: "deaf" in log.read_text())
    grandchild = int(log.read_text().split()[0])
    world.children.settle()
    began = time.monotonic()
    await world.children.stop()
    assert 0.5 <= time.monotonic() - began < BUSY_S
    assert polite.process.returncode == -signal.SIGTERM
    assert deaf.process.returncode == -signal.SIGKILL
    await until(lambda: not is_alive(grandchild))
    assert world.restarts == []


async def test_what_the_others_need_ends_last(world: World) -> None:
    note = (
        "import pathlib, signal, sys, time\n"
        "def end(*_): pathlib.Path(sys.argv[1]).open('a').write(sys.argv[2]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    order = world.folder / "order"
    for name, is_last in (("nats", True), ("agent", False)):
        await world.start(name, *python(note), str(order), f"{name} ", is_last=is_last)
    await until(lambda: all("ready" in (world.folder / f"{name}.log").read_text() for name in ("nats", "agent")))
    await world.children.stop()
    assert order.read_text() == "agent nats "


async def test_a_child_that_waits_to_be_started_again_is_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "BACKOFF_FIRST_S", 600.0)
    child = await world.start("one", *python(SLEEP))
    world.children.settle()
    os.kill(child.pid, signal.SIGKILL)
    await child.process.wait()
    began = time.monotonic()
    await world.children.stop()
    assert time.monotonic() - began < BUSY_S
    assert world.restarts == []


async def test_a_log_that_has_grown_large_is_set_aside(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "LOG_BYTES_MAX", 100)
    (world.folder / "one.log").write_text("x" * 101)
    child = await world.start("one", *python("print('new')"))
    await child.process.wait()
    assert (world.folder / "one.log").read_text() == "new\n"
    assert (world.folder / "one.old.log").read_text() == "x" * 101


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
        for name in ("a", "b"):
            wait_until(lambda name=name: "deaf" in (tmp_path / f"{name}.log").read_text())  # type: ignore[misc]
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(60)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0)
