"""An engine: fills its module with the latest version, generates, and fetches what is newer between two batches.

Start it before or after examples/trainer.py, as many as you like: `--name` tells them apart.
"""

import argparse
import sys

import torch
from torch import nn

import tensorhub


def main() -> None:
    """Follow the trainer until nothing newer comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="rollout-0")
    parser.add_argument("--patience", type=float, default=30, metavar="SECONDS")
    options = parser.parse_args()

    # On the meta device a module has no values, which is all that an engine needs: they come from the hub.
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    question = torch.ones(1, 8)

    with tensorhub.connect() as hub:
        engine = hub.register("example", model, replica=options.name, spot=True)
        version: int | None = engine.replicate("latest", timeout_s=options.patience)
        while version is not None:
            with torch.no_grad():
                print(f"version {version}: {model(question).item():.4f} (8 would be right)")
            version = engine.update(wait_s=options.patience)
        print(f"nothing newer came within {options.patience:g} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except tensorhub.TensorHubError as error:
        sys.exit(f"rollout.py: {error}")
