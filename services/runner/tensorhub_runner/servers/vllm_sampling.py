"""vLLM's sampling parameters for what is left of a response, for its server and for its engine in process. Pure."""

from typing import Final

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.servers.server import EndReason

SEED_BITS: Final = 63
"""vLLM gives a seed to torch as a signed number."""
REASONS: Final[dict[str, EndReason]] = {"stop": "stop", "length": "length", "abort": "interrupted"}
"""Why a stream has ended, by what vLLM says."""

_MIX: Final = 0x9E37_79B9_7F4A_7C15
"""An odd number without pattern, as in splitmix64."""


def seed_at(seed: int, made: int) -> int:
    """Return the seed of a stream that goes on behind `made` tokens of a response.

    vLLM draws from a generator that begins with the stream. With one seed for all parts of a response, the noise of its
    first tokens would come again behind each move.
    """
    return (seed ^ (made * _MIX)) % (1 << SEED_BITS)


def sampling_params(sampling: Sampling, made: int) -> dict[str, object]:
    """Return vLLM's parameters for what is left of a response. Raises `BadPrompt` where vLLM can't do what is asked."""
    is_narrowed = sampling.top_p < 1.0 or sampling.top_k > 0
    if sampling.logprobs == "temperature" and is_narrowed:
        raise BadPrompt(
            "logprobs='temperature' with top_p or top_k needs an engine that gives both distributions: vLLM gives the "
            "processed one. Take logprobs='processed', or the torch engine"
        )
    return {
        "max_tokens": sampling.tokens_max - made,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed_at(sampling.seed, made),
        "stop_token_ids": list(sampling.stop_token_ids),
        # The model's own end counts only where the request names it.
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
