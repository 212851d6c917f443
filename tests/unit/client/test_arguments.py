"""Mistakes in a call are told by their own names, before anything travels."""

import math

import numpy as np
import pytest
import torch

from tensorhub import arguments, mapping
from tensorhub.arguments import SEQ_MAX
from tensorhub_common.errors import LayoutMismatch, VersionConflict, VersionUnavailable
from tensorhub_common.protocol.log.commands import VERSION_MAX
from tensorhub_common.protocol.log.events import KINDS


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


def test_a_replica_has_as_many_shards_as_the_log_takes() -> None:
    """4,096: one more is told by the call, before anything travels."""
    assert arguments.shard_of(4095, 4096) == (4095, 4096)
    with pytest.raises(LayoutMismatch, match="a replica of 4097 shards is not possible: give shards from 1 to 4096"):
        arguments.shard_of(0, 4097)


@pytest.mark.parametrize("value", [-1, SEQ_MAX + 1])
def test_a_place_that_no_log_has_is_told_and_not_asked_for_ever(value: int) -> None:
    with pytest.raises(ValueError, match="give the seq of an event"):
        arguments.seen(value)
    assert arguments.seen(SEQ_MAX) == SEQ_MAX
    assert arguments.seen(None) is None


def test_kinds_that_never_come_are_not_waited_for() -> None:
    with pytest.raises(ValueError, match=r"no events of kind 'version.publish'; possible are .*version\.published"):
        arguments.kinds(["version.published", "version.publish"], KINDS)
    for value in ("version.published", 5):
        with pytest.raises(TypeError, match="collection of kinds"):
            arguments.kinds(value, KINDS)
    assert arguments.kinds((), KINDS) == frozenset()
    assert arguments.kinds(None, KINDS) is None
    assert {"version.published", "replica.ready", "round.failed"} <= KINDS


def test_names_of_where_the_hub_is_are_text() -> None:
    arguments.text("nats", None)
    with pytest.raises(TypeError, match="nats is text; got 5"):
        arguments.text("nats", 5)


def test_ways_to_install() -> None:
    for value in ("in-place", "staged", "mapped"):
        assert arguments.install(value) == value
    with pytest.raises(ValueError, match="'in-place', 'staged', 'mapped'"):
        arguments.install("elsewhere")


def test_a_mapping_of_names_is_one_or_none() -> None:
    names = mapping.Mapping("mine", ())
    assert arguments.mapping(names) is names
    assert arguments.mapping(None) is None
    with pytest.raises(TypeError, match=r"mapping is a tensorhub\.mapping\.Mapping, as mapping\.llama"):
        arguments.mapping({"qkv": ["q", "k", "v"]})
