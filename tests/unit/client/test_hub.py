"""The hub of programs: the same methods as its async twin, from any thread, through Ctrl-C, fork, del and the end."""

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.waiting import wait_until
from tests.unit.client.conftest import python
from tests.unit.client.fake_agent import FakeAgent

import tensorhub
from tensorhub import AsyncHub, AsyncShard, Hub, Shard, errors
from tensorhub_common.errors import (
    AgentUnavailable,
    RegistryUnavailable,
    ReplicaConflict,
    TensorHubError,
)
from tensorhub_common.protocol import worker as w
from tensorhub_common.runtime import extras


@pytest.fixture
def hub(agent: FakeAgent) -> Iterator[Hub]:
    with tensorhub.connect(agent=agent.path) as hub:
        yield hub
        agent.hooks.clear()


def trainer(hub: Hub, replica: str = "trainer") -> Shard:
    return hub.register("policy", {"w": torch.ones(4)}, replica=replica)


def test_readme_lines(agent: FakeAgent) -> None:
    hub = tensorhub.connect()
    shard = trainer(hub)
    shard.publish(version=1)
    engine = hub.register("policy", {"w": torch.zeros(4)}, replica="rollout-0")
    assert engine.replicate("latest") == 1
    assert torch.equal(engine.tensors["w"], torch.ones(4))
    assert (hub.job, hub.agent, engine.version) == ("default", "agent-0", 1)
    with shard.overwriting(publish=True) as tensors:
        tensors["w"].fill_(3)
    assert shard.version == 2
    with pytest.raises(StopIteration), shard.overwriting(publish=True):
        raise StopIteration
    assert shard.publish() == 3, "the block that failed published nothing"
    names = tensorhub.mapping.Mapping("mine", (tensorhub.mapping.Rule("w", tensorhub.mapping.tensor("v")),))
    blank = hub.register("other", {"w": tensorhub.TensorSpec((4,), "float32")}, replica="trainer", mapping=names)
    blank.mark_loaded()
    assert (blank.publish(), [part.name for part in blank.layout.tensors[0].parts]) == (1, ["v"])
    hub.close()


@pytest.mark.parametrize(("sync", "twin"), [(Hub, AsyncHub), (Shard, AsyncShard)])
def test_each_method_has_its_twin(sync: type, twin: type) -> None:
    def public(kind: type) -> dict[str, list[inspect.Parameter]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: [each.replace(annotation=None) for each in inspect.signature(method).parameters.values()]
            for name, method in found
            if not name.startswith("_")
        }

    def properties(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, lambda value: isinstance(value, property))}

    assert public(sync) == public(twin)
    in_init = {"tensors", "layout"} if twin is AsyncShard else set()
    assert properties(sync) - in_init == properties(twin)


QUESTIONS: dict[str, dict[str, Any]] = {
    "versions": {"model": "policy"},
    "replicas": {"model": "policy"},
    "retain": {"model": "policy", "last": 2},
    "pin": {"model": "policy", "version": 1},
    "unpin": {"model": "policy", "version": 1},
    "rewind": {"model": "policy", "to": 1},
    "delete": {"model": "policy"},
    "delete_job": {},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_without_a_nats_a_question_and_a_ruling_end_within_their_bound(hub: Hub, name: str) -> None:
    with pytest.raises(RegistryUnavailable):
        getattr(hub, name)(**QUESTIONS[name], timeout_s=0.2)


def test_names_are_checked_when_the_call_is_made(agent: FakeAgent, hub: Hub) -> None:
    """Also that of a watch, which yields nothing yet; and a refused connect leaves no thread."""
    with pytest.raises(tensorhub.InvalidName):
        hub.watch("a b")
    before = threading.active_count()
    with pytest.raises(tensorhub.InvalidName):
        tensorhub.connect("a b", agent=agent.path)
    assert threading.active_count() == before


# ---------------------------------------------------------------------------------------------------------- threads


def begun(outcomes: list[object], call: Callable[[], object]) -> threading.Thread:
    """Call it in a thread; what it returns or raises is an outcome."""

    def run() -> None:
        try:
            outcomes.append(call())
        except TensorHubError as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_threads_share_a_hub_and_one_calls_a_shard_at_a_time(agent: FakeAgent, hub: Hub) -> None:
    shards = [trainer(hub, f"r-{index}") for index in range(4)]
    held = agent.hold(w.PublishCall)
    outcomes: list[object] = []
    threads = [begun(outcomes, lambda shard=shard: shard.publish()) for shard in [*shards, shards[0]]]  # type: ignore[misc]
    wait_until(lambda: len(held.frames) >= 4 and outcomes)
    assert len(held.frames) == 4
    [refused] = outcomes
    assert isinstance(refused, ReplicaConflict)
    held.let_go()
    for thread in threads:
        thread.join(WAIT_S)
    assert {each for each in outcomes if each is not refused} == {1, 2, 3, 4}


def test_close_ends_the_calls_of_other_threads(agent: FakeAgent) -> None:
    hub = tensorhub.connect(agent=agent.path)
    shard = trainer(hub)
    held = agent.hold(w.PublishCall)
    outcomes: list[object] = []
    thread = begun(outcomes, lambda: shard.publish(1))
    wait_until(lambda: held.frames)
    with pytest.raises(ReplicaConflict):
        hub.close()
    thread.join(WAIT_S)
    assert isinstance(outcomes[0], AgentUnavailable)
    hub.close()
    with pytest.raises(AgentUnavailable, match="closed"):
        shard.publish(2)


def test_the_hubs_own_callback_can_not_wait_for_the_hub(hub: Hub) -> None:
    shard = trainer(hub)
    shard.publish()
    reader = trainer(hub, "rollout")
    told: list[str] = []

    def callback(done_bytes: int, total_bytes: int) -> None:
        for call in (shard.unpublish, hub.close):
            with pytest.raises(RuntimeError, match="another thread") as error:
                call()
            told.append(str(error.value))

    assert reader.replicate(on_progress=callback) == 1
    assert len(told) == 2
    assert reader.update() is None


def test_ctrl_c_ends_a_waiting_call_and_the_hub_goes_on(agent: FakeAgent, hub: Hub) -> None:
    shard = trainer(hub)
    held = agent.hold(w.PublishCall)

    def interrupt() -> None:
        wait_until(lambda: held.frames)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shard.publish(1)
    thread.join(WAIT_S)
    held.let_go()
    assert shard.publish(1) == 1


# ---------------------------------------------------------------------------------------------------------- dropped


def threads_of_ours() -> int:
    """Those of the SDK; the fake agent has some of its own."""
    return sum(each.name == "tensorhub" or each.name.startswith("asyncio") for each in threading.enumerate())


def test_hubs_that_are_dropped_without_close_keep_nothing_and_leave_their_shards(agent: FakeAgent) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.hub = tensorhub.connect(agent=agent.path)
            self.shard = trainer(self.hub)
            self.myself = self

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    threads_before, descriptors_before = threads_of_ours(), descriptors()
    for _ in range(20):
        tensorhub.connect(agent=agent.path)
    asyncio.run(tensorhub.connect_async(agent=agent.path))
    gc.collect()
    wait_until(lambda: threads_of_ours() <= threads_before and not agent._workers)
    wait_until(lambda: descriptors() <= descriptors_before)
    assert agent.attached == 21
    Trainer()
    gc.collect()
    wait_until(lambda: threads_of_ours() <= threads_before and not agent._workers)
    shard = trainer(tensorhub.connect(agent=agent.path))
    gc.collect()
    assert shard.publish() == 1
    tensors = shard.tensors
    del shard
    gc.collect()
    wait_until(lambda: not agent._workers)
    assert tensors["w"].tolist() == [1, 1, 1, 1]
    assert agent.shards["policy", "trainer", 0].version == 1
    assert not agent.calls(w.ReleaseCall)
    with tensorhub.connect(agent=agent.path) as hub:
        assert trainer(hub).version == 1


async def test_a_hub_of_an_event_loop(agent: FakeAgent) -> None:
    hub = await tensorhub.connect_async(agent=agent.path)
    await hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    del hub
    gc.collect()
    await asyncio.to_thread(wait_until, lambda: not agent._workers)
    assert not agent.calls(w.ReleaseCall)
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1"):
        await tensorhub.connect_async(agent=agent.path, nats="nats://127.0.0.1:1", timeout_s=1)
    await asyncio.to_thread(wait_until, lambda: not agent._workers)


# -------------------------------------------------------------------------------------------------------- processes


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_connect_again_and_hides_nothing(agent: FakeAgent) -> None:
    """The child's copy of the socket must not make the agent believe that the parent still lives."""
    hub = tensorhub.connect(agent=agent.path)
    shard = trainer(hub)
    ready, told = os.pipe()
    go_on, go = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (shard.publish, hub.close, lambda: hub.versions("policy")):
                try:
                    call()
                except AgentUnavailable as error:
                    code = 0 if "forked" in str(error) and "connect() again" in str(error) else 2
            with hub:
                pass
            os.write(told, b"x")
            os.read(go_on, 1)
        finally:
            os._exit(code)
    assert os.read(ready, 1) == b"x"
    hub.close(release=False)
    wait_until(lambda: [each.owner for each in agent.shards.values()] == [None])
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (ready, told, go_on, go):
        os.close(fd)


PROGRAM = """
import sys, threading
import torch, tensorhub
hub = tensorhub.connect(agent=sys.argv[1])
shard = hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
print(shard.publish(1), flush=True)
"""
BUSY = """
threading.Thread(target=lambda: shard.update(wait_s=600), daemon=True).start()
threading.Thread(target=lambda: list(hub.watch('policy')), daemon=True).start()
import atexit; atexit.register(lambda: print('tensors', shard.tensors['w'].sum().item()))
"""


@pytest.mark.parametrize("ending", ["", BUSY])
@pytest.mark.long
def test_the_end_of_the_interpreter_never_hangs_and_leaves_the_shard(agent: FakeAgent, ending: str) -> None:
    agent.hold(w.ReadCall)
    run = python(PROGRAM + ending, agent.path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("1\n")
    assert [shard.version for shard in agent.shards.values()] == [1]


# ------------------------------------------------------------------------------------------------------ the package

HEAVY = (
    *("torch", "numpy", "nats", "nkeys", "structlog", "rich", "typer", "uvloop", "prometheus_client", "yaml", "xxhash"),
    *("opentelemetry", "opentelemetry.sdk", "tensorhub_common.telemetry", "tensorhub_common.catalog"),
)


def imported_by(code: str) -> set[str]:
    """Return the modules that a program has imported at its end."""
    return set(python(f"{code}\nimport sys; print(*sys.modules)").stdout.split())


@pytest.mark.long
def test_importing_brings_in_none_of_what_programs_need() -> None:
    assert {name for name in imported_by("import tensorhub") if name.startswith("tensorhub")} == {"tensorhub"}
    names = "connect, connect_async, AsyncHub, TensorSpec, mapping, RoundTimeout"
    assert not imported_by(f"from tensorhub import {names}") & set(HEAVY)
    assert not imported_by("import tensorhub, tensorhub.cli.main") & {"torch", "numpy"}


def test_a_program_without_its_extra_says_which_one_it_is(agent: FakeAgent) -> None:
    needs = "x needs a, b and c, not installed here: pip install 'tensorhub[server]'"
    assert extras.missing("x", ["a", "b", "c"], "server") == needs
    run = python("import sys; sys.modules['uvloop'] = None; from tensorhub_planner.__main__ import main; main()")
    told = "tensorhub-planner needs uvloop, not installed here: pip install 'tensorhub[server]'\n"
    assert (run.returncode, run.stderr) == (1, told)
    register = "tensorhub.connect(agent=sys.argv[1]).register('policy', {}, replica='trainer')"
    run = python(f"import sys; sys.modules['torch'] = None; import tensorhub; {register}", agent.path)
    assert "tensorhub[torch]" in run.stderr.splitlines()[-1]


def test_every_public_name_is_there_as_type_checkers_see_it_and_an_unknown_one_is_an_error() -> None:
    """`tensorhub/__init__.py` names each thing twice: for type checkers, and with the module that it comes from."""
    for name in tensorhub.__all__:
        assert getattr(tensorhub, name) is getattr(tensorhub, name)
        assert name in dir(tensorhub)
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        getattr(tensorhub, "conect")  # noqa: B009 (a misspelt name, which type checkers refuse)
    listed = set(tensorhub._MODULES) | set(errors.__all__) | {"mapping", "__version__"}
    assert set(tensorhub.__all__) == listed
    assert tensorhub.__file__ is not None
    block = Path(tensorhub.__file__).read_text().partition("if TYPE_CHECKING:")[2].partition("_MODULES")[0]
    seen = {line.split()[-1] for line in block.splitlines() if " as " in line}
    assert seen | set(errors.__all__) | {"__version__"} == listed
    for name in errors.__all__:
        kind = getattr(tensorhub, name)
        assert (kind.__module__, issubclass(kind, tensorhub.TensorHubError)) == ("tensorhub", True)
        assert issubclass(kind, TimeoutError) == (name in ("DrainTimeout", "RoundTimeout"))
