"""What vLLM in process is asked, and what becomes of its answers; the modules of vLLM are fake ones."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.kit.fake_engine import logprob_of, token_of
from tests.kit.fake_vllm_in_process import FakeVllmInProcess
from tests.kit.waiting import until

from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_runner.servers import vllm_in_process
from tensorhub_runner.servers.server import ServerBusy, ServerLost, Streamed, WeightSource
from tensorhub_runner.servers.vllm_in_process import SHUTDOWN_S, STARTS_MAX, VllmInProcess
from tensorhub_runner.servers.vllm_sampling import seed_at

SEED = 11
PROMPT = [2, SEED]
"""Its length, and what its tokens follow from."""
SOURCE = WeightSource("job", "policy", "runner-0", "/run/agent.sock")
FOLDER = Path("/models/tiny")
ENDLESS = Sampling(100_000, SEED)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllmInProcess:
    made = FakeVllmInProcess()
    made.install(monkeypatch)
    return made


@pytest.fixture
async def server(fake: FakeVllmInProcess) -> AsyncIterator[VllmInProcess]:
    made = VllmInProcess(FOLDER)
    await change(made, 1)
    assert fake.engine.version == "1"
    yield made
    await made.close()


async def change(server: VllmInProcess, version: int) -> None:
    """Do what a driver does."""
    await server.check()
    await server.stand_still()
    await server.load(SOURCE, version)
    await server.go_on()


async def all_of(
    server: VllmInProcess, sampling: Sampling, context: list[int] = PROMPT, made: int = 0
) -> list[Streamed]:
    return [each async for each in server.generate("1-1", context, sampling, made)]


# ---------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_stream_has_each_token_with_its_log_probability_and_ends_with_a_reason_and_a_version(
    server: VllmInProcess, fake: FakeVllmInProcess, at_once: int
) -> None:
    fake.tokens_at_once = at_once
    came = await all_of(server, Sampling(5, SEED))
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in range(5)]
    assert [logprob for each in came for logprob in each.logprobs] == [logprob_of(1, position) for position in range(5)]
    assert [each.reason for each in came] == [None] * (len(came) - 1) + ["length"]
    assert [each.versions for each in came] == [()] * (len(came) - 1) + [("1",)]


async def test_a_stream_ends_at_a_stop_token_of_its_request(server: VllmInProcess) -> None:
    (last,) = await all_of(server, Sampling(5, SEED, stop_token_ids=(token_of(SEED, 0),)))
    assert (last.tokens, last.reason) == ((token_of(SEED, 0),), "stop")


async def test_a_stream_that_goes_on_asks_for_what_is_left_with_noise_of_its_own(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    tokens = [token_of(SEED, position) for position in range(3)]
    came = await all_of(server, Sampling(5, SEED, top_p=0.5, top_k=7), [*PROMPT, *tokens], made=3)
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in (3, 4)]
    await all_of(server, Sampling(5, SEED), [*PROMPT, *tokens], made=3)
    (name, prompt, params), (other, _, _) = fake.requests
    assert prompt["prompt_token_ids"] == [*PROMPT, *tokens]
    assert vars(params)["max_tokens"] == 2
    assert vars(params)["seed"] == seed_at(SEED, 3) != SEED
    assert (vars(params)["top_p"], vars(params)["top_k"]) == (0.5, 7)
    assert vars(params)["output_kind"].name == "DELTA"
    assert name != other


async def test_a_request_that_is_refused_is_a_bad_prompt_and_one_of_a_full_engine_is_not(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    with pytest.raises(BadPrompt, match="out of vocabulary"):
        await all_of(server, Sampling(5, SEED), [2, 5000])
    with pytest.raises(BadPrompt, match=r"temperature must be in \[0, 2\]"):
        await all_of(server, Sampling(5, SEED, temperature=3.0))
    with pytest.raises(BadPrompt, match="logprobs='processed'"):
        await all_of(server, Sampling(5, SEED, top_k=2, logprobs="temperature"))
    fake.is_full = True
    with pytest.raises(ServerBusy, match="currently busy"):
        await all_of(server, Sampling(5, SEED))
    assert await server.is_healthy(1)


async def test_closing_a_stream_aborts_its_request(server: VllmInProcess, fake: FakeVllmInProcess) -> None:
    stream = server.generate("1-1", PROMPT, ENDLESS, 0)
    await anext(stream)
    assert fake.engine.running == 1
    await stream.aclose()
    await until(lambda: not fake.engine.running)


async def test_a_stream_that_is_silent_ends_without_a_reason_and_takes_no_other_with_it(
    server: VllmInProcess, fake: FakeVllmInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_in_process, "SILENCE_S_MAX", 0.05)
    fake.is_silent = True
    assert await all_of(server, Sampling(5, SEED)) == []
    assert fake.engine.running == 0
    assert await server.is_healthy(1)


async def test_tokens_without_log_probabilities_and_ends_of_another_kind_are_not_taken(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    fake.ends_as = "error"
    with pytest.raises(ServerLost, match="ends a response as 'error'"):
        await all_of(server, Sampling(5, SEED))
    fake.gives_logprobs = False
    with pytest.raises(ServerLost, match="1 tokens with 0 log-probabilities"):
        await all_of(server, Sampling(5, SEED))
    assert fake.engine.running == 0


# ---------------------------------------------------------------------------------------------- weights


async def test_a_version_is_loaded_while_nothing_runs_and_salts_the_requests_behind_it(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    stream = asyncio.ensure_future(all_of(server, ENDLESS))
    await until(lambda: fake.engine.running)
    await server.stand_still()
    came = await stream
    assert (came[-1].tokens, came[-1].reason, came[-1].versions) == ((), "interrupted", ("1",))
    waiting = asyncio.ensure_future(all_of(server, Sampling(2, SEED)))
    await server.load(SOURCE, 2)
    assert not waiting.done()
    await server.go_on()
    assert (await waiting)[-1].logprobs == (logprob_of(2, 1),)
    again = await all_of(server, Sampling(2, SEED))
    assert again[-1].versions == ("2",)
    first, _, third = (prompt["cache_salt"] for _, prompt, _ in fake.requests)
    assert first
    assert third
    assert first != third
    # The second load needs no introduction.
    assert fake.places == [{"job": "job", "model": "policy", "replica": "runner-0", "agent": "/run/agent.sock"}]


async def test_a_load_that_fails_is_an_error_and_the_next_one_begins_anew(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    await server.stand_still()
    for method in ("update_weights", "init_weight_transfer_engine", "finish_weight_update"):
        fake.errors = {method: f"{method} has failed"}
        with pytest.raises(ServerLost, match=f"{method} has failed"):
            await server.load(SOURCE, 2)
    fake.errors.clear()
    await change(server, 2)
    assert (await all_of(server, Sampling(2, SEED)))[-1].versions == ("2",)
    # After each of them the workers find the hub anew, as those of a server.
    assert fake.asked.count("init_weight_transfer_engine") == 4
    assert len(fake.made) == 1


async def test_an_update_that_was_left_open_is_ended_by_the_next_one(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    """So is it where one of several workers has raised: the others' updates are still open."""
    await server.stand_still()
    fake.engine.is_updating = True
    await server.load(SOURCE, 2)
    assert (fake.engine.version, fake.engine.label, fake.engine.is_updating) == ("2", "2", False)


# ---------------------------------------------------------------------------------------------- the engine


async def test_it_says_what_it_is_and_is_made_once(server: VllmInProcess, fake: FakeVllmInProcess) -> None:
    assert await server.check() == RunEngine("vllm", "vllm 0.32.0", "float32", is_exact=False)
    assert len(fake.made) == 1


async def test_a_core_that_dies_ends_its_streams_and_is_made_anew(
    server: VllmInProcess, fake: FakeVllmInProcess
) -> None:
    stream = asyncio.ensure_future(all_of(server, ENDLESS))
    await until(lambda: fake.engine.running)
    dead = fake.engine
    dead.die()
    with pytest.raises(ServerLost, match="vLLM's engine has failed: EngineCore encountered an issue"):
        await stream
    assert not await server.is_healthy(1)
    with pytest.raises(ServerLost, match="has failed"):
        await all_of(server, Sampling(5, SEED))
    with pytest.raises(ServerLost, match="can't stand still: its core has died"):
        await server.stand_still()
    await change(server, 2)
    assert dead.ended_after_s == SHUTDOWN_S
    assert fake.engine is not dead
    assert await server.is_healthy(2)
    assert (await all_of(server, Sampling(2, SEED)))[-1].versions == ("2",)
    # Its workers know nothing of the hub.
    assert len(fake.places) == 2


ASKED: dict[str, Callable[[VllmInProcess], Coroutine[Any, Any, None]]] = {
    "pause_generation": lambda server: server.stand_still(),
    "start_weight_update": lambda server: server.load(SOURCE, 2),
    "update_weights": lambda server: server.load(SOURCE, 2),
    "resume_generation": lambda server: server.go_on(),
}


@pytest.mark.parametrize("method", [*ASKED])
async def test_a_core_that_dies_while_it_is_asked_is_lost_at_once(
    server: VllmInProcess, fake: FakeVllmInProcess, method: str
) -> None:
    """VLLM does not end what waits for its answer."""
    if method != "pause_generation":
        await server.stand_still()
    fake.holds.add(method)
    asked = asyncio.ensure_future(ASKED[method](server))
    await until(lambda: fake.asked[-1] == method)
    fake.engine.die()
    with pytest.raises(ServerLost, match=r"can't .*: its core has died"):
        await asyncio.wait_for(asked, WAIT_S)
    await until(lambda: not fake.engine.waiting, "the question is taken back")
    fake.holds.clear()
    await change(server, 2)
    assert len(fake.made) == 2


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ("pause_generation", "STAND_STILL_S_MAX"),
        ("start_weight_update", "LOAD_S_MAX"),
        ("update_weights", "LOAD_S_MAX"),
        ("resume_generation", "ANSWER_S_MAX"),
    ],
)
async def test_a_core_that_does_not_answer_is_ended_and_made_anew(
    server: VllmInProcess, fake: FakeVllmInProcess, monkeypatch: pytest.MonkeyPatch, method: str, bound: str
) -> None:
    if method != "pause_generation":
        await server.stand_still()
    monkeypatch.setattr(vllm_in_process, bound, 0.05)
    fake.holds.add(method)
    with pytest.raises(ServerLost, match="and is ended"):
        await ASKED[method](server)
    assert fake.engine.ended_after_s == SHUTDOWN_S
    assert not await server.is_healthy(1)
    with pytest.raises(ServerLost, match="no vLLM engine"):
        await all_of(server, Sampling(5, SEED))
    fake.holds.clear()
    monkeypatch.undo()
    fake.install(monkeypatch)
    await change(server, 2)
    assert len(fake.made) == 2


async def test_an_engine_that_can_not_be_made_is_lost_and_in_the_end_a_wrong_setting(fake: FakeVllmInProcess) -> None:
    server = VllmInProcess(FOLDER)
    fake.start_error = "no memory is left"
    for _ in range(STARTS_MAX - 1):
        with pytest.raises(ServerLost, match="can't be made of /models/tiny: no memory is left"):
            await server.check()
    fake.start_error = None
    await server.check()
    fake.engine.die()
    fake.start_error = "no memory is left"
    # One that was made begins the count anew.
    for _ in range(STARTS_MAX - 1):
        with pytest.raises(ServerLost):
            await server.check()
    with pytest.raises(InvalidSetting, match=f"{STARTS_MAX} times in a row"):
        await server.check()
    await server.close()


async def test_closing_ends_the_engine_and_what_is_asked_later_is_lost(fake: FakeVllmInProcess) -> None:
    server = VllmInProcess(FOLDER)
    # Before there is one, nothing runs there.
    await server.stand_still()
    assert not await server.is_healthy(1)
    await change(server, 1)
    await server.close()
    assert fake.engine.ended_after_s == SHUTDOWN_S
    for asked in (server.load(SOURCE, 2), server.go_on(), all_of(server, Sampling(5, SEED))):
        with pytest.raises(ServerLost, match="no vLLM engine"):
            await asked
    await server.close()


async def test_the_engine_is_made_as_a_runner_needs_it_whatever_the_options_say(fake: FakeVllmInProcess) -> None:
    server = VllmInProcess(FOLDER, "--max-model-len 64 --load-format auto --logprobs-mode raw_logprobs --model other")
    await server.check()
    (made,) = fake.arguments
    assert (made.model, made.max_model_len) == ("/models/tiny", 64)
    assert (made.load_format, made.logprobs_mode, made.skip_tokenizer_init) == ("dummy", "processed_logprobs", True)
    assert made.weight_transfer_config is not None
    assert made.weight_transfer_config.backend == "tensorhub"
    await server.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--max-modle-len 64", "unrecognized arguments: --max-modle-len"),
        ("--max-model-len many", "invalid int value"),
        ("--max-model-len 0", "max_model_len must be positive"),
        ("--max-model-len '64", "No closing quotation"),
    ],
)
def test_options_that_vllm_refuses_are_refused_before_an_engine_is_made(
    fake: FakeVllmInProcess, options: str, told: str
) -> None:
    with pytest.raises(InvalidSetting, match=f"TENSORHUB_RUNNER_VLLM_ARGS can't be used: .*{told}"):
        VllmInProcess(FOLDER, options)
    assert not fake.made


def test_without_vllm_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllmInProcess().install(monkeypatch)
    for name in FakeVllmInProcess().modules():
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidSetting, match=r"pip install vllm 'tensorhub\[vllm\]'"):
        VllmInProcess(FOLDER)
