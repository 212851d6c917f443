"""What an SGLang server is asked, and what becomes of its answers; a fake one answers by HTTP."""

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator

import pytest
import torch
from tests.kit.fake_engine import token_of
from tests.kit.fake_sglang import FakeSglang
from tests.kit.waiting import until

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling
from tensorhub_runner.servers import http
from tensorhub_runner.servers.server import ServerBusy, ServerLost, ServerUnfit, Streamed, WeightSource
from tensorhub_runner.servers.sglang import SglangServer, named_nothing

SEED = 11
PROMPT = [2, SEED]
"""Its length, and what its tokens follow from."""
SOURCE = WeightSource("job", "policy", "runner-0", "/run/agent.sock")


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang(version="1")


@pytest.fixture
async def server(fake: FakeSglang) -> AsyncIterator[SglangServer]:
    async with fake.serving() as url:
        made = SglangServer(url)
        yield made
        await made.close()


async def all_of(
    server: SglangServer, sampling: Sampling, context: list[int] = PROMPT, made: int = 0
) -> list[Streamed]:
    return [each async for each in server.generate("1-1", context, sampling, made)]


async def test_a_stream_has_each_token_with_its_log_probability_and_ends_with_a_reason(server: SglangServer) -> None:
    came = await all_of(server, Sampling(5, SEED))
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in range(5)]
    assert all(len(each.logprobs) == len(each.tokens) for each in came)
    assert [each.reason for each in came] == [None] * 4 + ["length"]
    assert came[-1].versions == ("1",)


async def test_a_stream_that_goes_on_asks_for_what_is_left_with_noise_of_its_own(
    server: SglangServer, fake: FakeSglang
) -> None:
    tokens = [token_of(SEED, position) for position in range(3)]
    came = await all_of(
        server, Sampling(5, SEED, top_p=0.5, top_k=7, logprobs="temperature"), [*PROMPT, *tokens], made=3
    )
    assert [token for each in came for token in each.tokens] == [token_of(SEED, position) for position in (3, 4)]
    (asked,) = fake.requests
    sampling = asked["sampling_params"]
    assert sampling["max_new_tokens"] == 2
    # SGLang mixes a seed with the position: the same seed goes on with the noise of these positions.
    assert sampling["sampling_seed"] == SEED
    assert (sampling["top_p"], sampling["top_k"]) == (0.5, 7)


@pytest.mark.parametrize("seed", [-1, (1 << 64) - 1, -(1 << 63)])
async def test_a_seed_is_one_that_sglang_keeps(server: SglangServer, fake: FakeSglang, seed: int) -> None:
    await all_of(server, Sampling(1, seed))
    assert 0 <= fake.requests[0]["sampling_params"]["sampling_seed"] < 1 << 63


async def test_a_response_ends_at_its_own_stop_token_and_leaves_its_place(
    server: SglangServer, fake: FakeSglang
) -> None:
    tokens = [token_of(SEED, position) for position in range(4)]
    came = await all_of(server, Sampling(100_000, SEED, stop_token_ids=(tokens[3],)))
    assert [token for each in came for token in each.tokens] == tokens[: tokens.index(tokens[3]) + 1]
    assert (came[-1].reason, came[-1].versions) == ("stop", ("1",))
    await until(lambda: not fake.running)


async def test_a_request_that_is_refused_is_a_bad_prompt_and_one_of_a_full_server_is_not(
    server: SglangServer, fake: FakeSglang
) -> None:
    with pytest.raises(BadPrompt, match="out of vocabulary"):
        await all_of(server, Sampling(5, SEED), [2, 5000])
    with pytest.raises(BadPrompt, match="take logprobs='temperature'"):
        await all_of(server, Sampling(5, SEED, top_k=2))
    for code, error in ((400, BadPrompt), (503, ServerBusy), (500, ServerLost)):
        fake.refuses = {"type": "abort", "message": "it says why", "status_code": code, "err_type": None}
        with pytest.raises(error, match="it says why"):
            await all_of(server, Sampling(5, SEED))


async def test_closing_a_stream_frees_its_place(server: SglangServer, fake: FakeSglang) -> None:
    stream = server.generate("1-1", PROMPT, Sampling(100_000, SEED), 0)
    await anext(stream)
    assert fake.running == 1
    await stream.aclose()
    await until(lambda: not fake.running)


async def test_a_version_is_loaded_while_nothing_runs_and_has_a_cache_of_its_own(
    server: SglangServer, fake: FakeSglang
) -> None:
    fake.options = {"tp_size": 2}
    stream = asyncio.ensure_future(all_of(server, Sampling(100_000, SEED)))
    await until(lambda: fake.running)
    await server.stand_still()
    came = await stream
    assert came[-1].reason == "interrupted"
    await server.load(SOURCE, 2)
    await server.go_on()
    again = await all_of(server, Sampling(2, SEED))
    assert again[-1].versions == ("2",)
    first, second = (each["extra_key"] for each in fake.requests)
    assert first != second
    # Each rank takes the payload of its own number.
    (update,) = fake.updates
    assert len(update["serialized_named_tensors"]) == 2
    payload = base64.b64decode(update["serialized_named_tensors"][1])
    ((told, tensor),) = pickle.loads(payload)  # noqa: S301 (of this process)
    place = {"job": "job", "model": "policy", "replica": "runner-0", "agent": "/run/agent.sock", "version": 2}
    assert json.loads(told) == place
    assert tensor.numel() == 0
    assert not fake.is_updating


async def test_an_aborted_stream_that_says_its_last_token_again_has_it_once(
    server: SglangServer, fake: FakeSglang
) -> None:
    fake.aborts_while_waiting = True
    stream = asyncio.ensure_future(all_of(server, Sampling(100_000, SEED)))
    await until(lambda: fake.running)
    await server.stand_still()
    came = await stream
    tokens = [token for each in came for token in each.tokens]
    assert tokens == [token_of(SEED, position) for position in range(len(tokens))]
    assert sum(len(each.logprobs) for each in came) == len(tokens)
    assert (came[-1].tokens, came[-1].reason) == ((), "interrupted")


async def test_a_load_that_fails_is_an_error_and_the_next_one_begins_anew(
    server: SglangServer, fake: FakeSglang
) -> None:
    await server.stand_still()
    fake.fails.add("/update_weights_from_tensor")
    with pytest.raises(ServerLost, match="can't update_weights_from_tensor"):
        await server.load(SOURCE, 2)
    assert (fake.version, fake.is_updating) == ("1", True)
    fake.fails.clear()
    await server.load(SOURCE, 2)
    assert (fake.version, fake.is_updating) == ("2", False)


@pytest.mark.parametrize("name", ["", "{}", "größer"])
def test_a_name_is_pickled_with_a_tensor_without_values(name: str) -> None:
    ((found, tensor),) = pickle.loads(named_nothing(name))  # noqa: S301 (of this process)
    assert (found, tensor.shape) == (name, torch.Size([0]))


async def test_it_says_what_it_is(server: SglangServer) -> None:
    assert await server.check() == RunEngine("sglang", "sglang 0.5.23", "float32", is_exact=False)
    assert await server.is_healthy(1)
    assert not await server.is_healthy(2)


async def test_a_server_that_was_started_otherwise_is_unfit_and_the_error_names_the_option(fake: FakeSglang) -> None:
    async with fake.serving() as url:
        for model, options, told in (
            ("", {"incremental_streaming_output": False}, "start it with --incremental-streaming-output"),
            ("", {"custom_weight_loader": None}, "--custom-weight-loader tensorhub.integrations.sglang.load_version"),
            ("", {"dp_size": 2}, "2 data-parallel replicas"),
            ("", {"tp_size": 5000}, "over the limit"),
            ("", {"disaggregation_mode": "decode"}, "without --disaggregation-mode"),
            ("", {"weight_cache_mode": "attach"}, "--weight-cache-mode off"),
            ("", {"version": None}, "no SGLang that is known here"),
            ("other", {}, "has tiny, and not other"),
        ):
            fake.options = options
            server = SglangServer(url, model)
            with pytest.raises(ServerUnfit, match=told):
                await server.check()
            await server.close()


async def test_a_server_that_is_not_there_is_lost_and_not_healthy() -> None:
    async with FakeSglang().serving() as url:
        pass
    server = SglangServer(url)
    assert not await server.is_healthy(1)
    for asked in (server.check(), server.stand_still(), server.load(SOURCE, 1), all_of(server, Sampling(5, SEED))):
        with pytest.raises(ServerLost, match="does not answer"):
            await asked
    await server.close()


async def test_a_stream_that_breaks_off_has_no_reason(server: SglangServer, fake: FakeSglang) -> None:
    fake.breaks_after = 2
    came = await all_of(server, Sampling(5, SEED))
    assert [each.reason for each in came] == [None, None]


async def test_an_update_that_a_killed_runner_has_begun_is_ended_by_the_next_one(
    server: SglangServer, fake: FakeSglang
) -> None:
    await server.stand_still()
    fake.is_updating = True
    await server.load(SOURCE, 2)
    assert (fake.version, fake.is_updating) == ("2", False)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_server_that_is_closed_to_a_runner_is_unfit(
    server: SglangServer, fake: FakeSglang, status: int
) -> None:
    fake.closed = status
    for asked in (server.check(), server.stand_still(), all_of(server, Sampling(5, SEED))):
        with pytest.raises(ServerUnfit, match=r"--incremental-streaming-output .* without --api-key"):
            await asked


async def test_a_stream_that_is_silent_ends_without_a_reason_and_takes_no_other_with_it(
    server: SglangServer, fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SILENCE_S_MAX", 0.05)
    fake.holds_new = True
    assert await all_of(server, Sampling(5, SEED)) == []


async def test_weights_of_somebody_else_are_told_of_in_health_and_streams(
    server: SglangServer, fake: FakeSglang
) -> None:
    fake.says_version = "9"
    assert not await server.is_healthy(1)
    assert (await all_of(server, Sampling(2, SEED)))[-1].versions == ("9",)


async def test_a_server_that_came_anew_is_asked_again_what_it_is_and_has_as_many_payloads_as_ranks(
    fake: FakeSglang,
) -> None:
    async with fake.serving() as url:
        server = SglangServer(url)
        await server.check()
    assert not await server.is_healthy(1)
    fake.options = {"tp_size": 4}
    async with fake.serving(int(url.rpartition(":")[2])):
        await server.stand_still()
        await server.load(SOURCE, 2)
        assert len(fake.updates[-1]["serialized_named_tensors"]) == 4
    assert not await server.is_healthy(2)
    fake.options = {"custom_weight_loader": []}
    async with fake.serving(int(url.rpartition(":")[2])):
        with pytest.raises(ServerUnfit, match="can't load from the hub"):
            await server.check()
    await server.close()
