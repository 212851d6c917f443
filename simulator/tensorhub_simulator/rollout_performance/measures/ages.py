"""How old the tokens are that a trainer learns from, in versions. Pure.

The age of a token is how many versions were newer than its own when it was trained. That of a response is the age of
its oldest token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import TokenRun


class Ages(msgspec.Struct, frozen=True):
    """Of all that was trained."""

    tokens: float = 0.0
    """The mean of all tokens."""
    responses: float = 0.0
    """And of all responses."""
    oldest: int = 0
    """Of the oldest response."""
    mixed: float = 0.0
    """Which part of the responses has tokens of more than one version."""


@dataclass(slots=True)
class AgeCounts:
    """Sums, as responses end and are trained."""

    _made: dict[RequestId, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each response that has ended and was not trained: its versions, with how many tokens each made."""
    _tokens: int = 0
    _of_tokens: int = 0
    _responses: int = 0
    _of_responses: int = 0
    _oldest: int = 0
    _mixed: int = 0

    def ended(self, of: RequestId, runs: Iterable[TokenRun], count: int) -> None:
        """Note a response of so many tokens that is whole."""
        begins = [(run.start, run.version) for run in runs]
        self._made[of] = [(version, until - start) for (start, version), (until, _) in pairwise([*begins, (count, 0)])]

    def trained(self, of: RequestId, version: int) -> None:
        """Note that it was trained, where this version was the newest."""
        made = self._made.pop(of)
        age = max(version - each for each, _ in made)
        self._tokens += sum(count for _, count in made)
        self._of_tokens += sum(count * (version - each) for each, count in made)
        self._responses += 1
        self._of_responses += age
        self._oldest = max(self._oldest, age)
        self._mixed += len({each for each, _ in made}) > 1

    @property
    def found(self) -> Ages:
        """Return what they are on average."""
        if not self._responses:
            return Ages()
        return Ages(
            self._of_tokens / self._tokens,
            self._of_responses / self._responses,
            self._oldest,
            self._mixed / self._responses,
        )
