"""How long a command may take."""

import pytest

import tensorhub
from tensorhub.cli.runner import CommandDeadline


def test_a_call_for_which_no_time_is_left_is_not_made() -> None:
    """Made all the same, it would say that nobody answered, and nobody was asked."""
    bound = CommandDeadline(0.0)
    assert bound.ends_within(0.0)
    with pytest.raises(tensorhub.TensorHubError, match="within 0 s, and was asking the registry then"):
        bound.left_s("asking the registry")


def test_a_call_gets_a_little_less_than_what_is_left() -> None:
    """So that its own error comes before that of the command."""
    bound = CommandDeadline(1000.0)
    assert not bound.ends_within(10.0)
    assert 10.0 < bound.left_s("asking the registry") < 1000.0
    assert bound.ends_within(1000.0)
