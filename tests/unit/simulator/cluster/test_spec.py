"""Clusters as YAML: what is read, and the one sentence that says what is wrong."""

import re
from typing import Any

import msgspec
import pytest

from tensorhub_simulator.cluster.__main__ import SCENARIOS, read
from tensorhub_simulator.cluster.comparing import cases, changed, grown
from tensorhub_simulator.cluster.spec import ClusterError, decode

GOOD: dict[str, Any] = {
    "name": "mine",
    "model": {"gbytes": 8, "shards": 2},
    "sites": {"a": {}, "b": {}},
    "links": [{"between": ["a", "b"], "gbit_s": 10, "rtt_ms": 30}],
    "replicas": {"trainer": {"site": "a", "count": 1}, "rollout": {"site": "b", "count": 3}},
    "baseline": "far-star",
}


def text(**changes: Any) -> bytes:
    return msgspec.yaml.encode({**GOOD, **changes})


def test_a_good_file_is_read() -> None:
    cluster = decode(text(), "mine.yaml")
    assert (cluster.name, cluster.model.shards, cluster.links[0].between) == ("mine", 2, ("a", "b"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"gbytes": 8, "shard": 2}}, "unknown field `shard` - at `$.model`"),
        ({"model": {"gbytes": "much"}}, "Expected `float`, got `str` - at `$.model.gbytes`"),
        ({"model": {"gbytes": 0}}, "model.gbytes is 0, and must be more than 0"),
        ({"model": {"gbytes": float("nan")}}, "model.gbytes is nan"),
        ({"sites": {}}, "stand in site 'a', and the sites are none"),
        ({"sites": {"a": {"efficiency": 2}, "b": {}}}, "sites.a.efficiency is 2, and is a part of 1"),
        ({"links": [{"between": ["a", "c"], "gbit_s": 1, "rtt_ms": 1}]}, "a link ends in site 'c'"),
        ({"links": [{"between": ["a", "b"], "gbit_s": 1, "rtt_ms": -1}]}, "links.0.rtt_ms is -1"),
        ({"links": [{"between": ["a", "b"], "gbit_s": 1, "rtt_ms": 1, "loss": 1}]}, "loses every packet"),
        ({"trainer": "teacher"}, "the trainer is 'teacher', and there are no replicas of that name"),
        ({"replicas": {"trainer": {"site": "a", "count": 1}}}, "a trainer and nobody else"),
        ({"replicas": {**GOOD["replicas"], "rollout": {"site": "a", "count": 40_000}}}, "80002 shards are more than"),
        ({"baseline": "broadcast"}, "Invalid enum value 'broadcast' - at `$.baseline`"),
        ({"update": "behind-a-seed"}, "memory_host: true"),
        ({"versions": 3}, "set every_s"),
        ({"spot": {"kind": "other"}}, "spot instances are 'other'"),
        ({"spot": {"kind": "rollout", "stays_s": 3}}, "go together"),
        ({"spot": {"kind": "rollout", "events": [[1, "goes", 3]]}}, "names replica 3 at second 1"),
        ({"grow": {"kind": "nobody", "gpus": [8]}}, "it grows by replicas 'nobody'"),
    ],
)
def test_what_is_wrong_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)) as raised:
        decode(text(**changes), "mine.yaml")
    assert str(raised.value).startswith("mine.yaml describes no cluster: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("garbage", [b"a: [", b"\x00\xff", b"a: &a [*b]"])
def test_what_is_no_yaml_is_one_sentence(garbage: bytes) -> None:
    with pytest.raises(ClusterError, match=r"mine\.yaml is no YAML: ") as raised:
        decode(garbage, "mine.yaml")
    assert "\n" not in str(raised.value)


def test_two_sites_need_a_line() -> None:
    from tensorhub_simulator.cluster.fabric import build  # noqa: PLC0415 (this test alone builds)

    with pytest.raises(ClusterError, match="no link between sites 'a' and 'b'"):
        build(decode(text(links=[]), "mine.yaml"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_our_scenarios_and_all_their_cases_are_clusters(name: str) -> None:
    cluster = read(name)
    found = list(cases(cluster))
    assert len(found) == 1 + len(cluster.grow.gpus if cluster.grow else ()) + len(cluster.vary)
    for case in found:
        if case.kind == "variation":
            assert msgspec.to_builtins(case.cluster) != msgspec.to_builtins(cluster), case.what


def test_a_path_that_leads_nowhere_is_named() -> None:
    with pytest.raises(ClusterError, match=r"nothing stands at 'links\.4\.rtt_ms'"):
        changed(read("across"), {"links.4.rtt_ms": 1})
    with pytest.raises(ClusterError, match="unknown field `rtt`"):
        changed(read("across"), {"links.0.rtt": 1})


def test_a_cluster_grows_by_its_readers() -> None:
    cluster = read("standalone")
    assert {kind: each.count for kind, each in grown(cluster, 64).replicas.items()} == {"trainer": 4, "rollout": 12}
    assert {kind: each.count for kind, each in grown(cluster, 8).replicas.items()} == {"trainer": 1, "rollout": 1}
    with pytest.raises(ClusterError, match="4 GPUs are too few"):
        grown(cluster, 4)


@pytest.mark.parametrize(("name", "said"), [("missing.yaml", "No such file"), (".", "Is a directory")])
def test_a_file_that_cant_be_read_says_so(name: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        read(name)
