"""Finished spans on disk: what is kept, what is found again, and what a killed or a second process leaves."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tensorhub_common.protocol.spans import ANSWER_BYTES_MAX, FinishedSpan
from tensorhub_common.telemetry.span_files import DIRECTORY_MODE, MODE, NEW, OLD, SPAN_BYTES_MAX, SpanFiles

TRACE = "0af7651916cd43dd8448eb211c80319c"
BYTES_MAX = 64 * 1024


def span(number: int, name: str = "transfer", text: str = "") -> FinishedSpan:
    return FinishedSpan(
        trace=TRACE,
        span=f"{number:016x}",
        name=name,
        service="tensorhub-agent",
        instance="agent-0",
        start_ns=number,
        end_ns=number + 1,
        attributes={"tensorhub.why": text},
    )


def line(number: int, name: str = "transfer", text: str = "") -> bytes:
    return msgspec.json.encode(span(number, name, text))


@pytest.fixture
def files(tmp_path: Path) -> SpanFiles:
    return SpanFiles(tmp_path / "state" / "spans", BYTES_MAX)


def found(files: SpanFiles, count_max: int = 10_000) -> list[int]:
    return [int(each.span, 16) for each in files.newest(b"transfer", lambda _: True, count_max)[0]]


def test_what_was_appended_is_found_newest_first_and_by_nobody_else(files: SpanFiles) -> None:
    assert files.newest(b"transfer", lambda _: True, 1) == ([], 0), "there is no directory yet"
    assert files.append([line(1), line(2)]) == 0
    assert files.append([line(3, "read")]) == 0
    assert found(files) == [2, 1]
    assert files.newest(b"read", lambda each: each.name == "read", 9) == ([span(3, "read")], 0)
    assert files.directory.stat().st_mode & 0o777 == DIRECTORY_MODE
    assert (files.directory / NEW).stat().st_mode & 0o777 == MODE
    again = SpanFiles(files.directory, BYTES_MAX)
    again.append([line(4)])
    assert found(again) == [4, 2, 1], "a later process finds what an earlier one kept"


def test_only_the_newest_are_kept_within_the_bound(files: SpanFiles) -> None:
    for number in range(2_000):
        files.append([line(number)])
        total = sum(path.stat().st_size for path in files.directory.iterdir())
        assert total <= BYTES_MAX
    kept = found(files)
    assert kept == list(range(1999, 1999 - len(kept), -1))
    assert len(kept) * 200 > BYTES_MAX // 4
    assert files.append([line(number) for number in range(4_000)]) == 0, "a batch larger than a generation is cut"
    assert sum(path.stat().st_size for path in files.directory.iterdir()) <= BYTES_MAX
    assert found(files)[0] == 3999


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_line_garbage_and_a_span_that_is_too_long_cost_themselves_alone(files: SpanFiles, cut: int) -> None:
    assert files.append([line(9, text="x" * SPAN_BYTES_MAX)]) == 1
    assert files.append([line(1), line(9, text="x" * SPAN_BYTES_MAX), line(2)]) == 1
    path = files.directory / NEW
    os.truncate(path, path.stat().st_size - cut)
    # Without its line end alone the last one is still whole.
    assert found(files) == ([2, 1] if cut == 1 else [1])
    files.append([line(3)])
    with path.open("ab") as file:
        file.write(b'\xff\x00transfer\n{"trace": "transfer"}\n[[[[transfer\n' + b"[" * 100_000 + b"transfer\n")
    files.append([line(4)])
    assert found(files) == ([4, 3, 2, 1] if cut == 1 else [4, 3, 1])


def test_what_is_too_much_for_one_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, 16 << 20)
    files.append([line(number, text="x" * 1_000) for number in range(2_000)])
    spans, left_out = files.newest(b"transfer", lambda _: True, 10_000)
    assert len(spans) + left_out == 2_000
    assert 0 < len(spans) * 1_000 < ANSWER_BYTES_MAX
    assert files.newest(b"transfer", lambda _: True, 3)[1] == 1_997


def test_while_another_process_writes_it_is_to_be_tried_again(files: SpanFiles) -> None:
    files.append([line(1)])
    other = os.open(files.directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert files.append([line(2)]) is None
    assert found(files) == [1]
    os.close(other)
    assert files.append([line(2)]) == 0


WRITER = """
import sys
from pathlib import Path
import msgspec
from tensorhub_common.telemetry.span_files import SpanFiles
from tensorhub_common.protocol.spans import FinishedSpan

files = SpanFiles(Path(sys.argv[1]), int(sys.argv[2]))
first = int(sys.argv[3])
for number in range(first, first + int(sys.argv[4])):
    one = FinishedSpan(trace="0af7651916cd43dd8448eb211c80319c", span=f"{number:016x}", name="transfer", service="s",
                       instance=sys.argv[3], start_ns=number, end_ns=number + 1)
    while files.append([msgspec.json.encode(one)]) is None:
        pass
    print(number, flush=True)
"""


def writer(directory: Path, first: int, count: int, bytes_max: int) -> "subprocess.Popen[str]":
    arguments = [str(directory), str(bytes_max), str(first), str(count)]
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("bytes_max", [8 << 20, BYTES_MAX])
def test_two_processes_of_one_name_lose_nothing_of_each_other_and_keep_bound_and_lines(
    tmp_path: Path, bytes_max: int
) -> None:
    for process in [writer(tmp_path, first, 500, bytes_max) for first in (0, 1000)]:
        process.communicate(timeout=120)
        assert process.returncode == 0
    kept = found(SpanFiles(tmp_path, bytes_max))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bytes_max
    assert len(kept) == len(b"".join(path.read_bytes() for path in tmp_path.iterdir()).splitlines())
    if bytes_max == BYTES_MAX:
        assert {path.name for path in tmp_path.iterdir()} == {NEW, OLD}, "they have rotated"
    else:
        assert sorted(kept) == [*range(500), *range(1000, 1500)]


def test_what_a_killed_process_has_written_stands_there(tmp_path: Path) -> None:
    process = writer(tmp_path, 0, 100_000, 64 << 20)
    assert process.stdout is not None
    last = 0
    while last < 50:
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    kept = found(SpanFiles(tmp_path, 64 << 20))
    assert set(range(51)) <= set(kept)
    files = SpanFiles(tmp_path, 64 << 20)
    files.append([line(999_999)])
    assert found(files)[0] == 999_999
