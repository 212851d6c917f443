"""Responses of the torch engine in float64, killed or moved at random tokens: bit for bit those of an undisturbed run.

`python -m tests.chaos.rollout_exact --responses 300` takes a few minutes. With `--publishes` versions come meanwhile,
and each run of tokens is compared with what its version's weights make behind the same tokens.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.tiny_engines import SIZES, VOCABULARY, Desk, Response, engine_of, fill
from tests.kit.waiting import until_answer
from transformers import PreTrainedModel

import tensorhub
from tensorhub.local.hub import LocalRollouts
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_runner.engines.models import build

MODEL: Final = "policy"
CONFIG: Final[dict[str, Any]] = {**SIZES, "model_type": "llama", "max_position_embeddings": 512}
SAMPLING: Final = tensorhub.Sampling(max_tokens=160, temperature=0.9, top_p=0.95, seed=5, stop_token_ids=(3,))
GROUP_SIZE: Final = 4
SETTLE_S: Final = 0.3


def made(version: int) -> PreTrainedModel:
    """Return the model with the weights of a version."""
    model = build(CONFIG, torch.float32)
    fill(model, version)
    return model


@dataclass
class Exactness:
    """What came, and what was wrong with it."""

    responses: list[tensorhub.Response] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    kills: int = 0
    versions: int = 1

    @property
    def moves(self) -> Counter[int]:
        """How many responses were made by how many attempts."""
        return Counter(len({run.attempt for run in each.runs}) for each in self.responses)

    def compare(self) -> None:
        """Compare each run with what its version's weights make behind the tokens before it, alone in an engine."""
        desks = {
            version: Desk(engine_of(made(version)))
            for version in {int(v) for each in self.responses for v in each.versions}
        }
        for each in self.responses:
            self._compare(each, desks)

    def _compare(self, response: tensorhub.Response, desks: dict[int, Desk]) -> None:
        where = f"{response.group}/{response.index}"
        tokens, logprobs = response.token_ids.tolist(), response.logprobs.tolist()
        if response.finish_reason not in {"stop", "length"}:
            self.wrongs.append(f"{where} ended by {response.finish_reason}: {response.error}")
        at = 0
        while at < len(tokens):
            version = int(response.versions[at])
            end = next((i for i in range(at, len(tokens)) if response.versions[i] != version), len(tokens))
            drawn = SAMPLING.checked()
            sampling = messages.Sampling(
                end,
                response.seed,
                drawn.temperature,
                drawn.top_p,
                drawn.top_k,
                drawn.stop_token_ids if end == len(tokens) else (),
            )
            before = Response(Attempt(1, 1), tokens[:at], logprobs[:at])
            right = desks[version].begin(response.prompt_ids.tolist(), sampling, before)
            desks[version].run()
            if (right.tokens, right.logprobs) != (tokens[:end], logprobs[:end]):
                self.wrongs.append(f"{where}: tokens {at} to {end} are not those of version {version}")
            at = end


class Generating(NamedTuple):
    """A job whose prompts are submitted, while three runners generate with version 1."""

    hub: RunningHub
    config: Path
    """The folder of the model's config.json."""
    module: PreTrainedModel
    weights: tensorhub.AsyncShard
    rollouts: tensorhub.AsyncRollouts


@asynccontextmanager
async def generating(
    directory: Path, responses: int, chance: random.Random, *, on_update: Any, retained: int | None = None
) -> AsyncGenerator[Generating]:
    """Have a hub in a directory, and a trainer that retains so many versions; None: as a hub does."""
    config = directory / "model"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    plan = LocalRollouts(3, model=config, managers=2)
    async with running_hub(directory / "hub", 2, rollouts=plan) as hub, await hub.connect("default") as trainer:
        module = made(1)
        weights = await trainer.register(MODEL, module, replica="trainer")
        if retained is not None:
            await trainer.retain(MODEL, last=retained)
        await weights.publish(1)
        # With `arrival` an instance leaves out versions, and all of a few responses may be of the first one.
        rollouts = await trainer.rollouts(
            MODEL, group_size=GROUP_SIZE, sampling=SAMPLING, staleness=1000, on_update=on_update, policy="rlboost"
        )
        await until_answer(rollouts.status, lambda said: sum(e.state == "serving" for e in said.instances) == 3)
        prompts = [
            tensorhub.Prompt([chance.randrange(4, VOCABULARY) for _ in range(chance.randrange(1, 24))], id=f"p{number}")
            for number in range(responses // GROUP_SIZE)
        ]
        await rollouts.submit(prompts)
        yield Generating(hub, config, module, weights, rollouts)


async def run(
    directory: Path, *, responses: int, kills: int, publishes: int = 0, seed: int = 1, on_update: Any = "continue"
) -> Exactness:
    """Generate while runners are killed and versions come; return what came, compared."""
    chance, found = random.Random(seed), Exactness(versions=1 + publishes)
    async with generating(directory, responses, chance, on_update=on_update) as job:
        taking = asyncio.create_task(_take(job.rollouts, found))
        striking = asyncio.create_task(strike(job.hub, job.rollouts, found, kills, chance))
        publishing = asyncio.create_task(_publish(job.weights, job.module, publishes, taking))
        await taking
        striking.cancel()
        publishing.cancel()
    await asyncio.to_thread(found.compare)
    return found


async def _take(rollouts: tensorhub.AsyncRollouts, found: Exactness) -> None:
    async for batch in rollouts.batches(1, wait_s=10 * WAIT_S):
        found.responses += batch.responses
        await batch.done()


async def strike(
    hub: RunningHub, rollouts: tensorhub.AsyncRollouts, found: Exactness, kills: int, chance: random.Random
) -> None:
    """Kill one runner after the other, each time that tokens flow again."""
    while found.kills < kills:
        await until_answer(rollouts.status, lambda said: sum(bool(e.executing) for e in said.instances) >= 2)
        await asyncio.sleep(chance.uniform(0, SETTLE_S))
        hub.kill(f"runner-{chance.randrange(3)}")
        found.kills += 1


async def _publish(
    weights: tensorhub.AsyncShard, module: PreTrainedModel, publishes: int, taking: "asyncio.Task[None]"
) -> None:
    for version in range(2, 2 + publishes):
        await asyncio.sleep(SETTLE_S)
        if taking.done():
            return
        async with weights.overwriting():
            fill(module, version)
        await weights.publish(version)


def main() -> None:
    """Run and say what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=300)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--publishes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            run(
                Path(folder),
                responses=options.responses,
                kills=options.kills,
                publishes=options.publishes,
                seed=options.seed,
            )
        )
    versions = len({int(v) for each in found.responses for v in each.versions})
    sys.stdout.write(
        f"{len(found.responses)} responses with {sum(len(e.token_ids) for e in found.responses)} tokens of {versions} "
        f"versions, {found.kills} runners killed, attempts of a response: {dict(sorted(found.moves.items()))}; "
        f"{len(found.wrongs)} wrong, in {time.monotonic() - began:.0f} s\n"
    )
    for wrong in found.wrongs[:20]:
        sys.stdout.write(f"  {wrong}\n")
    sys.exit(bool(found.wrongs) or len(found.responses) != options.responses // GROUP_SIZE * GROUP_SIZE)


if __name__ == "__main__":
    main()
