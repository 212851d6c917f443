"""A rollout of the demo: follows the trainer's versions, and generates with each.

Start it before or after the trainer, in any number, each with its own name:
python -m tensorhub.demo.rollout DIGESTS --name rollout-1     (DIGESTS: the directory that the trainer writes to)
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import torch

import tensorhub
from tensorhub.demo import verify
from tensorhub.demo.model import MODEL, build_empty, generate

TRY_AGAIN = (
    tensorhub.AgentUnavailable,
    tensorhub.RegistryUnavailable,
    tensorhub.RoundTimeout,
    tensorhub.VersionUnavailable,
)
TROUBLES_MAX = 10


def main() -> None:
    """Follow until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("digests", type=Path)
    parser.add_argument("--name", default="rollout-1")
    options = parser.parse_args()
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))

    torch.seed()  # Each rollout draws other words.
    model = build_empty()
    with tensorhub.connect() as hub:
        # The module gets memory of the hub, which each read fills. Where it runs it may be taken away at any moment.
        engine = hub.register(MODEL, model, replica=options.name, spot=True)
        troubles = 0
        while not stopped:
            try:
                if engine.version is None:
                    version: int | None = engine.replicate("latest", timeout_s=60)
                else:
                    version = engine.update(wait_s=1)
            except TRY_AGAIN as error:
                troubles += 1
                if troubles == TROUBLES_MAX:
                    raise
                verify.report("trouble", error=type(error).__name__, message=str(error))
                time.sleep(0.2)
                continue
            troubles = 0
            if version is None:
                continue
            differing = verify.differing(options.digests, version, model)
            read = engine.last_read
            verify.report(
                "held",
                version=version,
                nbytes=verify.nbytes(model),
                differing=differing,
                says=generate(model),
                sources=read.sources if read else (),
                wire_s=read.wire_s if read else None,
            )
        if engine.version is not None:
            differing = verify.differing(options.digests, engine.version, model)
            verify.report("end", version=engine.version, nbytes=verify.nbytes(model), differing=differing)


if __name__ == "__main__":
    try:
        main()
    except tensorhub.TensorHubError as error:
        sys.exit(f"{sys.argv[-1]}: {error}")
