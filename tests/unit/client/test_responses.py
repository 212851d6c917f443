"""Responses as a trainer gets them: each token's version, and how old what a batch has is."""

import numpy as np
import pytest

import tensorhub
from tensorhub._rollouts import records
from tensorhub._rollouts.responses import Response, Staleness, response_of, staleness_of
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import Sampling, TokenRun, VersionRule
from tensorhub_common.protocol.rollout.payloads import StoredTokens, SubmittedPrompt, SubmittedPrompts
from tensorhub_common.protocol.rollout.questions import EndedRequest

PUBLISHED = (1, 2, 4, 7)


ENGINE = messages.RunEngine("torch", "torch 2.9", "float64", is_exact=True)


def response(group: str, *runs: tuple[int, int], newest: int | None = None) -> Response:
    """Return a response with runs of (version, number of tokens). `newest`: the newest one when it was submitted."""
    stored, at = list[TokenRun](), 0
    for version, count in runs:
        stored.append(TokenRun(at, version, f"root-{version}", "runner-0", Attempt(1, 1), engine=ENGINE))
        at += count
    ended = EndedRequest(RequestId(1, 0), 2, group, 0, 4, 0, "prompts", 0, "stop", at)
    prompts = SubmittedPrompts(Sampling(8, 7), VersionRule(), (SubmittedPrompt(b""),), "nonce", newest=newest)
    tokens = StoredTokens(bytes(4 * at), bytes(4 * at), tuple(stored)) if at else None
    return response_of(ended, prompts, tokens, PUBLISHED)


def test_ages_count_versions_that_are_published_and_not_numbers() -> None:
    made = response("a", (1, 3), (4, 2), (7, 1))
    assert [run.age for run in made.runs] == [3, 1, 0]
    assert made.age == 3
    assert np.array_equal(made.versions, [1, 1, 1, 4, 4, 7])


def test_a_response_names_its_sampling_and_what_made_each_run() -> None:
    made = response("a", (1, 3))
    assert made.sampling == tensorhub.Sampling(8, seed=7)
    assert made.runs[0].engine == tensorhub.RunEngine("torch", "torch 2.9", "float64", is_exact=True)


def test_a_response_is_saved_whole_but_for_its_metadata() -> None:
    made = response("a", (1, 3), (4, 2))
    saved = records.record_of("run-7", "policy", made)
    assert (saved.job, saved.model, saved.group, saved.index, saved.seed) == ("run-7", "policy", "a", 0, made.seed)
    assert (saved.runs, saved.sampling, saved.finish_reason) == (made.runs, made.sampling, made.finish_reason)
    assert [*saved.token_ids] == made.token_ids.tolist()
    assert [*saved.logprobs] == made.logprobs.tolist()
    with pytest.raises(ValueError, match="it needs a prompt"):
        records.decode(records.encode(saved))


def test_a_batch_says_how_old_its_tokens_responses_and_groups_are() -> None:
    batch = [response("a", (1, 3), (4, 2)), response("a", (7, 5)), response("b", (4, 1)), response("c")]
    assert staleness_of(batch) == Staleness(
        tokens={0: 5, 1: 3, 3: 3}, responses={0: 1, 1: 1, 3: 1}, groups={1: 1, 3: 1}
    )
    assert staleness_of([]) == Staleness({}, {}, {})


def test_a_batch_says_how_many_versions_were_published_since_its_groups_were_submitted() -> None:
    """Versions 1, 2, 4 and 7 are published. What waited for a place made its tokens on newer ones."""
    batch = [
        *(response("a", (7, 3), newest=1), response("a", (4, 1), newest=1)),
        response("b", (7, 3), newest=7),
        response("c", (7, 3), newest=2),
        response("d", (7, 3), newest=3),
        response("not known", (7, 1)),
        response("without a token", newest=1),
    ]
    assert [each.since_submit for each in batch] == [3, 3, 0, 2, 2, None, 3]
    assert staleness_of(batch).since_submit == {0: 1, 2: 2, 3: 1}
