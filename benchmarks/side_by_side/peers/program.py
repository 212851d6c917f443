"""What all peers' programs have in common: they map the arena, connect, and then do what lines on their input say.

`python -m benchmarks.side_by_side.peers.NAME --how HOW --arena PATH…` answers each line with one of JSON:

    {"do": "run", "readers": 4}   bring the source into so many destinations at the same time  -> {"seconds": 0.25}
    {"do": "check"}               once more, into erased memory, and compare every byte         -> {"equal": true}

A peer's connections and registered memory stand before the first line; nothing but the transfer is timed. Standard
output is ours alone: what a library prints goes to standard error.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.side_by_side.arena import READERS, Arena

ANSWER_S: Final = 60.0
END_S: Final = 5.0

Read = Callable[[int], None]
"""Brings the source into one reader's destination, while so many read in all; returns when all of it stands there."""


class Peer(ABC):
    """One way to bring the bytes over."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.besides: dict[str, float] = {}
        """Seconds of parts of the last run."""

    @abstractmethod
    def run(self, readers: int) -> float:
        """Bring them to so many readers at once, and return the seconds that it took."""

    def is_equal(self) -> bool:
        """Bring them to all readers once more, and compare every byte."""
        self.arena.erase()
        self.run(READERS)
        return self.arena.is_equal(READERS)

    @abstractmethod
    def close(self) -> None:
        """End what it started."""


class Crew:
    """The readers, each a process of its own with a destination of its own."""

    def __init__(self, prepare: Callable[..., Read], paths: Sequence[str], *arguments: Any) -> None:  # noqa: ANN401
        """Start them; each is ready once `prepare(arena, number, *arguments)` has returned how it reads."""
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for number in range(READERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, prepare, paths, number, arguments), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def wait_ready(self) -> None:
        """Return once all can read. Raises what went wrong with one of them."""
        for end in self._ends:
            _answer(end)

    def begin(self, readers: int) -> None:
        """Let the first ones read."""
        for end in self._ends[:readers]:
            end.send(readers)

    def finish(self, readers: int) -> float:
        """Return the seconds from the first one's beginning to the last one's end."""
        times = [_answer(end) for end in self._ends[:readers]]
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def run(self, readers: int) -> float:
        """Let the first ones read, and return the seconds that it took."""
        self.begin(readers)
        return self.finish(readers)

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()


def _answer(end: Connection) -> tuple[float, float]:
    if not end.poll(ANSWER_S):
        raise TimeoutError(f"a reader has not answered within {ANSWER_S:g} s")
    answer = end.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"a reader failed: {answer}")  # noqa: TRY004 (the type is right, what it says is trouble)
    begin, stop = answer
    return float(begin), float(stop)


def _serve(
    end: Connection, prepare: Callable[..., Read], paths: Sequence[str], number: int, arguments: Sequence[Any]
) -> None:
    """Be one reader until the source's process goes."""
    try:
        arena = Arena.open(paths)
        read = prepare(arena, number, *arguments)
        end.send((0.0, 0.0))
        while True:
            readers = end.recv()
            begin = time.perf_counter()
            read(readers)
            end.send((begin, time.perf_counter()))
    except EOFError:
        pass
    except Exception as why:  # noqa: BLE001 (whatever a library raises is told to whoever asked)
        end.send(f"{type(why).__name__}: {why}")
    # A library's threads may wait for ever; nothing of them is wanted any more.
    os._exit(0)


def main(prepare: Callable[[Arena, str], Peer]) -> None:
    """Read the options, prepare, and answer line by line until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="")
    parser.add_argument("--arena", nargs="+", required=True)
    options = parser.parse_args()
    arena = Arena.open(options.arena)
    try:
        peer = prepare(arena, options.how)
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "check":
                answer: dict[str, object] = {"equal": peer.is_equal()}
            else:
                answer = {"seconds": peer.run(order["readers"]), "besides": peer.besides}
            answers.write(json.dumps(answer) + "\n")
        peer.close()
    except Exception as why:  # noqa: BLE001 (one peer's failure is told, and the rest of the run goes on)
        answers.write(json.dumps({"error": f"{type(why).__name__}: {why}".partition("\n")[0]}) + "\n")
    answers.flush()
    # A library's threads may wait for ever; nothing of them is wanted any more.
    os._exit(0)
