"""A simulated job: every system trains every response once, and machines that come and go are worth something."""

import msgspec
import pytest

from tensorhub_simulator.rollout_performance.config.decoding import decode, with_trace
from tensorhub_simulator.rollout_performance.config.scenario import (
    SYSTEMS_FIRST,
    Messages,
    Scenario,
    ScenarioError,
)
from tensorhub_simulator.rollout_performance.models.machine import Pace
from tensorhub_simulator.rollout_performance.systems.systems import job_of

SMALL = b"""
name: small
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 10000, slots: 8}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 2, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.004, publish_s: 0.5, engines: 1, seed_first_s: 4}
spot: {changes: [[0, 2], [5, 1], [9, 3], [12, 1], [16, 2]], boot_s: 2, load_s: 0.5}
price: {reserved: 4, spot: 1}
"""


def scenario(**spot: object) -> Scenario:
    found = decode(SMALL, "small")
    return msgspec.structs.replace(found, spot=msgspec.structs.replace(found.spot, **spot))


def test_all_systems_train_the_same_responses_and_what_is_lost_is_made_again() -> None:
    """`JobRun` asserts that each response has the tokens that were drawn for it, and is trained."""
    found = {system: job_of(scenario(), system).run() for system in (*SYSTEMS_FIRST, "seer")}
    for each in found.values():
        assert each.responses == 2 * 4 * 4
        assert each.tokens == found["reserved"].tokens <= each.made
        assert each.trained_s == pytest.approx(0.004 * each.tokens)
        assert sum(each.step_s) == pytest.approx(each.seconds)
    assert found["recompute"].made > found["arrival"].made
    assert found["arrival"].tokens_per_s > found["reserved"].tokens_per_s
    assert found["reserved"].spot_s == 0.0 < found["arrival"].spot_s


STREAM = b"""
name: stream
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 400, slots: 8}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 10, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.0005, publish_s: 0.1, engines: 1, seeds: false,
   streams: true, steps_ahead: 2}
spot: {changes: [[0, 4]], boot_s: 0, load_s: 0.5}
price: {reserved: 4, spot: 1}
"""


def test_without_steps_each_version_has_as_many_responses_and_staying_on_a_version_saves_what_is_computed_again() -> (
    None
):
    stream = decode(STREAM, "stream")
    at_once = msgspec.structs.replace(stream, terms_off=("activation",))
    found = [job_of(each, "arrival").run() for each in (stream, at_once)]
    assert {each.responses for each in found} == {10 * 4 * 4}
    rolling, all_at_once = (each.tokens_per_s for each in found)
    assert rolling > 1.05 * all_at_once


def test_a_stream_is_of_a_trainer_that_does_not_seed() -> None:
    with pytest.raises(ScenarioError, match="goes with a trainer that does not seed"):
        decode(STREAM.replace(b"seeds: false", b"seeds: true").replace(b"steps_ahead: 2", b"steps_ahead: 0"), "stream")


@pytest.mark.parametrize("notice_s", [0.0, 1.5])
def test_one_scenario_is_one_run(notice_s: float) -> None:
    first, second = (job_of(scenario(notice_s=notice_s), "arrival").run() for _ in range(2))
    assert first == second


def test_a_job_without_any_spot_instance_is_as_one_with_its_own_engines_alone() -> None:
    """Its engines go on seeding, since nothing else would make the rest."""
    none = job_of(scenario(changes=((0.0, 0),)), "arrival").run()
    alone = job_of(scenario(), "reserved").run()
    assert none.seconds == pytest.approx(alone.seconds, rel=0.2)
    assert none.cost == pytest.approx(none.seconds / 3600 * 4)


def test_seldom_messages_of_a_large_fleet_cost_no_more_tokens_of_machines_that_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it had thousands of instances: mere progress is told every 20 s, and what is lost is still one second's."""
    found = scenario(changes=((0.0, 3), (11.7, 1)))
    lengths = msgspec.structs.replace(found.lengths, median=250, between=0.05, within=0.05)
    found = msgspec.structs.replace(found, lengths=lengths, messages=Messages(frames_s=1.0))
    often = job_of(found, "rlboost").run()
    monkeypatch.setattr("tensorhub_simulator.rollout_performance.models.machine.MESSAGES_PER_S", 0.1)
    seldom = job_of(found, "rlboost").run()
    assert often.lost == seldom.lost == 2
    # At most 8 requests at 20 tokens a second.
    assert 0 < seldom.made - seldom.tokens <= seldom.lost * 8 * 20
    assert seldom.seconds == pytest.approx(often.seconds, rel=0.1)


def test_a_policy_that_knows_no_lengths_sees_in_frames_of_mere_progress_nothing_that_it_acts_on() -> None:
    """First tokens, ends and what was stopped come every 50 ms, as in production; all other tokens may come later."""

    def seconds(**messages: float) -> float:
        return job_of(msgspec.structs.replace(own(steps=4), messages=Messages(**messages)), "rlboost").run().seconds

    assert seconds() == seconds(progress_s=0.05) < seconds(frames_s=2.0) - 4 * 0.5


def test_frames_come_as_seldom_as_a_leader_asks_of_a_large_fleet() -> None:
    pace, often = Pace(Messages()), Pace(Messages(frames_s=0.5))
    found = []
    for instances in (2, 1000, 4096):
        pace.follow(instances)
        often.follow(instances)
        found.append((pace.frames_s, often.frames_s, pace.heartbeat_s))
    assert found == [(0.05, 0.5, 1.0), (0.5, 0.5, 1000 / 128), (2.0, 0.5, 32.0)]


def test_the_terms_of_the_policy_can_be_off() -> None:
    off = msgspec.structs.replace(scenario(), terms_off=("migration", "seeding"))
    assert job_of(off, "arrival").run().seconds != job_of(scenario(), "arrival").run().seconds
    assert job_of(off, "rlboost").run() == job_of(scenario(), "rlboost").run()


def test_machines_of_a_trace_come_and_go_as_it_says() -> None:
    """Of two, one goes after a while and another comes: paid are 5 + 20 s and more, with what boots."""
    text = "0,comes,a\n0,comes,b\n5,goes,a\n8,comes,c\n"
    traced = with_trace(scenario(changes=(), trace="here", instances=2), text)
    found = job_of(traced, "rlboost").run()
    assert found.spot_s == pytest.approx(5 + (found.seconds - 8) + found.seconds)


def own(**trainer: object) -> Scenario:
    """A trainer whose GPUs only train."""
    found = scenario(changes=((0.0, 3),))
    return msgspec.structs.replace(found, trainer=msgspec.structs.replace(found.trainer, seeds=False, **trainer))


def test_streaming_is_sooner_than_waiting_for_all_and_one_step_ahead_is_sooner_yet() -> None:
    streams, ahead = own(steps=4), own(steps=4, steps_ahead=1)
    waits = job_of(streams, "disaggregated").run()
    found = [job_of(each, "rlboost").run() for each in (streams, ahead)]
    assert waits.seeded_s == 0.0
    assert waits.seconds > found[0].seconds > found[1].seconds
    # With one to train and three to generate, four generate together and train four times as fast.
    together = job_of(streams, "reserved").run()
    assert together.trained_s == pytest.approx(waits.trained_s / 4)
    assert together.cost == pytest.approx(together.seconds / 3600 * 4 * 4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"slots: 8", b"slots: 0", "engine.slots is 0, and must be from 1 to 4096"),
        (b"micro_batch: 4", b"micro_batch: 17", "trainer.micro_batch is 17, and must be from 1 to 16"),
        (b"slots: 8", b"slots: 8, kv_tokens: 300", "engine.kv_tokens is 300, and the longest response needs 308"),
        (b"[[0, 2],", b"[[1, 2],", "spot.changes must begin with what there is at 0 seconds"),
        (b"[5, 1]", b"[0, 1]", "the times of spot.changes must rise"),
        (b"[12, 1], [16, 2]]", b"[12, 1]], trace: a", "spot.changes and spot.trace exclude each other"),
        (b"[12, 1], [16, 2]]", b"[12, 1]], instances: 3", "spot.instances goes with spot.trace"),
        (b"seed: 3", b"seed: three", "Expected `int`, got `str`"),
        (b"seed: 3", b"seed: 3\nseeds: 4", "unknown field `seeds`"),
        (b"token_s: 0.004", b"token_s: .nan", "trainer.token_s is nan"),
        (b"seed: 3", b"seed: 3\nmessages: {frames_s: 0}", "messages.frames_s is 0, and must be from 0.01 to 60"),
        (b"seed: 3", b"seed: 3\nterms_off: [moves]", "Invalid enum value 'moves'"),
    ],
)
def test_a_mistake_in_a_scenario_is_told(old: bytes, new: bytes, said: str) -> None:
    assert old in SMALL
    with pytest.raises(ScenarioError, match="small") as found:
        decode(SMALL.replace(old, new), "small")
    assert said in str(found.value)


def test_a_job_whose_last_instance_goes_before_all_is_made_is_told_so() -> None:
    each = scenario(changes=((0.0, 1), (3.0, 0)))
    each = msgspec.structs.replace(each, trainer=msgspec.structs.replace(each.trainer, seeds=False))
    with pytest.raises(
        ScenarioError, match=r"responses of step \d+ are open, and after \d+ s no instance is left or comes"
    ):
        job_of(each, "rlboost").run()
