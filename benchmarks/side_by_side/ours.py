"""TensorHub as a contender: a hub of real processes, one trainer and four readers, each on an agent of its own."""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet import READERS, Fleet
from benchmarks.llama import shapes
from benchmarks.processor import used_s
from benchmarks.side_by_side.contender import Failed, Took
from tensorhub._control.hub_file import HubFile
from tensorhub.local.hub import LocalHub

MODEL: Final = "large"
HOSTS: Final = {"local": 1, "ucxx": 1 + READERS}
"""How many hosts a hub pretends to have, so that every read takes this transport."""

STAGES: Final = ("round", "plan", "lease", "start", "first", "wire", "verify", "ready")


class Ours:
    """A hub over one transport, with digests or without. Its fleet stays when it stops."""

    def __init__(
        self, title: str, fleet: Fleet, mib: int, *, transport: str, digests: bool, environment: Mapping[str, str]
    ) -> None:
        self.title = title
        self._fleet, self._mib, self._transport = fleet, mib, transport
        self._environment = dict(environment) | {"TENSORHUB_DIGESTS": "on" if digests else "off"}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._up: LocalHub | None = None

    @property
    def hub(self) -> HubFile:
        """What runs."""
        assert self._up is not None, "start it first"
        return self._up.hub

    @property
    def directory(self) -> Path:
        """Where it keeps its state."""
        assert self._folder is not None, "start it first"
        return Path(self._folder.name)

    @property
    def fleet(self) -> Fleet:
        """Whom it serves."""
        return self._fleet

    @property
    def transport(self) -> str:
        """What every read has to take."""
        return self._transport

    async def start(self) -> None:
        """Bring the hub up, and register everybody."""
        self._folder = tempfile.TemporaryDirectory(prefix="tensorhub-bench-")
        up = LocalHub(
            Path(self._folder.name), agents=1 + READERS, hosts=HOSTS[self._transport], environment=self._environment
        )
        await up.start()
        self._up = up
        await self._fleet.register(up.hub, MODEL, shapes(self._mib))

    async def run(self, readers: int) -> Took:
        """Change every element and publish, then time how the readers fetch it at the same time."""
        await self._fleet.trainer.ask("change")
        published = await self._fleet.trainer.ask("publish")
        source = (self.hub.agents[0].pid, self._fleet.trainer.pid)
        before_s = used_s(source)
        reads = await asyncio.gather(*(reader.ask("update") for reader in self._fleet.readers[:readers]))
        source_s = used_s(source) - before_s
        check_reads(reads, published["version"], self._transport)
        unpublished = await self._fleet.trainer.ask("unpublish")
        besides = stages(reads) | {
            "publish": published["end"] - published["begin"],
            "unpublish": unpublished["end"] - unpublished["begin"],
            "source's processor": source_s,
        }
        return Took(max(read["end"] for read in reads) - min(read["begin"] for read in reads), besides)

    async def check(self) -> None:
        """Compare every reader's bytes with the trainer's; all have read the last version when four did."""
        await self.run(READERS)
        await self._fleet.check_equal()

    async def stop(self) -> None:
        """Release everything and end the hub."""
        if self._up is not None:
            await self._fleet.close()
            await self._up.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._up = self._folder = None


def check_reads(reads: list[Any], version: int, transport: str) -> None:
    """Raise unless all have read this version, over this transport alone."""
    for read in reads:
        if read["version"] != version:
            raise Failed(f"a reader read version {read['version']} instead of {version}")
        taken = {source["transport"] for source in read["report"]["sources"]}
        if taken != {transport}:
            raise Failed(f"a read took {' and '.join(sorted(taken))} instead of {transport}")


def stages(reads: list[Any]) -> dict[str, float]:
    """Return the seconds of each stage in the read that took longest."""
    longest = max(reads, key=lambda read: float(read["end"]) - float(read["begin"]))
    return {stage: longest["report"]["stages"][f"{stage}_s"] for stage in STAGES}
