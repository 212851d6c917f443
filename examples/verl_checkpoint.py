"""verl's checkpoint engine "tensorhub" by itself: what an actor sends, a rollout worker receives, bit for bit.

tensorhub up &
python examples/verl_checkpoint.py

In verl two settings do it (docs/guides/verl.md); this makes the calls that verl's CheckpointEngineManager makes.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

import tensorhub
from tensorhub.integrations.verl import TensorHubCheckpointEngine  # It registers the backend, too.


def weights_at(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an actor's tensors by name."""
    yield "layer.weight", torch.full((256, 256), float(step))
    yield "layer.bias", torch.arange(256, dtype=torch.bfloat16) + step


async def update(actor: TensorHubCheckpointEngine, rollouts: list[TensorHubCheckpointEngine], step: int) -> None:
    """Have each rollout worker receive what the actor sends."""
    engines = [actor, *rollouts]
    ours, theirs = type(actor).build_topology(1, len(rollouts), [each.prepare() for each in engines])
    for rank, engine in enumerate(rollouts):
        engine.init_process_group(**{name: values[rank] for name, values in theirs.items()})
    actor.init_process_group(**{name: values[0] for name, values in ours.items()})

    async def received(engine: TensorHubCheckpointEngine) -> bool:
        found = {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}
        return all(torch.equal(found[name], tensor) for name, tensor in weights_at(step))

    sent = actor.send_weights(weights_at(step), global_steps=step)
    _, *are_equal = await asyncio.gather(sent, *(received(each) for each in rollouts))
    for engine in engines:
        engine.finalize()
    print(f"step {step}: {len(rollouts)} workers, equal: {all(are_equal)}")


async def run(steps: int) -> None:
    """Make the engines by verl's registry, and update some times; then one more worker joins."""
    actor = CheckpointEngineRegistry.new("tensorhub", is_master=True, bucket_size=0)
    rollouts = [CheckpointEngineRegistry.new("tensorhub", bucket_size=0) for _ in range(2)]
    try:
        for step in range(steps):
            await update(actor, rollouts, step)
        rollouts.append(CheckpointEngineRegistry.new("tensorhub", bucket_size=0))
        await update(actor, rollouts, steps)
    finally:
        for engine in [*rollouts, actor]:
            engine.close()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    asyncio.run(run(parser.parse_args().steps))


if __name__ == "__main__":
    try:
        main()
    except tensorhub.TensorHubError as error:
        sys.exit(f"verl_checkpoint.py: {error}")
