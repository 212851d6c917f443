"""Segments of shared memory: private, bounded, and told from what is none."""

import errno
import gc
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub_agent.storage import segments
from tensorhub_agent.storage.mapped_descriptors import close_all
from tensorhub_agent.storage.segments import ForeignSegment, SegmentStore, segment_prefix
from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.runtime import segment_locks

MIB = 1024 * 1024
PREFIX = segment_prefix("hub1", "node-0")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    store = SegmentStore(tmp_path, PREFIX, 64 * MIB)
    yield store
    store.close()


def open_files() -> int:
    # What earlier tests have left is closed whenever it is collected.
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_new_segment_is_private_zero_and_shared_between_its_mappings(store: SegmentStore) -> None:
    segment = store.create(MIB + 1)
    assert segment.nbytes == MIB + mmap.PAGESIZE
    assert len(segment.view) == segment.nbytes
    assert segment.name.startswith("tensorhub-hub1-node-0-")
    about = segment.path.stat()
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert about.st_blocks * 512 >= segment.nbytes
    assert bytes(segment.view) == bytes(segment.nbytes)
    with mmap.mmap(segment.fd, segment.nbytes) as other:
        segment.view[MIB] = 7
        assert other[MIB] == 7
    store.remove(segment)
    store.remove(segment)
    assert (segment.path.exists(), store.account.total_bytes) == (False, 0)
    segment.view[6] = 6
    assert (segment.view[MIB], segment.view[6]) == (7, 6), "it stays valid where it is mapped"
    assert store.create(0).nbytes == store.account.total_bytes == mmap.PAGESIZE


def test_the_limit_is_named_with_its_numbers(store: SegmentStore, tmp_path: Path) -> None:
    store.create(60 * MIB)
    with pytest.raises(MemoryExhausted, match=rf"{60 * MIB} of at most {64 * MIB} bytes.*TENSORHUB_MEMORY_BYTES_MAX"):
        store.create(5 * MIB)
    assert store.account.total_bytes == 60 * MIB
    assert len(list(tmp_path.iterdir())) == 1
    store.create(4 * MIB)


def test_a_full_file_system_is_an_error_that_leaves_nothing_behind(
    store: SegmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of several steps fails, as when somebody else takes the last bytes in between."""
    monkeypatch.setattr(segments, "RESERVE_STEP_BYTES", MIB)
    reserve = os.posix_fallocate

    def fails_later(fd: int, at: int, nbytes: int) -> None:
        if at:
            raise OSError(errno.ENOSPC, "full")
        reserve(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fails_later)
    before = open_files()
    with pytest.raises(MemoryExhausted, match=r"3145728 bytes does not fit into .*No space left.* bytes free; release"):
        store.create(3 * MIB)
    assert store.account.total_bytes == 0
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


def test_a_refusal_of_the_kernel_is_an_error_and_no_signal(store: SegmentStore, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(MemoryExhausted, match="File too large"):
            store.create(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_machine_has_is_refused_before_a_byte_is_taken(
    store: SegmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory file system may be larger than the memory: then the kernel would kill somebody."""
    monkeypatch.setattr(segments, "_memory_spare", lambda _: MIB)
    with pytest.raises(MemoryExhausted, match="1048576 bytes of memory to spare"):
        store.create(2 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_counted_where_segments_stand_in_memory_alone() -> None:
    for path, is_memory in ((Path("/dev/shm"), True), (Path("/proc/self"), False)):  # noqa: S108 (it has this one place)
        if path.is_dir():
            fd = os.open(path, os.O_RDONLY)
            assert (segments._memory_spare(fd) is not None) == is_memory
            os.close(fd)


def test_the_next_run_opens_what_the_last_one_left(tmp_path: Path) -> None:
    first = SegmentStore(tmp_path, PREFIX, MIB)
    segment = first.create(MIB)
    segment.view[:4] = b"left"
    first.close()
    # A limit that was lowered meanwhile costs nobody what stands there.
    second = SegmentStore(tmp_path, PREFIX, 0)
    assert second.stray() == [segment.name]
    again = second.open(segment.name)
    assert bytes(again.view[:4]) == b"left"
    assert (again.nbytes, second.account.total_bytes, second.stray()) == (MIB, MIB, [])
    assert second.open(segment.name) is again
    second.close()


def test_what_is_no_segment_of_this_agent_is_not_opened(store: SegmentStore, tmp_path: Path) -> None:
    path, target = tmp_path / f"{PREFIX}0a1b2c3d.seg", tmp_path / "target"

    def not_opened(why: str, name: str = path.name) -> None:
        with pytest.raises(ForeignSegment, match=why):
            store.open(name)

    not_opened("not named like", "../" + path.name)
    not_opened("can't be opened")
    target.write_bytes(bytes(mmap.PAGESIZE))
    path.symlink_to(target)
    not_opened("can't be opened")
    path.unlink()
    path.write_bytes(bytes(mmap.PAGESIZE))
    path.chmod(0o644)
    not_opened("only this user")
    path.chmod(0o600)
    path.write_bytes(b"short")
    not_opened("whole pages")


def test_strays_are_this_agents_leftovers_alone(store: SegmentStore, tmp_path: Path) -> None:
    """An agent whose name begins with this one's keeps its files."""
    kept = store.create(1)
    mine = [PREFIX + end for end in ("00000000.seg", "00000000.seg.json", "00000000.seg.json.tmp", "11111111.seg.json")]
    others = [f"tensorhub-{end}.seg" for end in ("hub1-node-0-1-00000000", "hub2-node-0-00000000", "hub1-node-0-x")]
    for name in [*mine, *others, f"{kept.name}.json"]:
        (tmp_path / name).touch()
    (tmp_path / (PREFIX + "22222222.seg")).mkdir()
    assert store.stray() == mine
    for name in store.stray():
        store.remove_stray(name)
    assert store.stray() == []
    assert all((tmp_path / name).exists() for name in others)


def test_a_descriptor_for_readers_can_not_write(store: SegmentStore) -> None:
    segment = store.create(1)
    with os.fdopen(segment.open_readonly(), "rb") as file:
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), segment.nbytes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(file.fileno(), b"x")
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(file.fileno(), 0)
    with os.fdopen(segment.open_writable()[0], "r+b") as file:
        os.pwrite(file.fileno(), b"x", 0)
    assert segment.view[0] == ord("x")


def test_an_agents_prefix_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'-'"):
        segment_prefix("a-b", "c")
    one, other = (SegmentStore.of(tmp_path, tmp_path / hub, "node-0", 0) for hub in ("one", "other"))
    assert one.prefix != other.prefix
    assert one.prefix == SegmentStore.of(tmp_path, tmp_path / "one", "node-0", 0).prefix
    about = os.statvfs(tmp_path)
    assert 0 < one.account.bytes_max < about.f_blocks * about.f_frsize


@pytest.mark.parametrize("bytes_max", [0, 1 << 20])
def test_a_memory_folder_that_is_none_is_a_wrong_setting(tmp_path: Path, bytes_max: int) -> None:
    (tmp_path / "file").touch(0o700)
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InvalidSetting, match=r"TENSORHUB_SHM_DIR=.* is no folder that can be written"):
            SegmentStore.of(folder, tmp_path, "node-0", bytes_max)


def test_who_is_lent_a_segment_sees_that_it_is_asked_back_until_it_is_lent_anew(store: SegmentStore) -> None:
    """The lock goes with the mapping, and the wish with the agent's process: neither knows of the other."""
    segment = store.create(MIB)
    assert not segment.is_lent()
    (fd,) = segment.open_lent()
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    mapping = mmap.mmap(fd, MIB, prot=mmap.PROT_READ)
    os.close(fd)
    for is_wanted in (True, False, True):
        segment.ask_back(is_wanted=is_wanted)
        assert (segment.is_lent(), segment_locks.is_asked_back(reader)) == (True, is_wanted)
    close_all(segment.open_lent())
    assert not segment_locks.is_asked_back(reader), "what is published anew is not waited for"
    segment.ask_back(is_wanted=True)
    mapping.close()
    assert (segment.is_lent(), segment_locks.is_asked_back(reader)) == (False, True)
    os.close(reader)
