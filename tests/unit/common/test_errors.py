"""Errors: one word names one fault, from the fold to the caller's `except`."""

import inspect

import pytest

from tensorhub import errors as public
from tensorhub_common import errors
from tensorhub_common.errors import TensorHubError, from_code
from tensorhub_common.protocol.log import levels
from tensorhub_common.protocol.log.levels import ERRORS_NEVER_LOGGED, ERRORS_SINCE, Level, known_error

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


def test_every_error_is_public_and_has_a_level_from_which_a_log_repeats_it() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert names <= set(public.__all__), "tensorhub/errors.py lists it"
    assert names == ERRORS_SINCE.keys() | ERRORS_NEVER_LOGGED, (
        "a log that an older release folds too does not repeat a new code"
    )
    assert not ERRORS_SINCE.keys() & ERRORS_NEVER_LOGGED


def test_a_code_counts_as_unknown_below_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "ERRORS_SINCE", {"RoundTimeout": Level.FORGETTING})
    assert [known_error(level, "RoundTimeout") for level in (2, 3)] == ["TensorHubError", "RoundTimeout"]


@pytest.mark.parametrize("code", ["", "ValueError", "Nonsense", "TensorHubError", "from_code", "\x00"])
def test_a_name_that_nobody_knows_becomes_the_root_class(code: str) -> None:
    error = from_code(code, "message")
    assert type(error) is TensorHubError
    assert str(error) == "message"
