"""A real FSDP2 trainer of four ranks, to an engine of two tensor-parallel ranks with fused tensors and to a whole one.

Everything is a process of its own, ranks talk to each other over gloo, weights go by the hub. What each engine holds is
compared byte by byte with numpy's answer from the trainer's full tensors, and what the models say with one another.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.llama import LAYERS
from tests.kit.llama_divided import Array, bits, divided
from tests.kit.processes import Peer
from tests.kit.transports import BOTH

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(180)]

PROGRAM = "from tests.integration.fsdp_ranks import main; main()"
TRAINERS, ENGINES, VERSIONS = 4, 2, 3


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BOTH)
async def hub(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), hosts=request.param) as running:
        yield running


def assert_equal(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert np.array_equal(found[name], array), name


async def all_do(ranks: list[Peer], *order: object) -> list[Any]:
    """Give all ranks an order, and return what each answered."""
    return await asyncio.gather(*(rank.ask(*order) for rank in ranks))


def saved(path: Path) -> tuple[dict[str, Array], torch.Tensor]:
    said = torch.load(path)
    return {name: bits(tensor) for name, tensor in said["tensors"].items()}, said["logits"]


@pytest.mark.parametrize(("role", "dtype"), [("trainer", "float32"), ("trainer", "bfloat16"), ("hybrid", "float32")])
async def test_engines_hold_and_say_what_the_trainer_does(
    hub: RunningHub, tmp_path: Path, role: str, dtype: str
) -> None:
    job = new_job()
    ranks = [
        *((role, str(rank), str(TRAINERS), 0) for rank in range(TRAINERS)),
        *(("tp", str(rank), str(ENGINES), 1) for rank in range(ENGINES)),
        ("whole", "0", "1", 1),
    ]
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                hub.program(
                    PROGRAM,
                    *arguments,
                    str(tmp_path),
                    dtype,
                    TENSORHUB_JOB=job,
                    TENSORHUB_AGENT=hub.file.agents[agent].socket,
                )
            )
            for *arguments, agent in ranks
        ]
        assert [json.loads(await each.line()) for each in started] == ["ready"] * len(ranks)
        trainers, engines = started[:TRAINERS], started[TRAINERS:]
        for version in range(1, VERSIONS + 1):
            await all_do(trainers, "step", version)
            shapes = await all_do(trainers, "save", version)
            assert await all_do(engines, "replicate", version) == [version] * len(engines)
            await all_do(engines, "save", version)
            await all_do(engines[:ENGINES], "load", version)
            check(tmp_path, version)
        if role == "trainer":
            assert any(0 in shape for shape in shapes[-1]), "the last rank has nothing of some tensors"
            assert shapes[0] != shapes[-1]


def check(directory: Path, version: int) -> None:
    whole, logits = saved(directory / f"trainer-{version}.pt")
    tensors, said = saved(directory / f"whole-{version}.pt")
    assert_equal(tensors, whole)
    # The same numbers in the same order of computing: not one bit may differ.
    assert np.array_equal(bits(said), bits(logits))
    for rank in range(ENGINES):
        tensors, said = saved(directory / f"tp{rank}-{version}.pt")
        assert_equal(tensors, divided(whole, rank, ENGINES))
        # The same engine, loaded without the hub from the trainer's own tensors, says the same to the last bit.
        loaded = torch.load(directory / f"tp{rank}-loaded-{version}.pt")
        assert np.array_equal(bits(said), bits(loaded))
        # A layer has two sums that ranks make each of a half. On either side such a sum is within one unit in the last
        # place of the true one, so both differ by at most two; so much for each sum may come through to the logits.
        bound = 2 * 2 * LAYERS * torch.finfo(logits.dtype).eps * logits.abs().max().item()
        differs = (said - logits).abs().max().item()
        print(f"version {version}, rank {rank}: differs by at most {differs:.3g} of {bound:.3g}")
        torch.testing.assert_close(said, logits, rtol=0, atol=bound)
