"""How many examples a property is tested with, by what one of them costs.

`make test` draws few of them and the same ones each time; `make slow` draws eight times as many, others each time.
"""

from hypothesis import settings


def examples(part: float) -> int:
    """Return this part of the usual number of examples, in whatever profile this is: at least one."""
    return max(int(settings().max_examples * part), 1)
