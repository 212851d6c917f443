"""What the trainer of tensorhub.demo.rl rewards, and which lengths it writes down."""

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tensorhub.demo.rl.clock import HOURS, reward
from tensorhub.demo.rl.step_facts import lines_of_lengths


def test_a_response_round_the_clock_or_up_to_an_hour_is_right() -> None:
    day = [*range(15, HOURS), *range(15)]
    assert reward(14, day) == 1.0
    assert reward(14, day[:8]) == 0.5
    assert reward(14, [15, 0], until=0) == 1.0
    assert reward(14, [15, 1, 2], until=0) == 0.5
    assert reward(0, [*range(1, HOURS), 0], until=0) == 1.0
    assert reward(13, [15, 0, 14, 15, 0], until=0) == pytest.approx(2 / 3), "14 was left out"


def response(group: str, index: int, hour: int, count: int, reason: str = "stop") -> Any:
    return SimpleNamespace(
        group=group, index=index, prompt_ids=np.array([hour]), token_ids=np.zeros(count), finish_reason=reason
    )


def test_lengths_are_in_the_order_of_the_group_and_under_what_the_prompt_is() -> None:
    came = [response("7", 1, 3, 2), response("8", 0, 3, 5), response("7", 0, 3, 9), response("8", 1, 3, 1, "failed")]
    lines = [json.loads(each) for each in lines_of_lengths(cast("Any", came), 4, 16)]
    assert sorted(each["out_lens"] for each in lines) == [[5], [9, 2]]
    assert {(each["group"], each["prompt_len"], each["step"], each["tokens_max"]) for each in lines} == {
        ("3", 1, 4, 16)
    }
