"""What a vLLM server is asked, and what becomes of its answers; a fake one answers by HTTP."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.kit.fake_engine import token_of
from tests.kit.fake_vllm import FakeVllm
from tests.kit.waiting import until

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_runner.servers import http
from tensorhub_runner.servers.server import ServerBusy, ServerLost, ServerUnfit, Streamed, WeightSource
from tensorhub_runner.servers.vllm import VllmServer
from tensorhub_runner.servers.vllm_sampling import seed_at

SEED = 11
PROMPT = [2, SEED]
"""Its length, and what its tokens follow from."""
SOURCE = WeightSource("job", "policy", "runner-0", "/run/agent.sock")


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm(version="1")


@pytest.fixture
async def server(fake: FakeVllm) -> AsyncIterator[VllmServer]:
    async with fake.serving() as url:
        made = VllmServer(url)
        yield made
        await made.close()


async def all_of(server: VllmServer, sampling: Sampling, context: list[int] = PROMPT, made: int = 0) -> list[Streamed]:
    return [each async for each in server.generate("1-1", context, sampling, made)]


async def test_a_stream_has_each_token_with_its_log_probability_and_ends_with_a_reason(server: VllmServer) -> None:
    came = await all_of(server, Sampling(5, SEED))
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in range(5)]
    assert all(len(each.logprobs) == len(each.tokens) for each in came)
    assert [each.reason for each in came] == [None] * 4 + ["length"]
    assert came[-1].versions == ("1",)


async def test_a_stream_that_goes_on_asks_for_what_is_left_with_noise_of_its_own(
    server: VllmServer, fake: FakeVllm
) -> None:
    tokens = [token_of(SEED, position) for position in range(3)]
    came = await all_of(server, Sampling(5, SEED, top_p=0.5, top_k=7), [*PROMPT, *tokens], made=3)
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in (3, 4)]
    (asked,) = fake.requests
    assert asked["sampling_params"]["max_tokens"] == 2
    assert asked["sampling_params"]["seed"] == seed_at(SEED, 3) != SEED
    assert (asked["sampling_params"]["top_p"], asked["sampling_params"]["top_k"]) == (0.5, 7)


def test_seeds_are_what_torch_takes_and_differ_at_each_place() -> None:
    for seed in (0, 1, -1, (1 << 64) - 1, -(1 << 63)):
        seeds = [seed_at(seed, made) for made in range(1000)]
        assert len({*seeds}) == len(seeds)
        assert all(0 <= each < 1 << 63 for each in seeds)


async def test_a_request_that_is_refused_is_a_bad_prompt_and_one_of_a_full_server_is_not(
    server: VllmServer, fake: FakeVllm
) -> None:
    with pytest.raises(BadPrompt, match="out of vocabulary"):
        await all_of(server, Sampling(5, SEED), [2, 5000])
    with pytest.raises(BadPrompt, match="logprobs='processed'"):
        await all_of(server, Sampling(5, SEED, top_k=2, logprobs="temperature"))
    fake.is_busy = True
    with pytest.raises(ServerBusy, match="queue is full"):
        await all_of(server, Sampling(5, SEED))


async def test_closing_a_stream_frees_its_place(server: VllmServer, fake: FakeVllm) -> None:
    stream = server.generate("1-1", PROMPT, Sampling(100_000, SEED), 0)
    await anext(stream)
    assert fake.running == 1
    await stream.aclose()
    await until(lambda: not fake.running)


async def test_a_version_is_loaded_while_nothing_runs_and_salts_the_requests_behind_it(
    server: VllmServer, fake: FakeVllm
) -> None:
    stream = asyncio.ensure_future(all_of(server, Sampling(100_000, SEED)))
    await until(lambda: fake.running)
    await server.stand_still()
    came = await stream
    assert came[-1].reason == "interrupted"
    await server.load(SOURCE, 2)
    await server.go_on()
    again = await all_of(server, Sampling(2, SEED))
    assert again[-1].versions == ("2",)
    first, second = (each["cache_salt"] for each in fake.requests)
    assert first != second
    # The second load needs no introduction.
    await server.stand_still()
    await server.load(SOURCE, 3)
    assert fake.asked.count("/init_weight_transfer_engine") == 1
    assert fake.version == "3"


async def test_a_load_that_fails_is_an_error_and_the_next_one_begins_anew(server: VllmServer, fake: FakeVllm) -> None:
    await server.stand_still()
    fake.fails.add("/update_weights")
    with pytest.raises(ServerLost, match="can't update_weights: it failed"):
        await server.load(SOURCE, 2)
    assert fake.version == "1"
    fake.fails.clear()
    await server.load(SOURCE, 2)
    assert fake.asked.count("/init_weight_transfer_engine") == 2
    assert fake.version == "2"


async def test_it_says_what_it_is(server: VllmServer) -> None:
    assert await server.check() == RunEngine("vllm", "vllm 0.32.0", "float32", is_exact=False)
    assert await server.is_healthy(1)
    assert not await server.is_healthy(2)


async def test_a_server_that_was_started_otherwise_is_unfit_and_the_error_names_the_option(fake: FakeVllm) -> None:
    async with fake.serving() as url:
        for model, change, told in (
            ("", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
            ("", {"backend": None}, "--weight-transfer-config"),
            ("other", {}, "has tiny, and not other"),
        ):
            before = vars(fake).copy()
            vars(fake).update(change)
            server = VllmServer(url, model)
            with pytest.raises(ServerUnfit, match=told):
                await server.check()
            await server.close()
            vars(fake).update(before)


async def test_a_server_that_is_not_there_is_lost_and_not_healthy() -> None:
    async with FakeVllm().serving() as url:
        pass
    server = VllmServer(url)
    assert not await server.is_healthy(1)
    for asked in (server.check(), server.stand_still(), server.load(SOURCE, 1), all_of(server, Sampling(5, SEED))):
        with pytest.raises(ServerLost, match="does not answer"):
            await asked
    await server.close()


async def test_a_stream_that_breaks_off_has_no_reason(server: VllmServer, fake: FakeVllm) -> None:
    fake.breaks_after = 2
    came = await all_of(server, Sampling(5, SEED))
    assert [each.reason for each in came] == [None, None]


async def test_tokens_without_log_probabilities_are_not_taken(server: VllmServer, fake: FakeVllm) -> None:
    fake.gives_logprobs = False
    with pytest.raises(ServerLost, match="1 tokens with 0 log-probabilities"):
        await all_of(server, Sampling(5, SEED))


async def test_an_update_that_a_killed_runner_has_begun_is_ended_by_the_next_one(
    server: VllmServer, fake: FakeVllm
) -> None:
    await server.stand_still()
    fake.is_updating = True
    await server.load(SOURCE, 2)
    assert (fake.version, fake.is_updating) == ("2", False)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_server_that_gives_no_tokens_in_and_out_is_unfit(
    server: VllmServer, fake: FakeVllm, status: int
) -> None:
    fake.closed = status
    with pytest.raises(ServerUnfit, match="--tokens-only"):
        await all_of(server, Sampling(5, SEED))


async def test_a_stream_that_is_silent_ends_without_a_reason_and_takes_no_other_with_it(
    server: VllmServer, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SILENCE_S_MAX", 0.05)
    fake.holds_new = True
    assert await all_of(server, Sampling(5, SEED)) == []


async def test_a_server_that_came_anew_is_asked_again_what_it_is(fake: FakeVllm) -> None:
    async with fake.serving() as url:
        server = VllmServer(url)
        await server.check()
    assert not await server.is_healthy(1)
    fake.logprobs_mode = "raw_logprobs"
    async with fake.serving(int(url.rpartition(":")[2])):
        with pytest.raises(ServerUnfit, match="processed_logprobs"):
            await server.check()
    await server.close()
