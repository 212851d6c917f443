"""asyncio: a controller that watches a model and says who holds what; it needs neither torch nor a GPU."""

import argparse
import asyncio
import sys

import tensorhub


async def watch(model: str, count: int) -> None:
    """Print so many version events of a model; 0 means all, until Ctrl-C."""
    async with await tensorhub.connect_async() as hub:
        # `hub.watch(model, after=event.seq)` would go on after an event that an earlier run has seen.
        async for event in hub.watch(model):
            holders = [
                name for each in await hub.versions(model) if each.version == event.version for name in each.holders
            ]
            print(f"{event.kind} {event.version}, now held by {', '.join(holders) or 'nobody'}")
            count -= 1
            if count == 0:
                return


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="example")
    parser.add_argument("--count", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(watch(options.model, options.count))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except tensorhub.TensorHubError as error:
        sys.exit(f"watch_async.py: {error}")
