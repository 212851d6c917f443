"""How long tests wait, on a machine that may be busy with other things.

A wait is for a condition: it ends when that comes, and how long its bound is costs nothing. What a test shows to be
quick it shows to be quicker than something that has no end, or takes minutes.
"""

from typing import Final

WAIT_S: Final = 120.0
"""A condition that has not come by then never comes."""

BUSY_S: Final = 20.0
"""So much longer a busy machine may take over what is done at once."""
