"""The end of a child that `multiprocessing` has forked.

Such a child ends by `os._exit`, and nothing that was registered with `atexit` is called in it; `multiprocessing` calls
finalizers of its own instead.
"""

import os
import sys
from collections.abc import Callable
from typing import Final

_known: Final[set[tuple[int, Callable[[], None]]]] = set()
"""What has been registered, by process: a child inherits the set of its parent, but not what was registered."""


def at_child_end(end: Callable[[], None], *, order: int) -> None:
    """Have it called at the end of this process if `multiprocessing` began it; of several the highest order is first.

    It may be called twice, since a child that was not forked ends as other processes do.
    """
    process, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if process is None or util is None or process.parent_process() is None or (os.getpid(), end) in _known:
        return
    _known.add((os.getpid(), end))
    util.Finalize(None, end, exitpriority=order)
