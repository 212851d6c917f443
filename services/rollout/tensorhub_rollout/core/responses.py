"""The tokens of one open request, as the leading manager holds them.

Invariant: tokens have no gap, and belong to one chain of attempts: each began where the one before it was known to end.
"""

from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, TokenRun


class TokensDiffer(Exception):
    """A runner sent other tokens than those that it had sent for the same places."""


@dataclass(slots=True)
class Response:
    """Tokens, log-probabilities and runs from token 0 on."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    runs: list[TokenRun] = field(default_factory=list)
    attempt: Attempt | None = None
    """The highest attempt whose tokens are in it."""
    dropped: Attempt | None = None
    """Of this attempt and earlier ones it has no token, or none is known to be: it began anew, or was adopted."""

    @property
    def count(self) -> int:
        """How many tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def take(self, start: int, tokens: memoryview, logprobs: memoryview) -> bool:
        """Take the live attempt's tokens from `start` on; False: they begin behind what is held, and none is taken.

        Raises `TokensDiffer` where they overlap what is held and are not equal to it.
        """
        at, held = TOKEN_BYTES * start, len(self.tokens)
        if at > held:
            return False
        overlap = min(held - at, len(tokens))
        if overlap:
            for kept, came in ((self.tokens, tokens), (self.logprobs, logprobs)):
                if kept[at : at + overlap] != came[:overlap]:
                    raise TokensDiffer(
                        f"tokens {start} to {start + overlap // TOKEN_BYTES} are not those that came before"
                    )
        self.tokens += tokens[overlap:]
        self.logprobs += logprobs[overlap:]
        return True

    def add_run(self, run: TokenRun) -> None:
        """Take a run of tokens that are held, unless it is known."""
        if not self.runs or run.start > self.runs[-1].start:
            self.runs.append(run)
