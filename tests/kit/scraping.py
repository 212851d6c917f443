"""What the metrics page of a hub's process shows."""

import asyncio
import re
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(hub: RunningHub, process: str) -> Samples:
    """Return what a process's page shows; after a restart the last line of its log says where that is."""
    url = str(re.findall(r"metrics at (http://\S+)", hub.log(process))[-1])

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:  # noqa: S310 (a page of our own)
            return bytes(answer.read()).decode()

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
