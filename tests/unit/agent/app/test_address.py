"""Where an agent is reached."""

import pytest

from tensorhub_agent.app.address import own_address
from tensorhub_common.errors import AgentUnavailable


@pytest.mark.parametrize("given", ["10.0.0.12", "127.0.0.1", "fd00::2"])
def test_what_settings_say_is_taken(given: str) -> None:
    assert own_address(given, "nats://192.0.2.1:4222") == given


@pytest.mark.parametrize(
    "nats", ["nats://127.0.0.1:4222", "nats://user:secret@127.0.0.1:4222", "127.0.0.1", "nats://localhost"]
)
def test_a_hub_on_this_machine_is_reached_by_loopback(nats: str) -> None:
    assert own_address(None, nats) in ("127.0.0.1", "::1")


def test_the_first_of_several_servers_decides() -> None:
    assert own_address(None, "nats://127.0.0.1:4222,nats://192.0.2.1:4222") == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "nats"), [("somewhere", "nats://127.0.0.1"), (None, "nats://no-such-host.invalid:1")]
)
def test_what_can_not_be_found_says_what_to_set(given: str | None, nats: str) -> None:
    with pytest.raises(AgentUnavailable, match="TENSORHUB_ADDRESS"):
        own_address(given, nats)
