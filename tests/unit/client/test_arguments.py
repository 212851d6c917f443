"""Mistakes in a call are told by their own names, before anything travels."""

import math

import numpy as np
import pytest
import torch

from tensorhub import arguments
from tensorhub_common.errors import LayoutMismatch, VersionConflict, VersionUnavailable
from tensorhub_common.wire.commands import VERSION_MAX


@pytest.mark.parametrize("value", [True, "1", 1.0, torch.tensor([1, 2]), b"1"])
def test_what_is_no_whole_number_is_no_version(value: object) -> None:
    with pytest.raises(TypeError, match="whole number"):
        arguments.published_version(value)
    with pytest.raises(TypeError, match="whole number"):
        arguments.wanted_version(value)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_what_stands_for_a_whole_number_is_one(value: object) -> None:
    assert arguments.published_version(value) == 3
    assert arguments.wanted_version(value) == 3


def test_the_words_for_versions() -> None:
    assert arguments.published_version(None) is None
    assert arguments.wanted_version("latest") == "latest"
    with pytest.raises(TypeError, match="latest"):
        arguments.wanted_version("newest")


@pytest.mark.parametrize("value", [-1, VERSION_MAX + 1])
def test_versions_out_of_range_are_what_the_hub_would_say(value: int) -> None:
    with pytest.raises(VersionConflict, match="out of range"):
        arguments.published_version(value)
    with pytest.raises(VersionUnavailable, match="out of range"):
        arguments.wanted_version(value)


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, 1e9])
def test_bounds_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match="give a number of seconds"):
        arguments.seconds("timeout_s", value)


@pytest.mark.parametrize("value", [True, "5", None])
def test_bounds_are_numbers(value: float) -> None:
    with pytest.raises(TypeError, match="number of seconds"):
        arguments.seconds("timeout_s", value)


def test_patience_is_at_most_the_bound() -> None:
    assert arguments.patience(3, 10.0) == 3
    assert arguments.patience(30, 10.0) == 10
    assert arguments.patience(math.inf, 10.0) == 10


@pytest.mark.parametrize(("shard", "shards"), [(-1, 1), (1, 1), (2, 2), (0, 0)])
def test_a_shard_out_of_range_fits_no_layout(shard: int, shards: int) -> None:
    with pytest.raises(LayoutMismatch):
        arguments.shard_of(shard, shards)


def test_ways_to_install() -> None:
    for value in ("in-place", "staged", "mapped"):
        assert arguments.install(value) == value
    with pytest.raises(ValueError, match="'in-place', 'staged', 'mapped'"):
        arguments.install("elsewhere")
