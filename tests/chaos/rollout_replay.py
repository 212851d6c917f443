"""Responses of killed runners and of versions that come meanwhile, saved, and scored again by `tensorhub replay`.

`python -m tests.chaos.rollout_replay --responses 100` takes a few minutes. Every run of every response must be
confirmed. Then one response is changed in several ways, and each of these must be told.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.bounds import WAIT_S
from tests.chaos.rollout_exact import GROUP_SIZE, SAMPLING, Exactness, generating, strike
from tests.kit.hubs import RunningHub
from tests.kit.tiny_engines import fill
from tests.kit.waiting import until
from transformers import PreTrainedModel

import tensorhub


class Said(NamedTuple):
    """How a replay ended."""

    code: int
    out: str
    err: str

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """What it said as JSON, one response a line."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Replayed:
    """What `replay` said of the responses as they came, and of changed ones."""

    made: Exactness
    said: Said
    as_json: Said
    changed: dict[str, Said] = field(default_factory=dict)
    """By what was changed."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All token runs, with what was said of them."""
        return [each for verdict in self.as_json.verdicts for each in verdict["runs"]]


async def run(
    directory: Path, *, responses: int, kills: int, publishes: int, seed: int = 1, on_update: Any = "continue"
) -> Replayed:
    """Generate while runners are killed and versions come, then replay."""
    file, chance, exact = directory / "rollouts.jsonl", random.Random(seed), Exactness(versions=1 + publishes)
    async with generating(directory, responses, chance, on_update=on_update, retained=1 + publishes) as job:
        taking = asyncio.create_task(_take(job.rollouts, exact, file))
        striking = asyncio.create_task(strike(job.hub, job.rollouts, exact, kills, chance))
        publishing = asyncio.create_task(_publish(job.weights, job.module, publishes, responses, exact))
        await taking
        striking.cancel()
        publishing.cancel()
        said = await _replay(job.hub, file, job.config)
        found = Replayed(exact, said, await _replay(job.hub, file, job.config, "--json"))
        for what, lines in _changed(file.read_text().splitlines(), chance).items():
            other = directory / f"{what}.jsonl"
            other.write_text("".join(f"{line}\n" for line in lines))
            found.changed[what] = await _replay(job.hub, other, job.config, "--json")
    return found


async def _take(rollouts: tensorhub.AsyncRollouts, found: Exactness, file: Path) -> None:
    async for batch in rollouts.batches(1, wait_s=10 * WAIT_S):
        found.responses += batch.responses
        await batch.save(file)
        await batch.done()


async def _publish(
    weights: tensorhub.AsyncShard, module: PreTrainedModel, publishes: int, responses: int, found: Exactness
) -> None:
    """Publish a version each time that another part of the responses has come."""
    for version in range(2, 2 + publishes):
        due = (version - 1) * responses // (2 + publishes)
        await until(lambda: len(found.responses) >= due, timeout_s=10 * WAIT_S)  # noqa: B023 (it is over before the next)
        async with weights.overwriting():
            fill(module, version)
        await weights.publish(version)


async def _replay(hub: RunningHub, file: Path, config: Path, *more: str) -> Said:
    return Said(*await hub.command("replay", file, "--model", config, *more))


def _changed(lines: list[str], chance: random.Random) -> dict[str, list[str]]:
    """Return one response of the file in several forms, each with one thing changed."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    record = max(records, key=lambda each: len(each["runs"]))
    at = chance.randrange(len(record["token_ids"]) - 1)
    run = next(each for each in record["runs"] if each["start"] <= at < each["end"])
    stop = SAMPLING.stop_token_ids[0]

    def with_(name: str, place: int, value: object) -> dict[str, Any]:
        values = [*record[name]]
        values[place] = value
        return {**record, name: values}

    other = next(each for each in (5, 6) if each not in {record["token_ids"][at], stop})
    changes = {
        "token": with_("token_ids", at, other),
        "logprob": with_("logprobs", at, record["logprobs"][at] - 1e-5),
        "root": record | {"runs": [each | ({"root": "0" * 32} if each == run else {}) for each in record["runs"]]},
        "seed": record | {"seed": record["seed"] ^ 1},
        "gone": record | {"runs": [each | {"version": each["version"] + 1000} for each in record["runs"]]},
        "kept": record | {"runs": [each | {"kv": "kept"} for each in record["runs"]]},
    }
    return {what: [json.dumps(each)] for what, each in changes.items()}


def main() -> None:
    """Run and say what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=100)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--publishes", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on-update", choices=("continue", "keep", "restart"), default="continue")
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
                on_update=options.on_update,
            )
        )
    sys.stdout.write(f"{found.said.out}{found.said.err}exit code {found.said.code}\n\n")
    for what, said in found.changed.items():
        told = [each for verdict in said.verdicts for each in verdict["runs"] if each["verdict"] != "confirmed"]
        sys.stdout.write(f"{what} changed: exit code {said.code}; {told[0]['verdict']}: {told[0]['reason']}\n")
    runs = found.runs
    versions, rootless = len({each["version"] for each in runs}), sum(not each["root"] for each in runs)
    # A cache that was kept is of several versions.
    to_confirm = [each for each in runs if each["kv"] != "kept"]
    confirmed = sum(each["verdict"] == "confirmed" for each in to_confirm)
    sys.stdout.write(
        f"\n{len(found.made.responses)} responses, {found.made.kills} runners killed, attempts of a response: "
        f"{dict(sorted(found.made.moves.items()))}; {confirmed} of {len(to_confirm)} runs of "
        f"{versions} versions confirmed, {rootless} without a root, in {time.monotonic() - began:.0f} s\n"
    )
    sys.exit(confirmed != len(to_confirm) or len(found.made.responses) != options.responses // GROUP_SIZE * GROUP_SIZE)


if __name__ == "__main__":
    main()
