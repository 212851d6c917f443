"""What prompts of about the same length tell of the responses of a new one. Pure.

Prompts of one job that are nearly as long are often made in one way, from the same template or the same data set. They
are taken together by the logarithm of their length, and what they tell is drawn to the job's mean where there are few
of them: the model is that of `lengths`, with such a class of prompts in place of a prompt. On a public trace this tells
as much as a regressor does (docs/design/rollouts/lengths.md).
"""

import math
from typing import Final

from tensorhub_rollout.policy.lengths import Knowledge, LengthLimits, LengthModel, Prior

CLASSES_PER_DOUBLING: Final = 16
"""Prompts that differ by less than 4 % are of one class, or of two beside each other."""


class PromptLengths:
    """The responses of a job by the lengths of their prompts. It takes one response of each group.

    More of a group would count as more prompts. Which one it is must not depend on what ends first.
    """

    def __init__(self, limits: LengthLimits) -> None:
        """Know nothing yet."""
        self._model = LengthModel(limits)

    def finished(self, prompt_tokens: int, tokens: int) -> None:
        """Take how long a response was."""
        self._model.finished(_class_of(prompt_tokens), tokens)

    def cut_off(self, prompt_tokens: int, tokens: int) -> None:
        """Take that a response was cut off after so many tokens."""
        self._model.cut_off(_class_of(prompt_tokens), tokens)

    def prior(self, prompt_tokens: int, within: float) -> Prior | None:
        """Return what is expected of a prompt; None: none as long was seen.

        `within`: the variance of the log lengths of one prompt.
        """
        found = self._model.estimate_group(_class_of(prompt_tokens))
        if found.knowledge is not Knowledge.FINISHED:
            return None
        return Prior(found.mean, 1 / found.precision + max(0.0, found.within - within))


def _class_of(prompt_tokens: int) -> int:
    return round(CLASSES_PER_DOUBLING * math.log2(max(1, prompt_tokens)))
