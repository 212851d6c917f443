"""The simulator's engine model on vLLM: fitted to its steps, then held against whole jobs that the fit has not seen.

    .venv-vllm/bin/python -m benchmarks.vllm.engine_model --layers 4 --hidden 512 --docs

The steps of even batches give the costs: fixed, for each request, for each context token. Prompts of several lengths,
one and several at once, give the speed of computing them. Then jobs of responses with drawn lengths run on the server,
and the same jobs on `EngineModel` with these costs. The fit is made before and after each job, since a shared machine
drifts.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.integrations.vllm.conftest import free_port
from tests.integrations.vllm.processes import VllmProcess

from benchmarks import page
from benchmarks.rollouts.trained_job import step_model
from benchmarks.vllm.model import VOCABULARY, saved_model
from tensorhub_common.protocol.rollout.messages import EngineStep, Sampling
from tensorhub_runner.servers.vllm import VllmServer
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.models.engine_model import EngineModel

PAGE: Final = page.DOCS / "rollouts" / "vllm.md"
BATCHES: Final = (1, 2, 4, 8, 16, 24, 32)
PROMPTS: Final = (16, 64, 128, 256)
PROMPTS_AT_ONCE: Final = (1, 4, 8)
STEPS: Final = 48
"""Tokens of each response of an even batch."""
SLOTS: Final = 32
PROMPT_TOKENS: Final = 32


@dataclass(frozen=True)
class Job:
    """Responses that one engine makes."""

    name: str
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    lengths: tuple[int, ...]
    """Tokens of each response."""
    begins_s: tuple[float, ...]
    """When each begins, from the first."""


@dataclass(frozen=True)
class Held:
    """A job as it ran, and as it was simulated: when each response ended, in s from the first beginning."""

    job: Job
    real: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def error(self) -> float:
        """By how much longer the whole is simulated to take, as a part of what it took."""
        return max(self.simulated) / max(self.real) - 1

    @property
    def errors(self) -> list[float]:
        """The same of each response, from its own beginning."""
        times = zip(self.job.begins_s, self.real, self.simulated, strict=True)
        return [(simulated - begin) / (real - begin) - 1 for begin, real, simulated in times]


def jobs(seed: int) -> list[Job]:
    """Return jobs of unlike shapes: all at once, a long tail, long prompts, and responses that begin one by one."""
    drawn = random.Random(seed)
    tail = tuple(min(300, 10 + int(drawn.paretovariate(1.2) * 15)) for _ in range(SLOTS))
    even = tuple(drawn.randrange(40, 120) for _ in range(12))
    begins = tuple(sorted(drawn.uniform(0, 4.0) for _ in range(SLOTS)))
    return [
        Job("12 responses at once", (PROMPT_TOKENS,) * 12, even, (0.0,) * 12),
        Job("32 with a long tail", (PROMPT_TOKENS,) * SLOTS, tail, (0.0,) * SLOTS),
        Job("16 behind long prompts", tuple(drawn.randrange(100, 300) for _ in range(16)), (60,) * 16, (0.0,) * 16),
        Job("32 that begin within 4 s", (PROMPT_TOKENS,) * SLOTS, tail, begins),
    ]


class Engine:
    """A server, and tokens of it with the times at which they came."""

    def __init__(self, url: str) -> None:
        """Prepare."""
        self._server = VllmServer(url)
        self._drawn = random.Random(1)

    async def response(self, prompt: int, tokens: int) -> list[float]:
        """Make one response behind a prompt that no cache has; return when each of its tokens came."""
        context = [self._drawn.randrange(VOCABULARY) for _ in range(prompt)]
        came: list[float] = []
        async for each in self._server.generate("bench", context, Sampling(tokens, 1, temperature=0.0), 0):
            came += [time.perf_counter()] * len(each.tokens)
        return came

    async def steps(self) -> list[EngineStep]:
        """Return the steps of even batches in which all generate, prompts excepted."""
        found = []
        for batch in BATCHES:
            came = await asyncio.gather(*(self.response(PROMPT_TOKENS, STEPS) for _ in range(batch)))
            # A step ends when the first stream has its token.
            ends = [min(times) for times in zip(*came, strict=True)]
            for step, (last, end) in enumerate(pairwise(ends[2:]), start=3):
                found.append(EngineStep(batch, float(PROMPT_TOKENS + step), end - last))
        return found

    async def prefill_tokens_per_s(self) -> float:
        """Return how fast prompts are computed, by least squares over the tokens of all that begin at once."""
        found = []
        for count, prompt in [(count, prompt) for count in PROMPTS_AT_ONCE for prompt in PROMPTS] * 2:
            began = time.perf_counter()
            came = await asyncio.gather(*(self.response(prompt, 1) for _ in range(count)))
            found.append((count * prompt, max(times[0] for times in came) - began))
        slope, _ = statistics.linear_regression([each[0] for each in found], [each[1] for each in found])
        return 1 / slope

    async def ends(self, job: Job) -> tuple[float, ...]:
        """Run a job; return when each response ended."""
        began = time.perf_counter()

        async def one(prompt: int, length: int, begin_s: float) -> float:
            await asyncio.sleep(began + begin_s - time.perf_counter())
            return (await self.response(prompt, length))[-1] - began

        return tuple(await asyncio.gather(*map(one, job.prompts, job.lengths, job.begins_s)))

    async def close(self) -> None:
        """Let go of the server."""
        await self._server.close()


def simulated(job: Job, costs: EngineCosts) -> tuple[float, ...]:
    """Return when each response ends on the simulator's engine."""
    engine, ends = EngineModel[int](costs, 0.0), [0.0] * len(job.lengths)
    waiting = [*enumerate(zip(job.prompts, job.lengths, job.begins_s, strict=True))]
    while waiting or engine.has_work:
        next_end = engine.next_at()
        if waiting and (next_end is None or waiting[0][1][2] <= next_end):
            number, (prompt, length, begin_s) = waiting.pop(0)
            while (made := engine.advance(begin_s)) is not None:
                for each in made.ended:
                    ends[each] = engine.at
            engine.begin(number, prompt, length, begin_s)
            continue
        assert next_end is not None
        while (made := engine.advance(next_end)) is not None:
            for each in made.ended:
                ends[each] = engine.at
    return tuple(ends)


async def costs(engine: Engine) -> tuple[EngineCosts, list[float]]:
    """Fit the costs; return by what part each step differs from them."""
    steps = await engine.steps()
    fitted = step_model(steps)
    assert fitted is not None
    errors = [fitted.seconds(each.batch, each.context_tokens) / each.seconds - 1 for each in steps]
    prefill = await engine.prefill_tokens_per_s()
    return EngineCosts(fitted.fixed_s, fitted.each_s, fitted.attention_s, prefill, SLOTS), errors


async def measure(layers: int, hidden: int, rounds: int, folder: Path) -> str:
    """Fit, run and simulate; return what was found."""
    saved_model(folder / "model", layers, hidden)
    process = VllmProcess(folder / "model", free_port(), folder / "server.log")
    process.start()
    found, fits = [], []
    try:
        await process.ready()
        engine = Engine(process.url)
        await engine.response(PROMPT_TOKENS, STEPS)  # The first response fills caches of the process.
        fits.append(await costs(engine))
        for job in [job for seed in range(rounds) for job in jobs(seed)]:
            real = await engine.ends(job)
            fits.append(await costs(engine))
            # The machine is taken to be as fast as before and after.
            found.append(Held(job, real, simulated(job, between(fits[-2][0], fits[-1][0]))))
        await engine.close()
    finally:
        process.kill()
    return text(found, fits)


def between(one: EngineCosts, other: EngineCosts) -> EngineCosts:
    """Return the middle of two."""
    return EngineCosts(
        (one.fixed_s + other.fixed_s) / 2,
        (one.each_s + other.each_s) / 2,
        (one.attention_s + other.attention_s) / 2,
        (one.prefill_tokens_per_s + other.prefill_tokens_per_s) / 2,
        SLOTS,
    )


def text(found: Sequence[Held], fits: Sequence[tuple[EngineCosts, list[float]]]) -> str:
    """Return the errors in a sentence, and each job in a row."""
    steps = [abs(error) for _, errors in fits for error in errors]
    jobs_off = [abs(each.error) for each in found]
    responses = [abs(error) for each in found for error in each.errors]
    first = fits[0][0]
    rows = [
        [
            each.job.name,
            f"{max(each.real):.2f}",
            f"{max(each.simulated):.2f}",
            f"{each.error:+.1%}",
            f"{statistics.median(map(abs, each.errors)):.1%}",
            f"{max(map(abs, each.errors)):.1%}",
        ]
        for each in sorted(found, key=lambda each: each.job.name)
    ]
    head = ["job", "s", "simulated", "error", "of a response", "at worst"]
    return (
        f"A step takes {1000 * first.fixed_s:.2f} ms, {1e6 * first.each_s:.0f} µs for each response and "
        f"{1e9 * first.attention_s:.0f} ns for each context token; {first.prefill_tokens_per_s:.0f} tokens of prompts "
        f"are computed in a second. The {len(steps)} steps of even batches are off by {statistics.median(steps):.1%} "
        f"in the median and {statistics.quantiles(steps, n=20)[-1]:.1%} in the 95th percentile.\n\n"
        f"Of {len(found)} jobs that the fit has not seen, the time is off by {statistics.median(jobs_off):.1%} in the "
        f"median and {max(jobs_off):.1%} at worst; of their {len(responses)} responses, each from its own beginning, "
        f"by {statistics.median(responses):.1%} and {max(responses):.1%}.\n\n{page.table(head, rows)}"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = asyncio.run(measure(given.layers, given.hidden, given.rounds, Path(folder)))
    sys.stdout.write(f"{made}\n")
    if given.docs:
        page.write("vllm-engine-model", made, PAGE)


if __name__ == "__main__":
    main()
