"""Sets of piece numbers as ranges (first, count), between marks in a bytearray and lists. Pure."""

from collections.abc import Iterable

from tensorhub_common.protocol.ranges import Range

MARK = b"\x01"


def ranges_of_marks(marks: bytearray, start: int, stop: int) -> list[Range]:
    """Return the runs of set marks in [start, stop)."""
    runs = []
    at = marks.find(1, start, stop)
    while at != -1:
        end = marks.find(0, at, stop)
        end = stop if end == -1 else end
        runs.append((at, end - at))
        at = marks.find(1, end, stop)
    return runs


def split_by_marks(marks: bytearray, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """Divide these pieces into those with a mark and those without."""
    with_mark: list[Range] = []
    without: list[Range] = []
    for first, count in ranges:
        at, stop = first, first + count
        while at < stop:
            is_marked = marks[at]
            end = marks.find(0 if is_marked else 1, at, stop)
            end = stop if end == -1 else end
            (with_mark if is_marked else without).append((at, end - at))
            at = end
    return with_mark, without


def ranges_of_gaps(marks: bytearray) -> list[Range]:
    """Return the runs of marks that are not set."""
    return ranges_of_marks(bytearray(1 - mark for mark in marks), 0, len(marks))


def set_marks(marks: bytearray, ranges: Iterable[Range]) -> None:
    """Set the marks of these pieces."""
    for first, count in ranges:
        marks[first : first + count] = MARK * count


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges that don't overlap, and join those that touch."""
    result: list[Range] = []
    for first, count in sorted(ranges):
        if result and sum(result[-1]) == first:
            result[-1] = (result[-1][0], result[-1][1] + count)
        else:
            result.append((first, count))
    return result


def clear_marks(marks: bytearray, ranges: Iterable[Range]) -> None:
    """Take the marks of these pieces away."""
    for first, count in ranges:
        marks[first : first + count] = bytes(count)


def total_count(ranges: Iterable[Range]) -> int:
    """Return how many pieces they are."""
    return sum(count for _, count in ranges)


def take_first(ranges: list[Range], wanted: int) -> list[Range]:
    """Take `wanted` pieces away from the front, or all; returns them."""
    taken: list[Range] = []
    whole = 0
    for first, count in ranges:
        part = min(count, wanted)
        if not part:
            break
        taken.append((first, part))
        wanted -= part
        if part < count:
            ranges[whole] = (first + part, count - part)
            break
        whole += 1
    del ranges[:whole]
    return taken
