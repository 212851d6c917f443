"""The commands against a real hub: what they do, and each where something is missing, silent, full or broken off."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tests.kit.hubs import COMMAND, RunningHub, new_job
from tests.kit.processes import PROGRAM_S, Ended, Run, forked
from tests.kit.tensors import assert_same_bytes
from tests.kit.waiting import until, until_answer

from tensorhub import TensorSpec, mapping
from tensorhub_common.bus.address import CONNECT_TIMEOUT_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LATE_S: Final = 8.0
"""How much later than its bound a command may end on a machine that is busy with other things."""

OF_HUB: Final = (
    ["status"],
    ["versions", "policy"],
    ["watch", "policy"],
    ["trace"],
    ["retain", "policy", "--last", "1"],
    ["pin", "policy", "1"],
    ["unpin", "policy", "1"],
    ["rewind", "policy", "--to", "1"],
    ["quota", "1GiB"],
    ["drain", "agent-0"],
    ["delete", "policy"],
    ["delete", "--job", "job", "--yes"],
    ["upgrade"],
    ["publish", "policy", "in.safetensors"],
    ["pull", "policy", "out.safetensors"],
)

WITHOUT_TIMEOUT: Final = (["watch", "policy"], ["watch", "policy", "--new"], ["trace"], ["trace", "deadbeef"])
WITH_TIMEOUT: Final = tuple(each for each in OF_HUB if each[0] not in ("watch", "trace"))
BY_AGENT: Final = ("publish", "pull")


def begun(folder: Path, arguments: Sequence[str], environment: dict[str, str], stdout: int | None = None) -> Run:
    return Run(forked(f"import os; os.chdir({str(folder)!r})\n{COMMAND}", arguments, environment), stdout)


def one_line(ended: Ended, code: int) -> str:
    """Check that a command ended with one line on stderr alone, and return it."""
    assert (ended[0], ended[1]) == (code, ""), ended
    assert ended[2].count("\n") == 1, ended
    assert ended[2].startswith("tensorhub: ")
    assert "fault of TensorHub" not in ended[2]
    return ended[2]


def plain(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    return own | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(8.0)}, tmp_path / "in.safetensors")
    for number, content in enumerate(WRONG):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    return tmp_path


@dataclass(frozen=True)
class SilentHub:
    """A NATS and an agent that listen and never answer, as one that was stopped, and an environment that names them."""

    nats: socket.socket
    agent: socket.socket
    environment: dict[str, str]

    def reached_by(self, arguments: Sequence[str]) -> socket.socket:
        return (self.agent if arguments[0] in BY_AGENT else self.nats).accept()[0]


@pytest.fixture
def silent(folder: Path) -> Iterator[SilentHub]:
    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(path))
        unix.listen()
        for each in (unix, tcp):
            each.settimeout(PROGRAM_S)
        address = f"nats://127.0.0.1:{tcp.getsockname()[1]}"
        yield SilentHub(tcp, unix, plain(TENSORHUB_NATS=address, TENSORHUB_AGENT=str(path)))


@pytest.mark.parametrize("arguments", OF_HUB, ids=" ".join)
async def test_without_a_hub_each_says_how_to_start_one(folder: Path, arguments: list[str]) -> None:
    ended = begun(folder, arguments, plain(TENSORHUB_DIR=str(folder / "none"))).ended()
    assert "tensorhub up" in one_line(ended, 1)
    assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize("arguments", WITH_TIMEOUT, ids=" ".join)
async def test_a_hub_that_is_silent_is_reported_within_the_bound(
    folder: Path, silent: SilentHub, arguments: list[str]
) -> None:
    """Of seconds that a command is late, those that a busy machine takes from it don't count."""
    run = begun(folder, [*arguments, "--timeout", "0.5"], silent.environment)
    complaint = one_line(run.ended(), 1)
    assert ("no agent answers" if arguments[0] in BY_AGENT else "NATS at") in complaint
    assert run.seconds < 0.5 + LATE_S


@pytest.mark.long
async def test_what_takes_no_bound_has_one_of_its_own_where_nats_is_silent(folder: Path, silent: SilentHub) -> None:
    """All at once: each waits for nothing but the end of its bound."""
    runs = [begun(folder, arguments, silent.environment) for arguments in WITHOUT_TIMEOUT]
    for run in runs:
        assert "does not answer" in one_line(await asyncio.to_thread(run.ended), 1)
        assert run.seconds < CONNECT_TIMEOUT_S + LATE_S


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        *((each, signal.SIGINT) for each in OF_HUB),
        *((each, number) for each in (OF_HUB[0], OF_HUB[-1]) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else each.name,
)
async def test_a_signal_in_the_middle_is_one_line_and_its_code(
    folder: Path, silent: SilentHub, arguments: list[str], number: signal.Signals
) -> None:
    run = begun(folder, arguments, silent.environment)
    with await asyncio.to_thread(silent.reached_by, arguments):
        os.kill(run.pid, number)
        assert one_line(run.ended(), 128 + number) == "tensorhub: interrupted\n"
    assert not (folder / "out.safetensors").exists()


WRONG: Final = (b"", b"no weights", (2**40).to_bytes(8, "little") + b"{", b"\x02" + bytes(7) + b"{}x" * 9)
"""What is no safetensors file."""

MISSING: Final = (
    (["versions", "nomodel"], 1, "there is no model 'nomodel' in job"),
    (["pull", "nomodel", "out.safetensors"], 1, "no version that anybody holds"),
    (["pull", "policy", "out.safetensors", "--version", "77"], 1, "no version 77 that anybody holds"),
    (["pull", "policy", "/proc/out.safetensors"], 1, "can't be written"),
    (["publish", "policy", "in.safetensors", "--agent", "agent-77"], 1, "there is no agent 'agent-77'"),
    (["publish", "policy", "in.safetensors", "--version", "0", "--replica", "other"], 1, "not newer than"),
    *(
        ([*["publish", "policy", "--version", "6"], f"{n}.safetensors"], 1, f"{n}.safetensors")
        for n in range(len(WRONG))
    ),
    (["pin", "policy", "77"], 1, "available now: [1]"),
    (["unpin", "nomodel", "1"], 1, "nomodel"),
    (["retain", "policy", "--last", "1", "--timeout", "0"], 1, "not done within 0 s"),
    (["rewind", "nomodel", "--to", "1"], 1, "nomodel"),
    (["rewind", "policy", "--to", "9"], 1, "the last published one is 1"),
    (["quota", "-1"], 2, "-1"),
    (["drain", "agent-77"], 1, "has not joined"),
    (["delete", "nomodel"], 1, "nomodel"),
    (["delete", "--job", "nojob", "--yes"], 1, "there is no job 'nojob'"),
    (["delete", "--job", "{job}"], 2, "1 shards on 1 live agents: say --yes"),
    (["delete"], 2, "--job"),
    (["delete", "policy", "--job", "{job}", "--forget"], 2, "leave MODEL out"),
    (["delete", "--job", "{job}", "--forget"], 1, "is not deleted"),
    (["trace", "deadbeef"], 1, "there is no transfer 'deadbeef'"),
    (["watch", "policy", "--job", "nojob"], 1, "there is no job 'nojob'"),
)


@dataclass(frozen=True)
class Published:
    job: str
    environment: dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def published(hub_on_one_host: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> Published:
    job, folder = new_job(), tmp_path_factory.mktemp("published")
    made = Published(job, hub_on_one_host.environment(TENSORHUB_JOB=job))
    save_file({"w": torch.arange(8.0)}, folder / "in.safetensors")
    code, _, err = begun(folder, ["publish", "policy", "in.safetensors", "--version", "1"], made.environment).ended()
    assert (code, err) == (0, "")
    return made


@pytest.mark.parametrize(
    ("arguments", "code", "words"), MISSING, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
async def test_what_is_not_there_is_one_line(
    folder: Path, published: Published, arguments: list[str], code: int, words: str
) -> None:
    ended = begun(folder, [each.replace("{job}", published.job) for each in arguments], published.environment).ended()
    assert words in (one_line(ended, code) if arguments[0] != "quota" else ended[2])


PRINTING: Final = (
    ["--help"],
    ["status"],
    ["status", "--json"],
    ["versions", "policy"],
    ["watch", "policy"],
    ["trace"],
    ["doctor", "--quick"],
    ["retain", "policy", "--last", "1"],
    ["credentials", "keys"],
)


@pytest.mark.long
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
async def test_what_can_not_be_written_is_one_line_and_a_closed_pipe_is_no_error(
    folder: Path, published: Published, arguments: list[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    ended = begun(folder, arguments, published.environment, full).ended()
    os.close(full)
    assert one_line(ended, 1) == "tensorhub: what it says can't be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    ended = begun(folder, arguments, published.environment, writer).ended()
    os.close(writer)
    assert ended == (0, "", "")


@pytest.mark.long
async def test_status_and_doctor_name_a_process_that_is_stopped(
    hub: RunningHub, folder: Path, published: Published
) -> None:
    """And no longer once it is awake."""
    for process in ("planner-0", "agent-1"):
        pid = hub.pid(process)
        with hub.stopped(process):
            asked = (["status"], ["status", "--json"], ["doctor", "--quick", "--json"])
            runs = [begun(folder, each, published.environment) for each in asked]
            text, status, doctor = [run.ended() for run in runs]
        assert (text[0], text[2]) == (0, "")
        assert f"! {process} does not answer: process {pid} is stopped" in text[1]
        found = json.loads(status[1])
        assert [each["process"] for each in found["processes"] if not each["answers"]] == [process]
        assert (doctor[0], doctor[2]) == (1, "")
        wrong = [json.loads(each) for each in doctor[1].splitlines()]
        stopped = next(each for each in wrong if each["check"] == "processes")
        assert stopped["found"] == f"{process} (process {pid}) is stopped"
        assert f"kill -CONT {pid}" in stopped["advice"]
        assert any(each["found"] == f"{process} does not answer" for each in wrong)
    await until(lambda: "does not answer" not in begun(folder, ["status"], published.environment).ended()[1])


async def test_a_pull_that_is_broken_off_leaves_no_replica(hub: RunningHub, folder: Path, published: Published) -> None:
    async with hub.connected(published.job, agents=1) as (here,):

        async def is_pulling() -> bool:
            return any(each.replica.startswith("pull-") for each in await here.replicas("policy"))

        with hub.stopped("planner-0"):
            run = begun(folder, ["pull", "policy", "out.safetensors"], published.environment)
            await until(is_pulling)
            os.kill(run.pid, signal.SIGINT)
            assert one_line(await asyncio.to_thread(run.ended), 130) == "tensorhub: interrupted\n"
            await until_answer(is_pulling, lambda found: not found)
    assert not (folder / "out.safetensors").exists()


async def test_a_variable_that_is_no_setting_is_reported_by_commands(folder: Path, published: Published) -> None:
    environment = published.environment | {"TENSORHUB_BEATS": "1"}
    code, out, err = begun(folder, ["versions", "policy"], environment).ended()
    assert (code, out.splitlines()[0].split()[0]) == (0, "VERSION")
    assert err == "tensorhub: TENSORHUB_BEATS is set, which is no setting of TensorHub: is TENSORHUB_BEAT_S meant?\n"


@pytest.mark.long
async def test_weights_in_files_go_in_and_come_out(hub: RunningHub, tmp_path: Path) -> None:
    job = new_job()
    given = {"w": torch.randn(1000, 30), "flag": torch.ones((), dtype=torch.bool), "half": torch.randn(7).half()}
    save_file(given, tmp_path / "in.safetensors")
    published = await hub.command("publish", "policy", "--version", "4", tmp_path / "in.safetensors", "--job", job)
    assert published == (0, published[1], "")
    assert_same_bytes(await pulled(hub, "policy", tmp_path, job), dict(sorted(given.items())))
    code, out, _ = await hub.command("versions", "policy", "--job", job, "--json")
    assert (code, '"holders":["published"]' in out) == (0, True)
    code, out, _ = await hub.command("doctor", "--quick", "--job", job)
    assert code == 0, out


async def pulled(hub: RunningHub, model: str, folder: Path, job: str, *which: str) -> dict[str, torch.Tensor]:
    code, out, err = await hub.command("pull", model, folder / "out.safetensors", *which, "--job", job)
    assert (code, err) == (0, ""), out
    found: dict[str, torch.Tensor] = load_file(folder / "out.safetensors")
    return dict(sorted(found.items()))


async def test_pull_says_what_shards_lack_also_where_they_overlap(hub: RunningHub, tmp_path: Path) -> None:
    """Two shards have more elements together than the tensor, and still not all of them; with a third they do."""
    job = new_job()
    boxes = [(0, 8), (1, 7), (8, 4)]
    async with hub.connected(job) as (here, _):
        for shards in (2, 3):
            given = [TensorSpec((rows, 2), "float32", (12, 2), (at, 0)) for at, rows in boxes[:shards]]
            workers = [
                await here.register(f"of-{shards}", {"w": spec}, replica="trainer", shard=shard, shards=shards)
                for shard, spec in enumerate(given)
            ]
            for worker, (at, rows) in zip(workers, boxes, strict=False):
                worker.tensors["w"].copy_(torch.arange(24.0).view(12, 2)[at : at + rows])
            await asyncio.gather(*(worker.publish(1) for worker in workers))
        code, _, err = await hub.command("pull", "of-2", tmp_path / "lacks.safetensors", "--job", job)
        assert (code, "have only a part of tensor 'w'" in err) == (1, True)
        assert not (tmp_path / "lacks.safetensors").exists()
        found = await pulled(hub, "of-3", tmp_path, job)
    assert torch.equal(found["w"], torch.arange(24.0).view(12, 2))


CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 6,
    "vocab_size": 5,
    "tie_word_embeddings": True,
}


async def test_pull_writes_the_models_own_tensors_of_a_fused_engine(hub: RunningHub, tmp_path: Path) -> None:
    """Two ranks of an engine, whose one key head both of them have, and whose vocabulary is padded to 8."""
    job, at = new_job(), "model.layers.0.self_attn"
    query, key, value = torch.rand(8, 4), torch.rand(2, 4), torch.rand(2, 4)
    embedding = torch.rand(5, 4)
    async with hub.connected(job) as workers:
        shards = []
        for rank, worker in enumerate(workers):
            padded = torch.cat([embedding, torch.full((3, 4), torch.nan)])
            given = {
                f"{at}.qkv_proj.weight": torch.cat([query[4 * rank : 4 * rank + 4], key, value]),
                "model.embed_tokens.weight": padded[4 * rank : 4 * rank + 4],
                f"{at}.rotary_emb.cos_sin_cache": torch.ones(7),
            }
            names = mapping.llama(CONFIG, tp_rank=rank, tp_size=2)
            shards.append(await worker.register("policy", given, replica="engine", shard=rank, shards=2, mapping=names))
        assert f"{at}.rotary_emb.cos_sin_cache" not in shards[0].tensors
        assert shards[1].tensors["model.embed_tokens.weight"][1:].eq(0).all()
        await asyncio.gather(*(shard.publish(1) for shard in shards))
        found = await pulled(hub, "policy", tmp_path, job)
    own = {f"{at}.{name}_proj.weight": tensor for name, tensor in (("k", key), ("q", query), ("v", value))}
    assert_same_bytes(found, {"model.embed_tokens.weight": embedding, **own})
