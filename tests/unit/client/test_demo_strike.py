"""Killing in the middle: only while part of the memory, and not all, is overwritten."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub.demo.digests import digests_of
from tensorhub.demo.model import build
from tensorhub.demo.size import Size
from tensorhub.demo.strike import BLOCK_BYTES, Memory, Strike

BLOCKS = 20


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "agent-2-0.seg"
    path.write_bytes(b"\1" * (BLOCKS * BLOCK_BYTES))
    return path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def overwrite(path: Path, blocks: int) -> None:
    with path.open("r+b") as file:
        file.write(b"\2" * (blocks * BLOCK_BYTES))


def test_memory_tells_what_was_overwritten_also_without_its_name(segment: Path) -> None:
    memory = Memory([segment])
    assert (memory.share_written(), memory.written_bytes(), memory.nbytes) == (0, 0, BLOCKS * BLOCK_BYTES)
    overwrite(segment, 5)
    segment.unlink()
    assert memory.share_written() == pytest.approx(5 / BLOCKS)
    assert memory.written_bytes() == 5 * BLOCK_BYTES
    memory.close()


def test_strikes_in_the_middle(segment: Path, victim: subprocess.Popen[bytes]) -> None:
    strike = Strike("rollout-2", victim.pid, victim.pid, Memory([segment]))
    overwrite(segment, BLOCKS // 2)
    assert strike.fall()
    assert victim.wait(10) == -9


def test_spares_one_whose_read_is_over(segment: Path, victim: subprocess.Popen[bytes]) -> None:
    strike = Strike("rollout-2", victim.pid, victim.pid, Memory([segment]))
    overwrite(segment, BLOCKS)
    assert not strike.fall()
    assert victim.poll() is None


def test_spares_one_that_reads_nothing(
    segment: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorhub.demo.strike.LOOK_S_MAX", 0.05)
    assert not Strike("rollout-2", victim.pid, victim.pid, Memory([segment])).fall()
    assert victim.poll() is None


def test_digests_are_of_every_byte_by_name() -> None:
    tiny = Size(width=32, layers=1, heads=2, hidden=64)
    one, two = build(tiny), build(tiny)
    assert digests_of(one) == digests_of(two)
    assert {*dict(one.named_parameters()), *dict(one.named_buffers())} == digests_of(one).keys()
    two.lm_head.weight.data[3, 5] += 1e-6
    differing = {name for name, digest in digests_of(two).items() if digest != digests_of(one)[name]}
    assert differing == {"lm_head.weight"}
