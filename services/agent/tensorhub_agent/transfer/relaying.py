"""When a source is asked for its word on what came, while it still brings more. Pure."""

from typing import Final

from tensorhub_agent.transfer.source import Reading

RELAYED_BYTES: Final = 8 * 1024 * 1024
"""A source is asked for its word on so much at a time, where others wait for what it brings."""

RELAYED_FAR_BYTES: Final = 1024 * 1024
"""The same for one in another site: its line is thin, and the whole site waits."""


def is_early_word_wanted(source: Reading, *, is_relayed: bool) -> bool:
    """Tell whether to ask a source about what has come so far; `is_relayed`: others wait for what comes here.

    Partials are always asked about: the next ones come after that, and values wait for their folds.
    """
    wanted_bytes = RELAYED_FAR_BYTES if source.share.far else RELAYED_BYTES
    return bool(source.owed) or (is_relayed and source.unconfirmed_bytes >= wanted_bytes)
