"""What is worth telling of the responses of one step: rewards, versions, and what moved meanwhile."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensorhub import Response
from tensorhub.demo.rl.clock import reward


def facts_of(responses: Sequence[Response], version: int) -> dict[str, Any]:
    """Return the facts of responses that are learned from on top of a version.

    `groups`: how many responses each has. `versions_behind`: by how many versions its token is older than that version,
    how many tokens. `moved`: responses that more than one attempt made. `computed_again`: tokens of prompts and
    responses whose keys and values a move (`by_moves`) or a new version (`by_updates`) made a runner compute again.
    """
    behind, again = Counter[int](), Counter[str]()
    rewards = [
        reward(int(each.prompt_ids[0]), each.token_ids.tolist())
        for each in responses
        if each.finish_reason in {"stop", "length"}
    ]
    for response in responses:
        behind.update(version - int(made) for made in response.versions)
        for before, run in zip(response.runs, response.runs[1:], strict=False):
            why = "by_updates" if before.attempt == run.attempt else "by_moves"
            again[why] += len(response.prompt_ids) + run.start
    return {
        "version": version,
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "right": sum(each == 1.0 for each in rewards) / len(rewards) if rewards else 0.0,
        "groups": dict(Counter(each.group for each in responses)),
        "tokens": sum(len(each.token_ids) for each in responses),
        "versions_behind": {str(each): count for each, count in sorted(behind.items())},
        "moved": sum(len({run.attempt for run in each.runs}) > 1 for each in responses),
        "computed_again": {"by_moves": again["by_moves"], "by_updates": again["by_updates"]},
        "failed": sum(each.finish_reason not in {"stop", "length"} for each in responses),
    }
