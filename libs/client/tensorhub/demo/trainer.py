"""The demo's trainer: each optimizer step writes a version into hub memory and publishes it there.

tensorhub up &
python -m tensorhub.demo.trainer DIGESTS     (DIGESTS: a directory for the digests of each version)
"""

import argparse
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch

import tensorhub
from tensorhub.demo import verify
from tensorhub.demo.model import MODEL, batches, build

TRY_AGAIN = (tensorhub.AgentUnavailable, tensorhub.RegistryUnavailable, tensorhub.RoundTimeout)
TROUBLES_MAX = 10


def main() -> None:
    """Train until there are enough versions, then keep the last one until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("digests", type=Path)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0, help="train for at least this long")
    options = parser.parse_args()
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    text = batches()
    with tensorhub.connect() as hub:
        # The parameters move into hub memory and stay the objects that the optimizer knows.
        policy = hub.register(MODEL, model, replica="trainer")
        ends_at, published, troubles = time.monotonic() + options.seconds, 0, 0
        for version in count(1):
            batch = next(text)
            loss = model(input_ids=batch, labels=batch).loss  # Rollouts may read the version before meanwhile.
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            try:
                # Waits until no reader is left, and publishes at the end of the block.
                with policy.overwriting(publish=True, version=version):
                    optimizer.step()
                    verify.record(options.digests, version, model)
            except TRY_AGAIN as error:  # A registry or an agent is away: the next step publishes.
                troubles += 1
                if stopped or troubles == TROUBLES_MAX:
                    raise
                verify.report("trouble", error=type(error).__name__, message=str(error))
                continue
            published, troubles = published + 1, 0
            verify.report("published", version=version, loss=loss.item())
            if stopped or (published >= options.versions and time.monotonic() >= ends_at):
                break
        verify.report("trained", version=version)
        while not stopped:
            time.sleep(0.05)
        differing = verify.differing(options.digests, version, model)
        verify.report("end", version=version, nbytes=verify.nbytes(model), differing=differing)


if __name__ == "__main__":
    try:
        main()
    except tensorhub.TensorHubError as error:
        sys.exit(f"trainer: {error}")
