"""A server is driven: each token is told of once, under the version that made it, whatever happens to the server."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.bounds import WAIT_S
from tests.kit.fake_engine import logprob_of, token_of
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fake_vllm_in_process import FakeVllmInProcess
from tests.kit.waiting import until

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Finished, Sampling
from tensorhub_runner.app import server_driver
from tensorhub_runner.app.server_driver import ServerDriver
from tensorhub_runner.core.runner_events import Begin, StepTokens, Stop
from tensorhub_runner.servers.server import Server, ServerLost, WeightSource
from tensorhub_runner.servers.vllm import VllmServer
from tensorhub_runner.servers.vllm_in_process import VllmInProcess

SOURCE = WeightSource("job", "policy", "runner-0", "/run/agent.sock")
ONE, OTHER = Attempt(1, 1), Attempt(1, 2)


def begin(attempt: Attempt, count: int, made: int = 0, seed: int = 5) -> Begin:
    tokens = [token_of(seed, position) for position in range(made)]
    return Begin(attempt, struct.pack("<2i", 2, seed), struct.pack(f"<{made}i", *tokens), Sampling(count, seed))


@dataclass
class Told:
    """What a driver has told of."""

    tokens: dict[Attempt, list[int]] = field(default_factory=dict)
    logprobs: dict[Attempt, list[float]] = field(default_factory=dict)
    finished: dict[Attempt, Finished] = field(default_factory=dict)
    current: set[Attempt] = field(default_factory=set)
    lost: int = 0

    def step(self, made: tuple[StepTokens, ...], seconds: float) -> None:
        assert seconds >= 0
        for each in made:
            count = len(each.tokens) // 4
            self.tokens.setdefault(each.attempt, []).extend(struct.unpack(f"<{count}i", each.tokens))
            self.logprobs.setdefault(each.attempt, []).extend(struct.unpack(f"<{count}f", each.logprobs))
            if each.finished is not None:
                assert each.attempt not in self.finished
                self.finished[each.attempt] = each.finished
            if each.is_current:
                self.current.add(each.attempt)

    kept: int = 0
    """How many tokens were told of when the server was lost."""

    def lose(self) -> None:
        self.lost += 1
        self.kept = sum(map(len, self.tokens.values()))


@asynccontextmanager
async def driven(fake: FakeVllm) -> AsyncIterator[tuple[ServerDriver, Told]]:
    async with fake.serving() as url, driving(VllmServer(url)) as (driver, told):
        yield driver, told


@asynccontextmanager
async def driving(server: Server) -> AsyncIterator[tuple[ServerDriver, Told]]:
    driver, told = ServerDriver(server), Told()
    driver.on_stepped, driver.on_lost = told.step, told.lose
    running = asyncio.ensure_future(driver.run())
    await change(driver, 1)
    yield driver, told
    running.cancel()
    await asyncio.wait({running})
    await driver.close()


async def change(driver: ServerDriver, version: int) -> None:
    """Do what a follower of weights does."""
    async with driver.between_steps:
        await driver.stand_still()
        assert driver.version is None
        await driver.load(SOURCE, version)
        assert await driver.weights_changed() is not None


def expected(seed: int, count: int) -> list[int]:
    return [token_of(seed, position) for position in range(count)]


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


async def test_attempts_are_told_of_to_their_ends(fake: FakeVllm) -> None:
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 20))
        driver.do(begin(OTHER, 30, made=10))
        await until(lambda: told.finished.keys() == {ONE, OTHER})
        assert told.tokens == {ONE: expected(5, 20), OTHER: expected(5, 30)[10:]}
        assert told.finished[ONE].reason == told.finished[OTHER].reason == "length"
        assert driver.recomputed == 10


async def test_one_that_is_stopped_is_told_of_no_more_and_leaves_the_server(fake: FakeVllm) -> None:
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 100_000))
        await until(lambda: told.tokens.get(ONE))
        driver.do(Stop(ONE))
        await until(lambda: not fake.running)
        count = len(told.tokens[ONE])
        driver.do(begin(OTHER, 20))
        await until(lambda: OTHER in told.finished)
        assert len(told.tokens[ONE]) == count


async def test_what_was_made_before_a_change_of_weights_is_told_of_before_it_and_goes_on_behind_it(
    fake: FakeVllm,
) -> None:
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 200))
        await until(lambda: len(told.tokens.get(ONE, ())) > 5)
        async with driver.between_steps:
            await driver.stand_still()
            before = len(told.tokens[ONE])
            await driver.load(SOURCE, 2)
            assert len(told.tokens[ONE]) == before
            await driver.weights_changed()
        await until(lambda: ONE in told.finished)
        assert told.tokens[ONE] == expected(5, 200)
        assert ONE in told.current
        versions = [1.0] * before + [2.0] * (200 - before)
        made = [logprob_of(version, position) for position, version in enumerate(versions)]
        assert told.logprobs[ONE] == pytest.approx(made, abs=1e-3)


async def test_a_request_that_reaches_the_server_while_it_stands_still_holds_up_no_change(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test would hang if the request were waited for.
    monkeypatch.setattr(server_driver, "STREAMS_END_S_MAX", None)
    async with driven(fake) as (driver, told):
        fake.holds_new = True
        driver.do(begin(ONE, 20))
        await until(lambda: fake.requests)
        fake.holds_new = False
        await asyncio.wait_for(change(driver, 2), WAIT_S)
        await until(lambda: ONE in told.finished)
        assert told.tokens[ONE] == expected(5, 20)


async def test_nothing_begins_while_there_are_no_weights(fake: FakeVllm) -> None:
    async with driven(fake) as (driver, told):
        fake.fails.add("/update_weights")
        async with driver.between_steps:
            await driver.stand_still()
            with pytest.raises(ServerLost):
                await driver.load(SOURCE, 2)
            assert await driver.weights_changed() is None
        driver.do(begin(ONE, 5))
        fake.fails.clear()
        await change(driver, 2)
        driver.do(begin(OTHER, 5))
        await until(lambda: told.finished.keys() == {ONE, OTHER})
        # The salt is that of the load behind which a request was made.
        assert len({each["cache_salt"] for each in fake.requests}) == 1


async def test_a_stream_that_breaks_off_goes_on_behind_its_last_token(fake: FakeVllm) -> None:
    fake.breaks_after = 3
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 10))
        await until(lambda: ONE in told.finished)
        assert told.tokens[ONE] == expected(5, 10)
        assert [len(each["token_ids"]) - 2 for each in fake.requests] == [0, 3, 6, 9]


async def test_a_server_that_takes_nothing_fails_a_response_in_the_end(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_driver, "AGAIN_S", 0.0)
    fake.is_busy = True
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 10))
        await until(lambda: ONE in told.finished)
        assert told.finished[ONE].reason == "failed"
        assert "without a token" in str(told.finished[ONE].error)
        assert len(fake.requests) == server_driver.FRUITLESS_MAX


async def test_what_the_server_refuses_fails_alone(fake: FakeVllm) -> None:
    async with driven(fake) as (driver, told):
        driver.do(Begin(ONE, struct.pack("<2i", 2, 5000), b"", Sampling(5, 1)))
        driver.do(begin(OTHER, 5))
        await until(lambda: told.finished.keys() == {ONE, OTHER})
        assert (told.finished[ONE].reason, told.finished[OTHER].reason) == ("failed", "length")
        assert "out of vocabulary" in str(told.finished[ONE].error)


async def test_a_server_that_goes_away_is_lost_once_and_what_came_is_kept(fake: FakeVllm) -> None:
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 100_000))
        await until(lambda: told.tokens.get(ONE))
        fake.fails.add("/health")
        await until(lambda: told.lost)
        assert driver.version is None
        await until(lambda: told.lost == 1)
        assert told.tokens[ONE] == expected(5, len(told.tokens[ONE]))
        driver.do(Stop(ONE))
        fake.fails.clear()
        # It is of use again with the next version.
        await change(driver, 2)
        driver.do(begin(OTHER, 5))
        await until(lambda: OTHER in told.finished)


async def test_what_came_before_an_engine_failed_is_told_of_before_the_loss(fake: FakeVllm) -> None:
    fake.errs_after = 4
    async with driven(fake) as (driver, told):
        driver.do(begin(ONE, 10))
        await until(lambda: told.lost)
        assert told.kept == 4


async def test_a_server_that_is_lost_while_it_stands_still_is_told_of_by_who_changes_its_weights(
    fake: FakeVllm,
) -> None:
    async with driven(fake) as (driver, told):
        fake.fails.add("/pause")
        async with driver.between_steps:
            await driver.stand_still()
            assert await driver.weights_changed() is None
        assert told.lost == 0


@pytest.mark.parametrize("tells", ["at the end", "when asked"])
async def test_responses_begin_anew_where_somebody_else_has_changed_the_weights(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, tells: str
) -> None:
    """The server says of which version tokens are at the end of a stream, and when it is asked."""
    monkeypatch.setattr(server_driver, "HEALTH_S", 3600.0 if tells == "at the end" else 0.01)
    async with driven(fake) as (driver, told):
        driver.do(begin(OTHER, 100_000))
        await until(lambda: told.tokens.get(OTHER))
        fake.says_version = "7"
        if tells == "at the end":
            driver.do(begin(ONE, 5))
            await until(lambda: told.finished.keys() == {ONE, OTHER})
            assert {each.reason for each in told.finished.values()} == {"restart"}
        await until(lambda: told.lost)
        assert driver.version is None


# ---------------------------------------------------------------------------------------------- in process


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> FakeVllmInProcess:
    made = FakeVllmInProcess()
    made.install(monkeypatch)
    return made


async def test_in_process_a_core_that_dies_costs_no_token_that_came(here: FakeVllmInProcess) -> None:
    async with driving(VllmInProcess(Path("/models/tiny"))) as (driver, told):
        driver.do(begin(ONE, 100_000))
        await until(lambda: told.tokens.get(ONE))
        await change(driver, 2)
        assert told.lost == 0
        await until(lambda: ONE in told.current)
        here.engine.die()
        await until(lambda: told.lost)
        assert (driver.version, told.lost) == (None, 1)
        driver.do(Stop(ONE))
        count = len(told.tokens[ONE])
        assert told.tokens[ONE] == expected(5, count)
        assert {int(-logprob) for logprob in told.logprobs[ONE]} == {1, 2}
        await change(driver, 3)
        driver.do(begin(OTHER, 5))
        await until(lambda: OTHER in told.finished)
        assert told.logprobs[OTHER] == pytest.approx([logprob_of(3, position) for position in range(5)], abs=1e-3)
        assert len(told.tokens[ONE]) == count


async def test_in_process_what_vllm_refuses_fails_alone(here: FakeVllmInProcess) -> None:
    async with driving(VllmInProcess(Path("/models/tiny"))) as (driver, told):
        driver.do(Begin(ONE, struct.pack("<2i", 2, 5), b"", Sampling(5, 1, temperature=3.0)))
        driver.do(begin(OTHER, 5))
        await until(lambda: told.finished.keys() == {ONE, OTHER})
        assert (told.finished[ONE].reason, told.finished[OTHER].reason) == ("failed", "length")
        assert "temperature must be in [0, 2]" in str(told.finished[ONE].error)
        assert len(here.made) == 1


async def test_in_process_tokens_of_another_version_than_was_loaded_are_not_told_of(here: FakeVllmInProcess) -> None:
    async with driving(VllmInProcess(Path("/models/tiny"))) as (driver, told):
        here.versions_said = ["7"]
        driver.do(begin(ONE, 5))
        await until(lambda: ONE in told.finished)
        assert told.finished[ONE].reason == "restart"
        assert driver.version is None
