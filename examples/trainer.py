"""A trainer: its module stands in hub memory, and each step's weights become a version.

tensorhub up &
python examples/rollout.py &
python examples/trainer.py
"""

import argparse
import sys
from contextlib import suppress

import torch
from torch import nn

import tensorhub


def main() -> None:
    """Train for some steps and publish after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--resume",
        choices=("memory", "values"),
        default="memory",
        help="what an earlier trainer left behind goes on from its weights in the hub, or begins anew with these",
    )
    options = parser.parse_args()
    steps = options.steps

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    inputs = torch.randn(256, 8)
    targets = inputs.sum(dim=1, keepdim=True)

    with tensorhub.connect() as hub:
        # The parameters keep their identity, so an optimizer may be built before or after this.
        policy = hub.register("example", model, replica="trainer", resume=options.resume)
        if policy.version is not None:
            print(f"an earlier trainer published version {policy.version}; going on from its weights")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            # Waits until no engine reads the version before, and publishes the new one at the end. An engine that has
            # read a version holds it, and others read it from there.
            with policy.overwriting(publish=True):
                optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}, published version {policy.version}")
        # Without a terminal no Enter comes.
        with suppress(EOFError):
            input("Enter ends the trainer, and takes its last version with it: ")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except tensorhub.TensorHubError as error:
        sys.exit(f"trainer.py: {error}")
