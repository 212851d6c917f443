"""When the machines of a recorded spot trace come and go, for as many instances as a scenario wants. Pure.

A trace's machines stand on seats: one that comes takes the lowest that is free. A scenario that wants K instances at
most, of a trace that has P, gives its k-th instance the seat `k * P // K`. So of a larger trace K evenly chosen seats
count, and of a smaller one each stands for several instances. Machines that the trace kills together go together, and
an instance lives as long as the machine that it stands for.
"""

import heapq
from collections import Counter
from typing import Final, Literal

import msgspec

COLUMNS: Final = 3
"""Of a trace: second, comes or goes, machine."""
LINES_MAX: Final = 1_000_000


class TraceError(ValueError):
    """A trace can't be read. The message says which line, and why."""


class SpotChange(msgspec.Struct, frozen=True):
    """What happens at one time: machines that go, and others that come."""

    at_s: float
    goes: tuple[str, ...] = ()
    comes: tuple[str, ...] = ()


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One machine of a recorded trace comes, or goes."""

    at_s: float
    what: Literal["comes", "goes"]
    machine: str


def recorded(text: str) -> tuple[Line, ...]:
    """Return the lines of a trace, as CSV: second, `comes` or `goes`, machine; # begins a comment.

    Raises `TraceError`.
    """
    found: list[Line] = []
    there: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [each.strip() for each in line.split(",")]
        try:
            at_s, what, machine = float(parts[0]), parts[1], parts[2]
        except (IndexError, ValueError):
            raise TraceError(f"line {number} is not `second,comes,machine` or `second,goes,machine`") from None
        if what not in ("comes", "goes") or len(parts) > COLUMNS or not 0 <= at_s < float("inf"):
            raise TraceError(f"line {number} is not `second,comes,machine` or `second,goes,machine`")
        if found and at_s < found[-1].at_s:
            raise TraceError(f"line {number} is of second {at_s:g}, and the one before of {found[-1].at_s:g}")
        if (what == "comes") == (machine in there):
            raise TraceError(f"line {number}: {machine} {what}, and is {'there' if machine in there else 'not there'}")
        there ^= {machine}
        found.append(Line(at_s, "comes" if what == "comes" else "goes", machine))
        if len(found) > LINES_MAX:
            raise TraceError(f"it has more than {LINES_MAX} lines")
    if not found:
        raise TraceError("it has no line")
    return tuple(found)


def scaled(lines: tuple[Line, ...], instances: int, from_s: float) -> tuple[SpotChange, ...]:
    """Return a trace from a second on, for `instances` at most; what is there then comes at 0."""
    seats = _seats(lines)
    count = 1 + max(seat for _, seat in seats)
    standing: dict[int, list[int]] = {}
    for number in range(instances):
        standing.setdefault(number * count // instances, []).append(number)
    there: dict[str, None] = {}
    comings = Counter[str]()
    changes: dict[float, tuple[list[str], list[str]]] = {}
    for line, seat in seats:
        comings[line.machine] += line.what == "comes"
        # One that comes again is another process.
        names = [f"{line.machine}-{comings[line.machine]}-{number}" for number in standing.get(seat, ())]
        if line.at_s < from_s:
            for name in names:
                if line.what == "comes":
                    there[name] = None
                else:
                    del there[name]
        else:
            changes.setdefault(line.at_s - from_s, ([], []))[line.what == "comes"].extend(names)
    first = changes.pop(0.0, ([], []))
    changes = {0.0: ([], [name for name in (*there, *first[1]) if name not in first[0]])} | changes
    # What comes and goes at one time was never there.
    return tuple(
        SpotChange(
            at_s,
            tuple(each for each in goes if each not in comes),
            tuple(each for each in comes if each not in goes),
        )
        for at_s, (goes, comes) in changes.items()
    )


def _seats(lines: tuple[Line, ...]) -> list[tuple[Line, int]]:
    """Return each line with the seat of its machine."""
    free: list[int] = []
    taken: dict[str, int] = {}
    found = []
    for line in lines:
        if line.what == "goes":
            seat = taken.pop(line.machine)
            heapq.heappush(free, seat)
        else:
            seat = taken[line.machine] = heapq.heappop(free) if free else len(taken)
        found.append((line, seat))
    return found
