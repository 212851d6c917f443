"""Two raylets with an agent and a runner each; one node is killed, and the job goes on."""

from collections import Counter
from pathlib import Path

import pytest
from tests.integrations.ray.two_nodes import RESPONSES, TwoNodes, hub_on, kill_a_node

pytestmark = pytest.mark.timeout(600)


def test_a_node_is_killed_and_the_job_goes_on(cluster: TwoNodes, tmp_path: Path) -> None:
    """Each response comes once, and is token for token what its versions' weights make undisturbed."""
    with hub_on(tmp_path) as hub:
        assert len({*hub.runners().values()}) == 2, "each runner is on a node of its own"
        killed = kill_a_node(cluster, hub)
    came = Counter((each.group, each.index) for each in killed.found.responses)
    assert len(came) == RESPONSES
    assert set(came.values()) == {1}
    assert not killed.found.wrongs, killed.found.wrongs[:5]
    assert killed.first_tokens_s, "responses moved"
    both = [each for each in killed.found.responses if len({run.instance for run in each.runs}) == 2]
    assert both, "some have tokens of both nodes"
