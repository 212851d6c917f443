"""Calls of a session, joined: masks, versions and log-probabilities are where the tokens are."""

import numpy as np
import pytest

from tensorhub._rollouts.prompts import Sampling
from tensorhub._rollouts.responses import Response, TokenRun
from tensorhub._rollouts.trajectories import Call, trajectory_of
from tensorhub_common.errors import IntegrityError


def call(number: int, prompt: list[int], made: list[int], version: int) -> Call:
    run = TokenRun(0, len(made), version, "root", "runner-0", (1, 1), "fresh", 3 - version)
    return Call(
        Response(
            f"g{number}",
            0,
            np.array(prompt, np.int32),
            np.array(made, np.int32),
            np.full(len(made), -0.5, np.float32),
            np.full(len(made), version, np.int64),
            (run,),
            "stop",
            None,
            number,
            Sampling(),
            None,
            3 - version,
            since_submit=4 - number,
            session="s",
            turn=number,
        ),
        number != 1,
        None,
    )


CALLS = [call(0, [1, 2], [3, 4], 1), call(1, [1, 2, 3, 4, 5], [6], 2), call(2, [1, 2, 3, 4, 5, 6, 7, 8], [9], 3)]


def test_a_trajectory_has_all_of_its_calls() -> None:
    found = trajectory_of("s", 1, CALLS, reward=0.5, end="reward", metadata={"task": 7})
    assert found.prompt_ids.tolist() == [1, 2]
    assert found.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert found.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert found.versions.tolist() == [1, 1, -1, 2, -1, -1, 3]
    assert found.logprobs.tolist() == [-0.5, -0.5, 0, -0.5, 0, 0, -0.5]
    assert [(run.start, run.end, run.version) for run in found.runs] == [(0, 2, 1), (3, 4, 2), (6, 7, 3)]
    assert [(turn.number, turn.start, turn.end) for turn in found.turns] == [(0, 0, 2), (1, 3, 4), (2, 6, 7)]
    assert (found.group, found.index, found.reward, found.age, found.since_submit) == ("s", 1, 0.5, 2, 4)


@pytest.mark.parametrize("prompt", [[1, 2, 3, 5, 5], [1, 2, 3, 4], [9, 2, 3, 4, 5]])
def test_calls_that_do_not_go_on_from_each_other_are_refused(prompt: list[int]) -> None:
    with pytest.raises(IntegrityError, match="call 0 of session 's'"):
        trajectory_of("s", 0, [CALLS[0], call(1, [9, 9, 9, *prompt], [6], 2)], reward=None, end="idle")


def test_all_of_a_plain_response_is_trained() -> None:
    assert CALLS[0].response.loss_mask.tolist() == [1, 1]
