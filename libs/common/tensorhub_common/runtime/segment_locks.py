"""The two locks on a segment that readers may map: who maps it, and that its holder wants it back. I/O.

A reader's lock is a shared `flock`. It belongs to the open file description, which goes with the descriptor to other
processes and is kept by every mapping of it. So it ends with the last mapping, however that ends.

A holder's wish is an exclusive record lock of the holder's own description. It ends with the holder's process. The two
kinds of lock don't know of each other (flock(2), fcntl(2)), so a wish is seen by each process that maps the segment.
"""

import fcntl
import os
import struct

_RECORD_LOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: kind, origin, start, length, process."""


def lend(fd: int) -> None:
    """Take a reader's lock for a descriptor that is about to be handed over."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_lent(fd: int) -> bool:
    """Tell whether a reader has its lock. `fd`: of a description of its own, which is closed next."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def ask_back(fd: int, *, is_wanted: bool) -> None:
    """Have readers see that the holder wants the segment back, or no more. `fd`: the holder's, open for writing."""
    kind = fcntl.F_WRLCK if is_wanted else fcntl.F_UNLCK
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RECORD_LOCK.pack(kind, os.SEEK_SET, 0, 1, 0))


def is_asked_back(fd: int) -> bool:
    """Tell whether the holder wants the segment back. `fd`: any other description's."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _RECORD_LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_RECORD_LOCK.unpack(found)[0] != fcntl.F_UNLCK)
