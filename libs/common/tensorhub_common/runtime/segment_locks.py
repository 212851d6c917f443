"""The two locks on a segment that readers may map: who maps it, and that its holder wants it back. I/O.

A reader's lock is a shared `flock`. It belongs to the open file description, which goes with the descriptor to other
processes and is kept by every mapping of it. So it ends with the last mapping, however that ends.

Memory of a GPU has no file, so its segment has an empty one for its locks. The reader's process keeps the descriptor
of that until it has unmapped the memory.

A holder's wish is an exclusive record lock of the holder's own description. It ends with the holder's process. The two
kinds of lock don't know of each other (flock(2), fcntl(2)), so a wish is seen by each process that maps the segment.
"""

import fcntl
import os
import struct

_RECORD_LOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: kind, origin, start, length, process."""


def reopened(fd: int, flags: int) -> int:
    """Return a description of its own of the same file, with its own access mode. The caller closes it."""
    # Through /proc, which also finds files without a name.
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def lent(fd: int) -> int:
    """Return a read-only description with a reader's lock. The caller hands it over, and closes it."""
    own = reopened(fd, os.O_RDONLY)
    try:
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(own)
        raise
    return own


def is_lent(fd: int) -> bool:
    """Tell whether a reader has its lock."""
    own = reopened(fd, os.O_RDWR)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(own)
    return False


def ask_back(fd: int, *, is_wanted: bool) -> None:
    """Have readers see that the holder wants the segment back, or no more. `fd`: the holder's, open for writing."""
    kind = fcntl.F_WRLCK if is_wanted else fcntl.F_UNLCK
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RECORD_LOCK.pack(kind, os.SEEK_SET, 0, 1, 0))


def is_asked_back(fd: int) -> bool:
    """Tell whether the holder wants the segment back. `fd`: any other description's."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _RECORD_LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    return bool(_RECORD_LOCK.unpack(found)[0] != fcntl.F_UNLCK)
