"""The fixture `last_resort`: what a fault that no owner handles reaches."""

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.kit.fakes import LastResort

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_common.runtime.supervision import set_last_resort


@pytest.fixture
def last_resort() -> Iterator[LastResort]:
    resort = LastResort()
    set_last_resort(resort.take)
    yield resort
    set_last_resort(None)


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    """A pool of two threads."""
    pool = CopyPool(2)
    yield pool
    pool.close()
