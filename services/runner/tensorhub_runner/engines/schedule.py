"""Which tokens a step computes, and where their keys and values are kept. Decides, and computes nothing.

Attempts are served in the order in which they were begun. Those that have one token to compute get it in each step.
Prompts, and what was made before a response moved, are computed in parts: at most `prefill_tokens_max` a step together.

The cache has a place for each token, and no attempt reserves any. When it is full, the attempt that was begun last
gives up all of its places and waits. It is computed again once there is room, so nothing that it made is lost.

The attempts of a group have one prompt. It is computed once: the others wait until it is there, and share its places.

Invariants (`check`):
- A place that is not free is counted once for each attempt that has it. No other attempt writes to it.
- The first of the attempts always gets a place, so a step with work makes progress.
- No attempt begins to be computed before an earlier one, unless that one waits for its group's prompt.
"""

from array import array
from dataclasses import dataclass, field

import msgspec

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling


class EngineLimits(msgspec.Struct, frozen=True):
    """The bounds of an engine of this tree."""

    slots: int = 64
    """How many attempts are in the engine at once."""
    cache_tokens_max: int = 65_536
    """Limit of the tokens whose keys and values are kept, of all attempts together."""
    prefill_tokens_max: int | None = None
    """Limit of the tokens of prompts that a step computes, so that no step is long. None: the engine's own."""
    context_tokens_max: int | None = None
    """Limit of prompt and response together. None: the model's own, or all of the cache where that is smaller."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt: its tokens, and which of them are computed."""

    attempt: Attempt
    prompt: bytes
    prompt_count: int
    tokens: "array[int]"
    """int32: prompt and response."""
    sampling: Sampling
    places: "array[int]" = field(default_factory=lambda: array("q"))
    """int64: where in the cache each token is, from the first on. Those of this step are the last ones."""
    computed: int = 0
    """How many of the places have keys and values."""
    weights: int = -1
    """On which weights its first place was computed, as the schedule counts them."""

    @property
    def made(self) -> int:
        """How many tokens its response has."""
        return len(self.tokens) - self.prompt_count

    @property
    def missing(self) -> int:
        """How many tokens have to be computed before the next one can be drawn."""
        return len(self.tokens) - len(self.places)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool
    """Whether nothing of the sequence is missing behind it: a token is drawn then."""
    is_decode: bool
    """Whether it is the one token that the step before made."""


class Schedule:
    """The attempts of one engine, and the places of its cache."""

    def __init__(self, cache_tokens_max: int, prefill_tokens_max: int) -> None:
        """Have no attempt, and all places free."""
        self._prefill_tokens_max = prefill_tokens_max
        self._sequences: dict[Attempt, Sequence] = {}
        self._uses = array("q", bytes(8 * cache_tokens_max))
        """By place: how many sequences have it."""
        self._free = array("q", range(cache_tokens_max - 1, -1, -1))
        self.weights = 0
        """How often the weights have changed."""

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence. The caller has seen that its context is not larger than the cache."""
        self._sequences[sequence.attempt] = sequence

    def end(self, attempt: Attempt) -> None:
        """Forget a sequence, if it is here, and free its places."""
        sequence = self._sequences.pop(attempt, None)
        if sequence is not None:
            self._release(sequence)

    def weights_changed(self) -> None:
        """Let no later sequence share what was computed until now."""
        self.weights += 1

    def plan(self) -> list[Chunk]:
        """Decide about one step, and take the places for it. `computed` has to be called for each chunk."""
        chunks = list[Chunk]()
        prefill_left = self._prefill_tokens_max
        is_blocked = False
        for sequence in self._sequences.values():
            if not sequence.places:
                if is_blocked or self._waits_for_prompt(sequence):
                    continue
                if not self._admit(sequence):
                    is_blocked = True
                    continue
            is_decode = sequence.missing == 1
            wanted = 1 if is_decode else min(sequence.missing, prefill_left)
            count = min(wanted, self._make_room(sequence, wanted))
            if not count:
                continue
            prefill_left -= 0 if is_decode else count
            start = len(sequence.places)
            sequence.places.extend(self._take() for _ in range(count))
            chunks.append(Chunk(sequence, start, count, is_last=not sequence.missing, is_decode=is_decode))
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """Note that the keys and values of a chunk are in the cache."""
        chunk.sequence.computed = chunk.start + chunk.count

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        uses = array("q", bytes(8 * len(self._uses)))
        for sequence in self._sequences.values():
            assert sequence.computed <= len(sequence.places) <= len(sequence.tokens)
            for place in sequence.places:
                uses[place] += 1
        assert uses == self._uses
        assert sorted(self._free) == [place for place, count in enumerate(uses) if not count]

    # ------------------------------------------------------------------------------------------ who computes

    def _waits_for_prompt(self, sequence: Sequence) -> bool:
        """Tell whether another sequence computes the same prompt right now."""
        donor = self._donor(sequence)
        return donor is not None and donor.computed < _shared(sequence)

    def _donor(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence that has most of the same prompt, on the present weights."""
        donors = [
            each
            for each in self._sequences.values()
            if each.places and each.weights == self.weights and each.prompt == sequence.prompt
        ]
        return max(donors, key=lambda each: each.computed, default=None)

    def _admit(self, sequence: Sequence) -> bool:
        """Let a sequence begin to be computed if there is room for all of it beside what the others miss."""
        donor = self._donor(sequence)
        shared = 0 if donor is None else _shared(sequence)
        others = [each.missing for each in self._sequences.values() if each.places]
        if others and len(sequence.tokens) - shared + sum(others) > len(self._free):
            return False
        if donor is not None:
            sequence.places = donor.places[:shared]
            for place in sequence.places:
                self._uses[place] += 1
        sequence.computed, sequence.weights = shared, self.weights
        return True

    # ------------------------------------------------------------------------------------------ places

    def _make_room(self, sequence: Sequence, wanted: int) -> int:
        """Take the places of sequences that were begun later until enough are free; return how many are."""
        if len(self._free) < wanted:
            for victim in reversed(self._sequences.values()):
                if victim is sequence or len(self._free) >= wanted:
                    break
                self._release(victim)
        return len(self._free)

    def _take(self) -> int:
        place = self._free.pop()
        self._uses[place] = 1
        return place

    def _release(self, sequence: Sequence) -> None:
        for place in sequence.places:
            self._uses[place] -= 1
            if not self._uses[place]:
                self._free.append(place)
        sequence.places, sequence.computed = array("q"), 0


def _shared(sequence: Sequence) -> int:
    """Return how many places a sequence may share: not that of its last token, behind which one is drawn."""
    return min(sequence.prompt_count, len(sequence.tokens) - 1)
