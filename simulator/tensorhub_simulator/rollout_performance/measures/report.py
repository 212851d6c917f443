"""What came of a run: how long it took, what it made and what it cost. Pure."""

import math

import msgspec

from tensorhub_simulator.rollout_performance.config.scenario import System
from tensorhub_simulator.rollout_performance.measures.ages import Ages
from tensorhub_simulator.rollout_performance.measures.tails import StepTail
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline


class Report(msgspec.Struct, frozen=True):
    """What came of a run. Times in seconds."""

    system: System
    steps: int
    seconds: float
    tokens: int
    """Of responses that were trained."""
    made: int
    """Tokens that engines made: more where some were lost."""
    responses: int
    waited_s: float
    seeded_s: float
    trained_s: float
    spot_s: float
    """Of all spot instances, from their boot on."""
    cost: float
    lost: int
    """Spot instances that went with work on them before the job was over."""
    step_s: tuple[float, ...]
    step_tokens: tuple[int, ...]
    """Trained in each step."""
    tails: tuple[StepTail, ...] = ()
    """When the responses of each step were whole."""
    ages: Ages = Ages()
    """How old the tokens were that were trained, in versions."""
    instances: tuple[int, ...] = ()
    """With `spot.delta_from`: how many there were to be in each step."""
    timeline: Timeline | None = None
    """Where it was asked for."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens."""
        return self.tokens / self.seconds

    @property
    def later_tokens_per_s(self) -> float:
        """Trained tokens once the first step is over: nothing was prepared before that, as in no later one."""
        seconds, tokens = self.seconds - self.step_s[0], self.tokens - self.step_tokens[0]
        return tokens / seconds if len(self.step_s) > 1 else self.tokens_per_s

    @property
    def tokens_per_cost(self) -> float:
        """Trained tokens for one unit of money; infinite where nothing costs."""
        return self.tokens / self.cost if self.cost else math.inf
