"""The sync SDK: the same methods as its twin, from any thread, through Ctrl-C, fork and the end of the interpreter."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.bounds import WAIT_S
from tests.unit.client.fake_agent import FakeAgent
from tests.unit.client.given import Held, wait
from torch import nn

import tensorhub
from tensorhub import AsyncHub, AsyncShard, Hub, Shard
from tensorhub_common.errors import (
    AgentUnavailable,
    LayoutMismatch,
    RegistryUnavailable,
    ReplicaConflict,
    TensorHubError,
)
from tensorhub_common.protocol import worker as w

END_S = 60.0


@pytest.fixture
def hub(agent: FakeAgent) -> Iterator[Hub]:
    with tensorhub.connect(agent=agent.path) as hub:
        yield hub
        agent.hook = None


def test_readme_lines(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_AGENT", str(agent.path))
    hub = tensorhub.connect()
    hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)
    engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
    assert engine.replicate("latest") == 1
    assert torch.equal(engine.tensors["w"], torch.ones(4, 4))
    assert (hub.job, hub.agent, engine.version) == ("default", "agent-0", 1)
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


def test_a_module_trains_in_hub_memory(hub: Hub) -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shard = hub.register("policy", module, replica="trainer")
    before = shard.tensors["weight"].clone()
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(shard.tensors["weight"], before)
    shard.publish()
    reader = nn.Linear(3, 2)
    hub.register("policy", reader, replica="rollout").replicate()
    assert torch.equal(reader.weight, module.weight)


@pytest.mark.parametrize(
    "ask",
    [
        lambda hub: hub.versions("policy", timeout_s=0.2),
        lambda hub: hub.replicas("policy", timeout_s=0.2),
        lambda hub: hub.retain("policy", last=2, timeout_s=0.2),
        lambda hub: hub.pin("policy", 1, timeout_s=0.2),
        lambda hub: hub.unpin("policy", 1, timeout_s=0.2),
        lambda hub: hub.rewind("policy", to=1, timeout_s=0.2),
        lambda hub: hub.delete("policy", timeout_s=0.2),
        lambda hub: hub.delete_job(timeout_s=0.2),
    ],
)
def test_without_a_nats_a_question_and_a_ruling_end_within_their_bound(hub: Hub, ask: Callable[[Hub], object]) -> None:
    with pytest.raises(RegistryUnavailable):
        ask(hub)


def test_names_are_checked_when_the_call_is_made(agent: FakeAgent, hub: Hub) -> None:
    """Also that of a watch, which yields nothing yet; and a refused connect leaves no thread."""
    with pytest.raises(tensorhub.InvalidName):
        hub.watch("a b")
    before = threading.active_count()
    with pytest.raises(tensorhub.InvalidName):
        tensorhub.connect("a b", agent=agent.path)
    assert threading.active_count() == before


# ---------------------------------------------------------------------------------------------------------- threads


def test_threads_share_a_hub_and_one_calls_a_shard_at_a_time(agent: FakeAgent, hub: Hub) -> None:
    shards = [hub.register("policy", {"w": torch.ones(4)}, replica=f"r-{index}") for index in range(4)]
    held = Held(agent, w.PublishCall)
    outcomes: list[object] = []

    def publish(shard: Shard) -> None:
        try:
            outcomes.append(shard.publish(1))
        except TensorHubError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=publish, args=(shard,)) for shard in [*shards, shards[0]]]
    for thread in threads:
        thread.start()
    wait(lambda: len(held.frames) >= 4 and bool(outcomes))
    assert len(held.frames) == 4
    [refused] = outcomes
    assert isinstance(refused, ReplicaConflict)
    held.let_go()
    for thread in threads:
        thread.join(END_S)
    assert outcomes.count(1) >= 1
    assert len(outcomes) == 5


def test_close_ends_the_calls_of_other_threads(agent: FakeAgent) -> None:
    hub = tensorhub.connect(agent=agent.path)
    shard = hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    held = Held(agent, w.PublishCall)
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            shard.publish(1)
        except TensorHubError as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    wait(lambda: bool(held.frames))
    with pytest.raises(ReplicaConflict):
        hub.close()
    thread.join(END_S)
    assert isinstance(errors[0], AgentUnavailable)
    hub.close()
    with pytest.raises(AgentUnavailable, match="closed"):
        shard.publish(2)


def test_the_hubs_own_callback_can_not_wait_for_the_hub(hub: Hub) -> None:
    shard = hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    shard.publish()
    reader = hub.register("policy", {"w": torch.zeros(4)}, replica="rollout")
    errors: list[BaseException] = []

    def callback(done_bytes: int, total_bytes: int) -> None:
        for call in (shard.unpublish, hub.close):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    assert reader.replicate(on_progress=callback) == 1
    assert ["another thread" in str(error) for error in errors] == [True, True]
    assert reader.update() is None


@pytest.fixture
def ctrl_c_counts() -> Iterator[None]:
    """Have SIGINT raise, as in a terminal: whoever is started in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_ends_a_waiting_call_and_the_hub_goes_on(agent: FakeAgent, hub: Hub) -> None:
    shard = hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
    held = Held(agent, w.PublishCall)

    def interrupt() -> None:
        wait(lambda: bool(held.frames))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shard.publish(1)
    thread.join(END_S)
    held.let_go()
    assert shard.publish(1) == 1


# -------------------------------------------------------------------------------------------------------- processes


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_connect_again_and_hides_nothing(agent: FakeAgent) -> None:
    """The child's copy of the socket must not make the agent believe that the parent still lives."""
    hub = tensorhub.connect(agent=agent.path)
    shard = hub.register("policy", {"w": torch.ones(4)}, replica="trainer")
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
    wait(lambda: all(each.owner is None for each in agent.shards.values()))
    assert [each.owner for each in agent.shards.values()] == [None]
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


@pytest.mark.parametrize(
    "ending",
    [
        "",
        """
threading.Thread(target=lambda: shard.update(wait_s=600), daemon=True).start()
threading.Thread(target=lambda: list(hub.watch('policy')), daemon=True).start()
import atexit; atexit.register(lambda: print('tensors', shard.tensors['w'].sum().item()))
""",
    ],
)
@pytest.mark.long
def test_the_end_of_the_interpreter_never_hangs_and_leaves_the_shard(agent: FakeAgent, ending: str) -> None:
    agent.hook = lambda worker, frame: isinstance(frame, w.ReadCall)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending, str(agent.path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("1\n")
    assert [shard.version for shard in agent.shards.values()] == [1]


def test_importing_brings_in_no_torch() -> None:
    code = "import sys, tensorhub, tensorhub.cli.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_register_without_torch_says_what_to_install(agent: FakeAgent) -> None:
    code = """
import sys
sys.modules["torch"] = None
import tensorhub
try:
    tensorhub.connect(agent=sys.argv[1]).register("policy", {}, replica="trainer")
except tensorhub.TensorHubError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(agent.path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "tensorhub[torch]" in run.stdout


def test_register_takes_a_mapping_of_names(hub: Hub) -> None:
    names = tensorhub.mapping.Mapping(
        "mine", (tensorhub.mapping.Rule("qk", tensorhub.mapping.concat(*map(tensorhub.mapping.tensor, "q"))),)
    )
    shard = hub.register("policy", {"qk": torch.ones(2)}, replica="engine", mapping=names)
    assert [part.name for part in shard.layout.tensors[0].parts] == ["q"]
    with pytest.raises(LayoutMismatch, match=r"'k' .* mine has no rule for it"):
        hub.register("policy", {"k": torch.ones(2)}, replica="other", mapping=names)
    with pytest.raises(TypeError, match="mapping is a"):
        hub.register("policy", {"k": torch.ones(2)}, replica="other", mapping="llama")  # type: ignore[arg-type]
