"""Clusters as YAML: what is read, and the one sentence that says what is wrong."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorhub_simulator.performance.__main__ import SCENARIOS, read
from tensorhub_simulator.performance.comparison import cases, changed, gpus_of, grown
from tensorhub_simulator.performance.config import ClusterError, decode
from tensorhub_simulator.performance.model.topology import build

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
        ({"replicas": {"trainer": {"site": "a", "count": 1}}}, "a trainer alone"),
        ({"replicas": {**GOOD["replicas"], "rollout": {"site": "a", "count": 40_000}}}, "80002 shards are more than"),
        ({"baseline": "broadcast"}, "Invalid enum value 'broadcast' - at `$.baseline`"),
        ({"update": "behind-a-seed"}, "memory_host: true"),
        ({"versions": 3}, "set every_s"),
        ({"spot": {"kind": "other"}}, "spot instances are 'other'"),
        ({"spot": {"kind": "rollout", "stays_s": 3}}, "go together"),
        ({"spot": {"kind": "rollout", "events": [[1, "goes", 3]]}}, "names replica 3 at second 1"),
        ({"spot": {"kind": "rollout", "events": [[float("nan"), "goes", 0]]}}, "names replica 0 at second nan"),
        ({"spot": {"kind": "rollout"}, "baseline": "global-stage"}, "has no answer to spot instances"),
        ({"grow": {"kind": "nobody", "gpus": [8]}}, "it grows by replicas 'nobody'"),
        ({"grow": {"kind": "trainer", "gpus": [8]}}, "which are the trainer's"),
        ({"model": {"gbytes": 1e300}}, "model.gbytes is 1e+300, and at most 1e+12 is simulated"),
        ({"model": {"gbytes": 8, "shards": 2, "piece_bytes": [1, 2]}}, "come to 3 bytes, and a shard of model.gbytes"),
        ({"versions": 100_000, "every_s": 1}, "100000 versions are more than"),
        ({"generation": {"responses": 10**9}}, "generation.responses is 1000000000"),
        ({"links": [GOOD["links"][0], {**GOOD["links"][0], "between": ["b", "a"]}]}, "2 links between 'a' and 'b'"),
        ({"links": [{"between": ["a", "a"], "gbit_s": 1, "rtt_ms": 1}]}, "from site 'a' to itself"),
        ({"links": [{**GOOD["links"][0], "efficiency": 2}]}, "has efficiency 2, which is a part of 1"),
        (
            {"replicas": {**GOOD["replicas"], "rollout": {"site": "b", "count": 3, "memory_host": True}}},
            "add some that generate",
        ),
        ({"versions": 2, "every_s": 1e12}, "versions times every_s comes to 2e+12 s, and at most 1e+06 are simulated"),
        ({"sites": {"a": {"rtt_us": 1e12}, "b": {}}}, "sites.a.rtt_us comes to 1e+06 s, and at most 60 are simulated"),
        ({"links": [{**GOOD["links"][0], "rtt_ms": 1e9}]}, "links.0.rtt_ms comes to 1e+06 s, and at most 60"),
        ({"control": {"log_s": 1e9}}, "control.log_s comes to 1e+09 s, and at most 60 are simulated"),
        ({"generation": {"tokens_max": 1e12}}, "generation.tokens_max times token_s comes to 2e+10 s"),
        ({"spot": {"kind": "rollout", "events": [[1e9, "goes", 0]]}}, "the last of spot.events comes to 1e+09 s"),
        (
            {"spot": {"kind": "rollout", "stays_s": 1e-6, "away_s": 1e-6}},
            "spot instances would come and go some 1800000000 times within 600 s",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)) as raised:
        decode(text(**changes), "mine.yaml")
    assert str(raised.value).startswith("mine.yaml describes no cluster: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "garbage",
    [
        b"a: [",
        b"\x00\xff",
        b"a: &a [*b]",
        b"a: 1\n\tb: 2",
        b"a: 2020-13-45",
        b"? [1]\n: 2",
        b"- 1\n---\n- 2",
        b"!!python/object/apply:os.system [ls]",
    ],
)
def test_what_is_no_yaml_is_one_sentence(garbage: bytes) -> None:
    with pytest.raises(ClusterError, match=r"mine\.yaml is no YAML: ") as raised:
        decode(garbage, "mine.yaml")
    assert "\n" not in str(raised.value)


def test_a_name_that_stands_twice_is_not_taken_for_the_last() -> None:
    with pytest.raises(ClusterError, match=r"mine\.yaml is no YAML: 'seed' stands twice in one place.* line 2"):
        decode(b"seed: 1\nseed: 2\n" + text(), "mine.yaml")


def test_numbers_are_read_as_they_are_written_today() -> None:
    written = text().replace(b"rtt_ms: 30", b"rtt_ms: 30\n  loss: 1e-6")
    assert decode(written, "mine.yaml").links[0].loss == 1e-6


def test_two_sites_need_a_line_also_when_neither_is_the_trainers() -> None:
    with pytest.raises(ClusterError, match="no link between sites 'a' and 'b'"):
        build(decode(text(links=[]), "mine.yaml"))
    three: dict[str, Any] = {
        "sites": {**GOOD["sites"], "c": {}},
        "links": [*GOOD["links"], {"between": ["a", "c"], "gbit_s": 10, "rtt_ms": 30}],
        "replicas": {**GOOD["replicas"], "other": {"site": "c", "count": 2}},
    }
    with pytest.raises(
        ClusterError, match="no link between sites 'b' and 'c', whose replicas may read from each other"
    ):
        build(decode(text(**three), "mine.yaml"))


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
    with pytest.raises(ClusterError, match=r"standalone can't have 4 GPUs: .* take 8 at least"):
        grown(cluster, 4)


def test_others_keep_their_number_when_a_cluster_grows() -> None:
    """Those of a third kind are of the GPUs, and a seed in a host's memory has none."""
    cluster = changed(
        read("across"),
        {
            "replicas.other": {"site": "here", "count": 3},
            "replicas.seed": {"site": "far", "count": 1, "memory_host": True},
        },
    )
    made = grown(cluster, 64)
    assert {kind: each.count for kind, each in made.replicas.items()} == {
        "trainer": 1,
        "rollout": 12,
        "other": 3,
        "seed": 1,
    }
    assert gpus_of(made) == 64


def test_what_is_wrong_with_a_grown_cluster_says_what_was_changed() -> None:
    cluster = decode(
        text(spot={"kind": "rollout", "events": [[1, "goes", 2]]}, grow={"kind": "rollout", "gpus": [4]}), "m"
    )
    with pytest.raises(ClusterError, match=r"mine with .*'replicas.rollout.count': 1.* of 1 'rollout' the first is 0"):
        grown(cluster, 4)


@pytest.mark.parametrize(("name", "said"), [("missing.yaml", "No such file"), (".", "Is a directory")])
def test_a_file_that_cant_be_read_says_so(name: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        read(name)


def test_the_file_in_the_docs_is_a_cluster() -> None:
    page = (Path(__file__).parents[4] / "docs" / "design" / "simulate.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    cluster = decode(block, "docs/design/simulate.md")
    build(cluster)
    assert len(list(cases(cluster))) == 1 + 2 + 1
