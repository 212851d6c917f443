"""What holds for every test: it finds `logging` as the first one did, in whatever order and process they run.

`--hypothesis-profile=thorough` draws four times as many examples, as `make slow` does.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("thorough", max_examples=400)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Take back what a command that ran in this process told the root logger: its level, and where lines go."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
