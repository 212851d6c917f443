"""What holds for every test: it finds `logging` as the first one did, in whatever order and process they run.

`--hypothesis-profile=thorough` draws four times as many examples, as `make slow` does; `mutants` draws
the same ones each time and keeps what it found as it is, as `make mutants` does.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

settings.register_profile("thorough", max_examples=400)
settings.register_profile(
    "mutants", max_examples=10, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Take back what a command that ran in this process told the root logger: its level, and where lines go."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
