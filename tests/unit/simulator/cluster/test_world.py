"""Runs of modelled clusters: closed forms, what is conserved, and that one file gives one run."""

from typing import Any

import msgspec
import pytest

from tensorhub_simulator.performance import baselines, calibration
from tensorhub_simulator.performance.comparison import changed, pair
from tensorhub_simulator.performance.config import (
    Cluster,
    ClusterError,
    Control,
    Generation,
    Model,
    Replicas,
    Site,
    Spot,
)
from tensorhub_simulator.performance.config import Link as Line
from tensorhub_simulator.performance.model import cluster as model_cluster
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.results import Result

FREE = Control(log_s=0, command_s=0, plan_s=0, plan_holder_s=0, open_s=0, batch_s=0, digest_gbyte_s=1e9)
"""A control plane that takes no time."""

CARD_BYTES_S = 20e9
SECONDS = 8e9 / CARD_BYTES_S
"""The bytes of one shard over one card."""


def star(readers: int, **changes: Any) -> Cluster:
    site = Site(gpus_per_host=1, nics_per_host=1, nic_gbit_s=160, efficiency=1, rtt_us=0)
    cluster = Cluster(
        name="test",
        model=Model(gbytes=8, shards=1, piece_mib=64),
        sites={"here": site},
        replicas={"trainer": Replicas(site="here", count=1), "rollout": Replicas(site="here", count=readers)},
        baseline="star",
        control=FREE,
    )
    return msgspec.structs.replace(cluster, **changes)


def both(cluster: Cluster) -> tuple[Result, Result]:
    """Return what came of ours and of the baseline."""
    return run(ClusterRun(cluster)), baselines.run(cluster)


def took(result: Result) -> list[float]:
    return [each.took_s for each in result.ended()]


def test_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone takes its bytes over its card, a star as many times as long, a chain that and a hop for each other."""
    piece = 8e9 / 120
    for readers in (1, 2, 6):
        expected = [pytest.approx(readers * SECONDS, rel=1e-6)] * readers
        assert took(baselines.run(star(readers))) == expected
        assert max(took(run(ClusterRun(star(readers), pipelining=False)))) == expected[0]
        result = run(ClusterRun(star(readers)))
        ends = sorted(took(result))
        assert ends[0] == pytest.approx(SECONDS, rel=1e-6)
        assert ends[-1] <= SECONDS * (1 + 1e-6) + (readers - 1) * 2 * piece / CARD_BYTES_S
        assert result.link_bytes["trainer out"] == pytest.approx(8e9)
        assert result.link_bytes["rollout in"] == pytest.approx(readers * 8e9)
        assert result.link_bytes.get("rollout out", 0.0) == pytest.approx((readers - 1) * 8e9)
    # Readers of a star may take turns: the last ends as late, and on average half the time is saved.
    turns = baselines.run(star(4, star_readers_max=1))
    assert took(turns) == pytest.approx([n * SECONDS for n in (1, 2, 3, 4)])
    assert [each.started_s for each in turns.updates] == pytest.approx([n * SECONDS for n in (0, 1, 2, 3)])
    monkeypatch.setattr(model_cluster, "SECONDS_MAX", SECONDS / 2)
    with pytest.raises(ClusterError, match=r"the run has no end within 0\.2 s of its own time"):
        run(ClusterRun(star(1)))


@pytest.mark.parametrize("every_s", [2.5, 2.7])
def test_a_version_right_behind_the_last_one_is_read_as_fast_as_one_long_after_it(every_s: float) -> None:
    """Real hosts' wires, four readers: what agents said of the last version's readers is no load for the next one's.

    Each middle of the chain tries another source beside its own, so a planner knows of its reader by beats alone.
    """
    measured = calibration.load()
    real = next(each for each in measured.runs if (each.mib, each.mbit, each.readers) == (64, 320, 4))
    cluster = calibration.cluster_of(real, measured.pieces["64"])

    def slowest_s(every_s: float) -> float:
        return max(took(run(ClusterRun(msgspec.structs.replace(cluster, versions=8, every_s=every_s)))))

    assert slowest_s(every_s) <= 1.1 * slowest_s(10.0)


def test_the_global_stage_is_its_closed_form() -> None:
    cluster = star(7, baseline="global-stage", update="at-boundary")
    result = baselines.run(cluster)
    slowest = max(each.asked_s for each in result.updates)
    hops = 2 * 3 * baselines.BARRIER_HOP_S
    for each in result.updates:
        assert each.took_s == pytest.approx(slowest - each.asked_s + SECONDS + hops)


@pytest.mark.parametrize("baseline", ["star", "global-stage"])
@pytest.mark.parametrize("update", ["at-boundary", "at-once"])
def test_both_sides_stop_at_the_same_moments(baseline: str, update: str) -> None:
    generation = Generation(tokens_median=1000, responses=4, token_s=0.01)
    cluster = star(5, baseline=baseline, update=update, generation=generation)
    ours = sorted(each.asked_s for each in run(ClusterRun(cluster)).updates)
    assert ours == pytest.approx(sorted(each.asked_s for each in baselines.run(cluster).updates))
    assert (ours[-1] > 0) == (update == "at-boundary")


def far(readers: int, **line: Any) -> Cluster:
    replicas = {"trainer": Replicas(site="here", count=1), "rollout": Replicas(site="far", count=readers)}
    cluster = star(readers, replicas=replicas, baseline="far-star")
    links = (Line(between=("here", "far"), efficiency=1, **line),)
    sites = {"here": cluster.sites["here"], "far": cluster.sites["here"]}
    return msgspec.structs.replace(cluster, sites=sites, links=links)


SEED = Replicas(site="far", count=1, memory_host=True)


def behind_a_seed(cluster: Cluster, **changes: Any) -> Cluster:
    replicas = {**cluster.replicas, "seed": SEED, **changes.pop("replicas", {})}
    return msgspec.structs.replace(cluster, replicas=replicas, update="behind-a-seed", **changes)


def test_a_far_star_shares_the_line_a_global_stage_is_no_faster_and_ours_crosses_once() -> None:
    cluster = far(6, gbit_s=8, rtt_ms=0.0)
    assert max(took(baselines.run(cluster))) == pytest.approx(6 * 8.0, rel=1e-3)
    ours = run(ClusterRun(cluster))
    assert ours.link_bytes["here to far"] <= 1.2 * 8e9
    assert max(took(ours)) <= 1.2 * 8.0
    stage = baselines.run(msgspec.structs.replace(far(6, gbit_s=8, rtt_ms=10), baseline="global-stage"))
    assert took(stage) == [pytest.approx(8.0, rel=0.01)] * 6
    assert stage.link_bytes["here to far"] == pytest.approx(8e9)
    assert stage.link_bytes["rollout in"] == pytest.approx(6 * 8e9)


def test_rollouts_behind_a_seed_stand_still_only_for_what_is_near_and_nobody_waits_where_none_stands() -> None:
    found = pair(behind_a_seed(far(4, gbit_s=8, rtt_ms=10)), each=True)
    assert (found.ours.updates, found.baseline.updates) == (4, 4)
    assert found.ours.stall_s.most < 2 * SECONDS
    assert found.ours.last_s > 8.0
    near = {"near": Replicas(site="here", count=2)}
    result = run(ClusterRun(behind_a_seed(far(4, gbit_s=8, rtt_ms=10), replicas=near)))
    assert sorted(each.kind for each in result.ended()) == ["near"] * 2 + ["rollout"] * 4 + ["seed"]


def test_a_stream_has_its_ceiling_and_several_have_more() -> None:
    """One far replica has nobody to share with: both sides cross once, over as many streams, and take as long."""
    cluster = far(1, gbit_s=100, rtt_ms=40, window_mib=4)
    (ours,), (other,) = took(run(ClusterRun(cluster))), took(baselines.run(cluster))
    assert other <= ours <= 1.2 * other
    ceiling, opens_s = baselines.STREAMS * 4 * (1 << 20) / 0.04, 2 * 0.04
    for streams in (1, 4):
        (took_s,) = took(baselines.run(changed(cluster, {"links.0.streams": streams})))
        assert took_s == pytest.approx(opens_s + 8e9 / ceiling / streams, rel=0.01)


def test_one_file_gives_one_run_and_another_seed_another() -> None:
    cluster = star(9, update="at-boundary", control=Control(jitter=0.5))
    first, again = run(ClusterRun(cluster)), run(ClusterRun(cluster))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    other = run(ClusterRun(msgspec.structs.replace(cluster, seed=2)))
    assert msgspec.json.encode(first) != msgspec.json.encode(other)


@pytest.mark.long
def test_one_rail_stands_for_all() -> None:
    model = Model(gbytes=32, shards=4, piece_mib=64)
    site = Site(gpus_per_host=4, nics_per_host=4)
    whole = star(12, model=model, sites={"here": site}, control=Control(), rails=4)
    part = msgspec.structs.replace(whole, rails=1)
    one, other = run(ClusterRun(whole)), run(ClusterRun(part))
    assert sum(took(one)) / 12 == pytest.approx(sum(took(other)) / 12, rel=0.05)
    assert one.link_bytes["rollout in"] == pytest.approx(other.link_bytes["rollout in"])


def test_spot_instances_come_go_and_the_rest_goes_on() -> None:
    """The middle of a chain vanishes without a word while it is being filled; another one begins late."""
    spot = Spot(kind="rollout", away_share=0.2, events=((0.1, "goes", 1), (2.0, "comes", 4), (9.0, "comes", 1)))
    for result in both(star(5, spot=spot)):
        asked = {each.replica: each.asked_s for each in result.ended()}
        assert sorted(asked) == [0, 1, 2, 3, 4]
        assert [each.replica for each in result.updates if each.ready_s is None] == [1]
        assert (asked[4] >= 2.0, asked[1] >= 9.0) == (True, True)
    # All of a recorded trace happens.
    spot = Spot(kind="rollout", events=((50.0, "goes", 1), (5000.0, "comes", 1)))
    for result in both(star(2, spot=spot)):
        assert [each.asked_s >= 5000.0 for each in result.updates if each.replica == 1] == [False, True]
    # Who vanishes before its boundary asks for nothing.
    generation = Generation(tokens_median=1000, tokens_max=1000, responses=1, token_s=0.01)
    spot = Spot(kind="rollout", events=((0.0, "goes", 1), (30.0, "comes", 1)))
    for result in both(star(3, spot=spot, update="at-boundary", generation=generation)):
        assert not result.stuck
        assert [each.asked_s for each in result.updates if each.replica == 1] == [pytest.approx(30.0, abs=0.1)]
        assert sorted(each.replica for each in result.ended()) == [0, 1, 2]


def test_a_trace_that_takes_everybody_away_ends_without_a_factor() -> None:
    spot = Spot(kind="rollout", events=((0.1, "goes", 0), (0.1, "goes", 1), (0.1, "goes", 2)))
    found = pair(star(3, spot=spot))
    assert (found.factor, found.stuck, found.ours.updates, found.baseline.updates) == (None, 0, 0, 0)
    assert found.bound_s == pytest.approx(SECONDS)
    nobody = pair(star(3, spot=Spot(kind="rollout", away_share=1.0)))
    assert (nobody.factor, nobody.stuck) == (None, 0)


def test_a_trainer_copy_is_free_of_a_reader_that_has_vanished() -> None:
    """Two vanish at the first copy; whoever comes then is the first one's, and not crowded at the other."""
    replicas = {"trainer": Replicas(site="here", count=2), "rollout": Replicas(site="here", count=4)}
    spot = Spot(kind="rollout", events=((0.05, "goes", 0), (0.05, "goes", 2), (0.06, "comes", 0), (0.07, "comes", 2)))
    other = baselines.run(star(4, replicas=replicas, spot=spot))
    assert max(took(other)) <= 2 * SECONDS


def test_a_trainer_waits_for_its_readers_before_it_overwrites() -> None:
    result = run(ClusterRun(star(3, versions=2, every_s=0.05)))
    assert result.trainer_stall_s > 0
    assert {each.version for each in result.ended()} >= {2}


@pytest.mark.long
def test_one_rail_has_its_part_of_the_line() -> None:
    """Of four shards that share a line each has a quarter of it, whether the other three are modelled or not."""
    model = Model(gbytes=8, shards=4, piece_mib=64)
    site = Site(gpus_per_host=4, nics_per_host=4, nic_gbit_s=160, efficiency=1)
    cluster = msgspec.structs.replace(far(2, gbit_s=8, rtt_ms=0), model=model, sites={"here": site, "far": site})
    for rails in (1, 2, 4):
        result = run(ClusterRun(msgspec.structs.replace(cluster, rails=rails)))
        assert min(took(result)) == pytest.approx(8.0, rel=0.1)
        assert took(baselines.run(msgspec.structs.replace(cluster, rails=rails)))[0] == pytest.approx(16.0, rel=0.01)


@pytest.mark.long
def test_who_was_busy_when_the_seed_had_the_last_version_reads_it_all_the_same() -> None:
    """The seed is ready once; a replica that read the version before at that moment asks by itself."""
    site = Site(gpus_per_host=1, nics_per_host=1, nic_gbit_s=10, efficiency=0.5)
    cluster = behind_a_seed(
        far(2, gbit_s=5, rtt_ms=0),
        model=Model(gbytes=1, shards=1, piece_mib=16),
        sites={"here": site, "far": site},
        versions=2,
        every_s=0.5,
        control=Control(),
    )
    result = run(ClusterRun(cluster))
    assert {each.replica for each in result.ended() if (each.kind, each.version) == ("rollout", 2)} == {0, 1}
