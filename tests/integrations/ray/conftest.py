"""One Ray cluster for all of these tests; each has a hub of its own on it."""

from collections.abc import Iterator

import pytest
from tests.integrations.ray.two_nodes import TwoNodes, two_nodes


@pytest.fixture(scope="session")
def cluster() -> Iterator[TwoNodes]:
    """Return a cluster of a head and two nodes, each of which takes a runner."""
    with two_nodes() as running:
        yield running
