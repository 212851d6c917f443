"""Which protocol two releases speak with each other, and what they say where they have none in common."""

import pytest

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL, Speaks, agreed, speaks
from tensorhub_common.protocol.log.commands import PROTOCOL


@pytest.mark.parametrize(
    ("here", "there", "spoken"),
    [
        (Speaks("a", 1, 1), Speaks("b", 1, 1), 1),
        # A release with one protocol says no more than that.
        (Speaks("a", 1, 3), Speaks("b", 1), 1),
        (Speaks("a", 1, 3), Speaks("b", 2, 5), 3),
        (Speaks("a", 3, 3), Speaks("b", 1, 3), 3),
    ],
)
def test_both_take_the_newest_that_they_have_in_common(here: Speaks, there: Speaks, spoken: int) -> None:
    assert agreed(here, there) == agreed(there, here) == spoken


def test_the_older_one_is_to_be_upgraded() -> None:
    newer, older = Speaks("agent a", 3, 4, "0.5.0"), Speaks("worker 17", 1, 2, "0.1.0")
    sentence = (
        "worker 17 (release 0.1.0, protocol 1 to 2) is too old for agent a (release 0.5.0, protocol 3 to 4): "
        "upgrade tensorhub where worker 17 runs"
    )
    for here, there in ((newer, older), (older, newer)):
        with pytest.raises(BadCommand) as refusal:
            agreed(here, there)
        assert str(refusal.value) == sentence


def test_this_release_speaks_with_the_one_before() -> None:
    assert OLDEST_PROTOCOL <= 1 <= PROTOCOL
    assert agreed(speaks("agent a"), Speaks("worker 17", 1)) == 1
