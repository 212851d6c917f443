"""Errors: one word names one fault, from the fold to the caller's `except`."""

import inspect

import pytest

from tensorhub_common import errors
from tensorhub_common.errors import TensorHubError, from_code

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TensorHubError) and kind is not TensorHubError
]


def test_all_errors_that_the_design_promises_cross_the_wire_by_their_names_and_say_what_they_mean() -> None:
    promised = (
        "VersionUnavailable VersionConflict LayoutMismatch NotPublished NotFilled DrainTimeout RoundTimeout "
        "IntegrityError ReplicaConflict MemoryExhausted RetentionFull AgentUnavailable RegistryUnavailable InvalidName"
    )
    assert set(promised.split()) <= {kind.__name__ for kind in KINDS}
    for kind in KINDS:
        error = kind("what was wrong, and what to do")
        again = from_code(error.code, str(error))
        assert (type(again), str(again)) == (kind, str(error))
        assert kind.__doc__


@pytest.mark.parametrize("code", ["", "ValueError", "Nonsense", "TensorHubError", "from_code", "\x00"])
def test_a_name_that_nobody_knows_becomes_the_root_class(code: str) -> None:
    error = from_code(code, "message")
    assert type(error) is TensorHubError
    assert str(error) == "message"
