"""What is raised by reading bytes that are no message of ours: others write to buses, sockets and disks too."""

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""A text may hold bytes that are no UTF-8, and lists may be nested to any depth: msgspec has no error of its own for
these."""
