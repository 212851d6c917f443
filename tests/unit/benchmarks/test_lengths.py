"""What the benchmark of length prediction reads, and what it says of traces whose answer is known."""

import gzip
import json
import math
from pathlib import Path
from random import Random

import pytest
from benchmarks.lengths.replay import SOURCES, AboutAsLong, measured
from benchmarks.lengths.trace import Group, read, windows

BY_NAME = {each.name: each for each in SOURCES}


def test_traces_of_each_kind_are_read(tmp_path: Path) -> None:
    own, packed, azure, scheduling = (tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "b.csv", "c.json"))
    line = {"group": "p", "prompt_len": 3, "out_lens": [4, 5], "step": 2, "tokens_max": 5}
    own.write_text(json.dumps(line) + "\n")
    packed.write_bytes(gzip.compress(own.read_bytes()))
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,0\n"
    )
    scheduling.write_text('[{"id": "5", "L_gt": 9, "L_t0.7": 514, "L_t0.5": 7, "L_t0.3": 3, "L_t0.0": 2}]')
    assert read(own) == read(packed) == [Group("p", 3, (4, 5), 2, 5)]
    assert read(azure) == [Group("0", 374, (44,)), Group("1", 396, (1,))]
    assert read(scheduling) == [Group("5", 0, (2, 3, 7, 512), None, 512)]
    packed.write_bytes(packed.read_bytes()[:-12])
    own.write_text("no trace\n")
    for none in (own, packed):
        with pytest.raises(ValueError, match="is no trace, which has JSON lines of group, prompt_len and out_lens"):
            read(none)
    own.write_text("\n")
    with pytest.raises(ValueError, match="it has no group"):
        read(own)


def test_steps_are_those_of_the_trace_or_of_so_many_responses() -> None:
    groups = [Group(str(at), 1, (1, 2)) for at in range(5)]
    assert [len(each) for each in windows(groups, 4)] == [2, 2, 1]
    steps = [Group(str(at), 1, (1,), at // 3) for at in range(7)]
    assert [len(each) for each in windows(steps, 4)] == [3, 3, 1]


def trace(between: float, within: float) -> list[Group]:
    """Draw 60 steps of 16 of 40 prompts. A prompt is as long as its responses are in the middle."""
    random = Random(1)
    means = [6 + random.gauss(0, between) for _ in range(40)]
    made = []
    for step in range(60):
        for prompt in random.sample(range(40), 16):
            lengths = (max(1, round(math.exp(random.gauss(means[prompt], within)))) for _ in range(8))
            made.append(Group(str(prompt), round(math.exp(means[prompt])), tuple(lengths), step))
    return made


def test_where_the_prompt_decides_alone_all_but_the_job_finds_the_longest() -> None:
    drawn = trace(1.0, 0.01)
    for name in ("the prompt's earlier responses", "prompts about as long", "one sibling has ended"):
        assert measured(drawn, 512, BY_NAME[name], AboutAsLong()).recall > 0.9
    assert measured(drawn, 512, BY_NAME["the job"], AboutAsLong()).recall < 0.3


def test_where_the_prompt_decides_nothing_nothing_finds_the_longest_and_quantiles_hold() -> None:
    drawn = trace(0.0, 0.7)
    for name in ("the job", "the prompt's earlier responses", "half of the siblings have"):
        found = measured(drawn, 512, BY_NAME[name], AboutAsLong())
        assert found.recall < 0.3
        assert found.below == pytest.approx((0.1, 0.5, 0.9), abs=0.03)
        assert found.error == pytest.approx(0.7 * 0.6745, abs=0.03)
