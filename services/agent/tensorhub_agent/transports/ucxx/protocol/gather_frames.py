"""What reader and source of the ucxx transport say to each other about boxes, beside the frames of `ucxx_frames.py`.

reader                                 source
receives are posted, then
Gather(tag, ...)                 →
←   its messages under tag, tag + 1, ..., in any order
←   Sums(tag, sums), if they were wanted
"""

from typing import Final

from tensorhub_agent.primitives.lease_messages import Frame
from tensorhub_common.programs.regions import Form

SLOT_BYTES: Final = 4 * 1024 * 1024
"""What a frame asks for is packed into so many bytes at most; as long as the longest message."""

COMPUTED_BYTES_MAX: Final = 64 * 1024 * 1024
"""What a frame asks for is computed of so many bytes at most, beside what is sent as it stands or cast: scales are few
and made of many, and must come before the reader takes the source for stalled."""

AMAX_BYTES_MAX: Final = 32 * 1024
"""With a frame come so many bytes of blocks' largest magnitudes at most, by which values are computed."""

MESSAGES_MAX: Final = 1024
"""A frame asks for so many messages at most."""

BOXES_MAX: Final = 4096
"""And for so many boxes that have to be packed."""

FORMS_MAX: Final = 256
"""And these have so many forms. With `DIMS_MAX` that keeps the frame well below `FRAME_BYTES_MAX`."""

FRAMES_UNDER_WAY_MAX: Final = 32
"""A reader has so many of these frames unanswered at most; ours stays below, see `LOTS_MAX`."""


class Gather(Frame, frozen=True, tag="gather"):
    """Send these messages: the receives for them are posted.

    The first messages are parts of the segment as they stand; each of the others is some boxes, packed one after
    another, the elements of each in the order of their indices.
    """

    tag: int
    origin: list[int]
    """Message i is `nbytes[i]` bytes from `origin[i]` on."""
    nbytes: list[int]
    counts: list[int]
    """Of the messages that follow, how many boxes each has."""
    box_origin: list[int]
    box_form: list[int]
    """Box i begins at `box_origin[i]`, and is of `forms[box_form[i]]`: from where it stands to packed."""
    forms: list[Form]
    sums: bool
    """Whether the reader wants to know the digests of what is sent."""
    amax: bytes = b""
    """Of the boxes that are computed by their blocks' largest magnitudes, these, one box after another."""


class Sums(Frame, frozen=True, tag="sums"):
    """The digests of a frame's messages, one after another, of the bytes that were sent."""

    tag: int
    sums: bytes
