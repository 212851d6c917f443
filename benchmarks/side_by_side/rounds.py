"""Measures contenders beside each other: every round runs each of them, with a memcpy before and after each.

So what else the machine does falls on all alike, and a ratio is one of two times of the same round. A contender that
fails is left out from then on, and the others go on. A first round does not count: there pages are touched, memory is
mapped and connections find their speed.
"""

import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import Final

from benchmarks.side_by_side.contender import Contender, Failed
from benchmarks.side_by_side.memcpy import Memcpy
from benchmarks.side_by_side.ours import Ours
from benchmarks.side_by_side.results import COUNTS, MEMCPY, MEMCPY_2, Line, Round
from tensorhub_common.errors import TensorHubError

TROUBLE: Final = (Failed, TensorHubError, OSError, RuntimeError, TimeoutError)

ROUNDS_MIN: Final = 3
"""So many are taken however long they take."""


async def measure(contenders: Sequence[Contender], memcpy: Memcpy, rounds: int, until: float, label: str) -> list[Line]:
    """Return a line of each contender, memcpy's own first. No round begins after `until` once there are a few."""
    running: list[tuple[Contender, Line]] = []
    lines = [Line(title=title, is_ours=False, rounds={}, equal=True) for title in (MEMCPY, MEMCPY_2)]
    try:
        for contender in contenders:
            line = Line(title=contender.title, is_ours=isinstance(contender, Ours), rounds={})
            lines.append(line)
            _say(f"{label}: starting {contender.title}")
            running.append((contender, line))
            await _or_failed(line, contender.start())
        for number in range(rounds + 1):
            if number > ROUNDS_MIN and time.monotonic() > until:
                break
            for readers in COUNTS:
                _say(f"{label}: round {number} of {rounds}, 1→{readers}")
                await _round(running, lines, memcpy, number, readers)
        for contender, line in running:
            if line.failed is None:
                await _or_failed(line, contender.check())
                line.equal = line.failed is None
    finally:
        for contender, _ in running:
            await contender.stop()
    return lines


async def _round(
    running: Sequence[tuple[Contender, Line]], lines: Sequence[Line], memcpy: Memcpy, number: int, readers: int
) -> None:
    before = memcpy.run(1)
    copies = [before]
    for contender, line in running:
        if line.failed is not None:
            continue
        try:
            took = await contender.run(readers)
        except TROUBLE as why:
            _fail(line, why)
            continue
        after = memcpy.run(1)
        copies.append(after)
        one = Round(number=number, seconds=took.seconds, memcpy_s=(before + after) / 2, besides=dict(took.besides))
        _add(line, readers, one)
        before = after
    middle = statistics.median(copies)
    _add(lines[0], readers, Round(number=number, seconds=readers * middle, memcpy_s=middle, besides={}))
    two = readers * memcpy.run(2)
    _add(lines[1], readers, Round(number=number, seconds=two, memcpy_s=middle, besides={}))


def _add(line: Line, readers: int, one: Round) -> None:
    if one.number:
        line.rounds.setdefault(str(readers), []).append(one)


async def _or_failed(line: Line, doing: Awaitable[None]) -> None:
    try:
        await doing
    except TROUBLE as why:
        _fail(line, why)


def _fail(line: Line, why: BaseException) -> None:
    line.failed = str(why).partition("\n")[0] or type(why).__name__
    _say(f"{line.title} is left out: {line.failed}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
