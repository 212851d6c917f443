"""What is worth telling of the responses of one step: rewards, versions, and what moved meanwhile."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tensorhub import Response
from tensorhub.demo.rl.clock import reward


def facts_of(responses: Sequence[Response], version: int, until: int | None = None) -> dict[str, Any]:
    """Return the facts of responses that are learned from on top of a version, and are to end with the hour `until`.

    `groups`: how many responses each has. `versions_behind`: by how many versions its token is older than that version,
    how many tokens. `moved`: responses that more than one attempt made. `computed_again`: tokens of prompts and
    responses whose keys and values a move (`by_moves`) or a new version (`by_updates`) made a runner compute again.
    """
    behind, again = Counter[int](), Counter[str]()
    rewards = [
        reward(int(each.prompt_ids[0]), each.token_ids.tolist(), until)
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


def lines_of_lengths(responses: Sequence[Response], step: int, tokens_max: int) -> Iterator[str]:
    """Yield a line of JSON for each group, as `python -m benchmarks.lengths` reads it.

    `group` is the content of the prompt, which comes again under other ids. Lengths are in the order of the group, and
    not in that in which responses ended. What has failed is left out. One of `tokens_max` tokens was cut off.
    """
    prompts, lengths = dict[str, list[int]](), dict[str, list[int]]()
    for each in sorted(responses, key=lambda each: each.index):
        if each.finish_reason in {"stop", "length"}:
            prompts[each.group] = each.prompt_ids.tolist()
            lengths.setdefault(each.group, []).append(len(each.token_ids))
    for group, out_lens in lengths.items():
        name, prompt_len = " ".join(map(str, prompts[group])), len(prompts[group])
        line = {"group": name, "prompt_len": prompt_len, "out_lens": out_lens, "step": step, "tokens_max": tokens_max}
        yield json.dumps(line) + "\n"
