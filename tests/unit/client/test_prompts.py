"""What a trainer may give as prompts and sampling: it is taken as it is, or refused with what to give."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub import Prompt, Sampling
from tensorhub._rollouts.prompts import PROMPT_TOKENS_MAX, checked_prompts, checked_sampling
from tensorhub_common.protocol.rollout.messages import STOP_TOKEN_IDS_MAX


def test_each_prompt_of_an_iterator_is_taken_once_with_its_own_tokens() -> None:
    taken = list(checked_prompts(Prompt([number], id=str(number)) for number in range(5)))
    assert [prompt.id for prompt, _ in taken] == ["0", "1", "2", "3", "4"]
    assert [int.from_bytes(sent.tokens, "little") for _, sent in taken] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("given", [None, 5, Prompt([1]), "abc", b"abc"], ids=str)
def test_what_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(tensorhub.BadPrompt, match="prompts: give a list, as in"):
        list(checked_prompts(given))


@pytest.mark.parametrize(
    ("id_", "why"),
    [
        (5, "the id 5 is no text"),
        (b"x", "the id b'x' is no text"),
        ("\ud800", "can't be used: take 1 to 128 printable characters"),
        ("a\nb", "can't be used: take 1 to 128 printable characters"),
        ("", "can't be used: take 1 to 128 printable characters"),
        ("x" * 129, "can't be used: take 1 to 128 printable characters"),
    ],
    ids=range(6),
)
def test_an_id_that_no_group_can_have_is_refused(id_: Any, why: str) -> None:
    with pytest.raises(tensorhub.BadPrompt, match=re.escape(why)):
        Prompt([1], id=id_).checked()


def test_an_id_stands_once_in_a_call_however_many_entries_it_makes() -> None:
    prompts = [Prompt([1], id=f"{number % 2000}") for number in range(2001)]
    with pytest.raises(tensorhub.BadPrompt, match="two prompts of one call have the id '0': give each its own"):
        list(checked_prompts(prompts))


def test_a_prompt_that_no_message_carries_is_refused() -> None:
    assert len(Prompt(np.ones(PROMPT_TOKENS_MAX, np.int32)).checked().tokens) == 4 * PROMPT_TOKENS_MAX
    with pytest.raises(tensorhub.BadPrompt, match=f"take at most {PROMPT_TOKENS_MAX}"):
        Prompt(np.ones(PROMPT_TOKENS_MAX + 1, np.int32)).checked()


def test_numbers_of_other_libraries_are_taken_as_they_are_counted() -> None:
    given = Sampling(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([2, 7]),  # type: ignore[arg-type]
        seed=torch.tensor(9),  # type: ignore[arg-type]
    )
    sent = checked_sampling(given)
    assert (sent.tokens_max, sent.temperature, sent.stop_token_ids, sent.seed) == (3, 0.5, (2, 7), 9)
    assert {type(each) for each in (sent.tokens_max, sent.seed, *sent.stop_token_ids)} == {int}


@pytest.mark.parametrize("given", [None, 0, {}, {"max_tokens": 3}, "x"], ids=str)
def test_what_is_no_sampling_is_refused(given: Any) -> None:
    with pytest.raises(tensorhub.BadPrompt, match="is no sampling: give"):
        checked_sampling(given)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"stop_token_ids": 2}, "stop_token_ids=2 is not possible"),
        ({"stop_token_ids": None}, "stop_token_ids=None is not possible"),
        ({"stop_token_ids": "ab"}, "a stop token id='a' is not possible"),
        ({"stop_token_ids": range(STOP_TOKEN_IDS_MAX + 1)}, f"take at most {STOP_TOKEN_IDS_MAX}"),
        ({"logprobs": []}, "logprobs=[] is not possible"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 is not possible"),
        ({"max_tokens": True}, "max_tokens=True is not possible"),
        ({"temperature": "hot"}, "temperature='hot' is not possible"),
        ({"top_p": float("nan")}, "top_p=nan is not possible"),
    ],
    ids=str,
)
def test_a_sampling_that_can_not_be_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(tensorhub.BadPrompt, match=re.escape(why)):
        checked_sampling(replace(Sampling(), **wrong))


def test_a_prompt_has_a_session_and_a_turn_or_neither() -> None:
    sent = Prompt([1], session="s", turn=3).checked().turn
    assert sent is not None
    assert (sent.session, sent.turn) == ("s", 3)
    assert Prompt([1]).checked().turn is None
    for session, turn in (("s", None), (None, 1), ("", 1), ("s", -1)):
        with pytest.raises(tensorhub.BadPrompt):
            Prompt([1], session=session, turn=turn).checked()
