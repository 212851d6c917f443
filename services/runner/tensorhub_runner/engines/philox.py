"""Random numbers that are a function of a key and a counter: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC'11), section 3.3. A
generator with a state would have to travel with a response that moves, and would tie its draws to what else runs. Here
the draw of a token is a function of the request's seed and the token's position, wherever and with whatever it is made.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.array([0x9E3779B9], np.uint32), np.array([0xBB67AE85], np.uint32))
_WORD: Final = np.uint64(32)
_SEED_MASK: Final = (1 << 64) - 1


def philox(counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return four random words for each row: counters[n, 4] and keys[n, 2] make words[n, 4]."""
    (first, second, third, fourth), (left, right) = counters.astype(np.uint32).T, keys.astype(np.uint32).T
    for _ in range(ROUNDS):
        one, two = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = (two >> _WORD).astype(np.uint32) ^ second ^ left, two.astype(np.uint32)
        third, fourth = (one >> _WORD).astype(np.uint32) ^ fourth ^ right, one.astype(np.uint32)
        # Modulo 2^32.
        left, right = left + _WEYL[0], right + _WEYL[1]
    return np.stack([first, second, third, fourth], axis=1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1), of 53 random bits, for each (seed, position): float64[n].

    Seeds count modulo 2^64. The two upper words of the counter are 0, so that later draws of another kind at the same
    position can have others.
    """
    counters = np.zeros((len(positions), 4), np.uint32)
    counters[:, :2] = np.array(positions, np.uint64).view(np.uint32).reshape(-1, 2)
    keys = np.array([seed & _SEED_MASK for seed in seeds], np.uint64).view(np.uint32).reshape(-1, 2)
    words = philox(counters, keys)
    upper, lower = words[:, 0] >> np.uint32(5), words[:, 1] >> np.uint32(6)
    return (upper * 2.0**26 + lower) * 2.0**-53
