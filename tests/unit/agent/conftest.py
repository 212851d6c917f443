"""The fixture `last_resort`: what a fault that no owner handles reaches."""

from collections.abc import Iterator

import pytest
from tests.kit.fakes import LastResort

from tensorhub_common.runtime.supervision import set_last_resort


@pytest.fixture
def last_resort() -> Iterator[LastResort]:
    resort = LastResort()
    set_last_resort(resort.take)
    yield resort
    set_last_resort(None)
