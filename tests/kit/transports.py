"""The two transports, as a parameter of tests: on one host bytes go by shared memory, between two over ucxx."""

import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import pytest

HAS_UCX: Final = importlib.util.find_spec("ucxx") is not None
NEEDS_UCX: Final = pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'tensorhub[agent]'")
LOCAL: Final = pytest.param(1, id="local")
UCXX: Final = pytest.param(2, id="ucxx", marks=NEEDS_UCX)
BOTH: Final = (LOCAL, UCXX)
"""The number of hosts that the agents pretend to be on."""

HUB_OF: Final = {1: "hub_on_one_host", 2: "hub_on_two_hosts"}
"""The session's hubs with two agents on so many hosts (tests/integration/conftest.py)."""

UCXX_AND_LONG_LOCAL: Final = (pytest.param(1, id="local", marks=pytest.mark.long), UCXX)
"""For files of many tests: `make test` has them over ucxx, `make long` over both."""

UCXX_AND_SLOW_LOCAL: Final = (pytest.param(1, id="local", marks=pytest.mark.slow), UCXX)
"""For tests of seconds: what is shown over ucxx in the default suite is shown over both among the slow ones."""


def hub_over(transports: Sequence[Any]) -> Any:
    """Return a fixture: the session's hub over each of these transports."""

    @pytest.fixture(scope="module", params=transports)
    def hub(request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue(HUB_OF[request.param])

    return hub
