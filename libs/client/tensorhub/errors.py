"""Errors that several parts of the SDK raise alike."""

from tensorhub_common.errors import AgentUnavailable


def closed_error() -> AgentUnavailable:
    """Return the error for whatever is asked of a hub after its end."""
    return AgentUnavailable("this hub is closed: call tensorhub.connect() again")
