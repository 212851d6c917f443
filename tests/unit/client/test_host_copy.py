"""The order between a caller's work on a GPU and the copies of its tensors; each planted bug in it is found."""

import mmap
import random
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_gpu import FakeGpu, fake_gpu

from tensorhub._tensors import host_copy, streams
from tensorhub._tensors.description import describe
from tensorhub._tensors.host_copy import HostCopy
from tensorhub._tensors.segment_mapping import tensors_at
from tensorhub._tensors.streams import Queued
from tensorhub_common.devices.fake import DeviceRace, FakeDevice, FakeEvent, FakeStream
from tensorhub_common.layout.layout import placements, segment_bytes

COUNT = 1000


class Shard:
    """A shard on a fake GPU whose agent is this test."""

    def __init__(self, gpu: FakeGpu, *, strided: bool = False, stages: bool = False) -> None:
        self.gpu = gpu
        whole = gpu.put(torch.zeros(COUNT, 2))
        self.tensor = whole[:, 0] if strided else gpu.put(torch.zeros(COUNT))
        described = describe({"w": self.tensor})
        memory = mmap.mmap(-1, segment_bytes(described.layout))
        spec = SimpleNamespace(where="shard 0 of m/trainer", device="")
        attachment: Any = SimpleNamespace(found=None, fresh=True, version=None, spec=spec)
        self.attachment = attachment
        self.copy = HostCopy(described, memory, attachment, stages=stages)
        self.host = tensors_at(described.layout, memory)["w"]

    def train(self, value: float) -> None:
        """Queue what writes the tensor."""
        self.gpu.queue_write(self.tensor, torch.full((COUNT,), value))

    def hand_over(self) -> list[float]:
        """Do what `publish` does before its frame; return what the agent would digest."""
        self.copy.bring_to_host(self.copy.queued())
        return sorted(set(self.host.tolist()))

    def install(self, version: int) -> None:
        """Do what a read does behind its answer."""
        self.copy.read_begins()
        self.host.fill_(version)
        self.attachment.version = version
        assert self.copy.is_due
        if self.copy.wants_stage:
            self.copy.stage()
        self.copy.bring_to_gpu(self.copy.queued())

    def seen(self) -> list[float]:
        """Return what a forward pass that is queued now sees."""
        into: dict[str, torch.Tensor] = {}
        self.gpu.queue_read(self.tensor, into, "w")
        self.gpu.device.stream_of(0).record().wait()
        return sorted(set(into["w"].tolist()))


@pytest.fixture(params=["lazy", "eager", 3])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    schedule = random.Random(request.param) if isinstance(request.param, int) else request.param
    with fake_gpu(monkeypatch, FakeDevice(schedule=schedule)) as it:
        yield it


@pytest.mark.parametrize("strided", [False, True])
def test_what_was_queued_is_handed_over_and_what_comes_later_is_not(gpu: FakeGpu, *, strided: bool) -> None:
    shard = Shard(gpu, strided=strided)
    for value in (1.0, 2.0, 3.0):
        shard.train(value)
        assert shard.hand_over() == [value]
        shard.train(value + 100)
        assert sorted(set(shard.host.tolist())) == [value]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("stages", [False, True])
def test_what_was_queued_reads_the_old_version_and_what_comes_later_the_new_one(
    gpu: FakeGpu, *, strided: bool, stages: bool
) -> None:
    shard = Shard(gpu, strided=strided, stages=stages)
    for version in (1, 2, 3):
        before: dict[str, torch.Tensor] = {}
        gpu.queue_read(shard.tensor, before, "w")
        shard.install(version)
        assert shard.copy.version == version
        assert shard.seen() == [float(version)]
        assert sorted(set(before["w"].tolist())) == [version - 1.0]


def told_of(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Publish tensors of some sizes; return after how many bytes it was told, and whether these were there then."""
    patch.setattr(host_copy, "COPIED_BYTES", 3000)
    sizes = {"a": 10, "b": 700, "c": 0, "d": 2000, "e": 1, "f": 80}
    given = gpu.put_all({name: torch.zeros(size) for name, size in sizes.items()})
    given["host"] = torch.full((5,), 3.0)
    described = describe(given)
    memory = mmap.mmap(-1, segment_bytes(described.layout))
    spec = SimpleNamespace(where="shard 0 of m/trainer", device="")
    attachment: Any = SimpleNamespace(found=None, fresh=True, version=None, spec=spec)
    copy = HostCopy(described, memory, attachment)
    for name in "abdef":
        gpu.queue_write(given[name], torch.full_like(given[name], 3.0))
    expected = bytearray(len(memory))
    for entry, start in zip(described.layout.tensors, placements(described.layout), strict=True):
        expected[start : start + entry.nbytes] = struct.pack("f", 3.0) * (entry.nbytes // 4)
    told: list[tuple[int, bool]] = []
    copy.bring_to_host(copy.queued(), lambda nbytes: told.append((nbytes, memory[:nbytes] == expected[:nbytes])))
    assert told[-1][0] == len(memory)
    return told


def test_how_far_a_copy_has_come_is_told_of_what_is_there(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_of(gpu, monkeypatch)
    assert all(is_there for _, is_there in told)
    assert [nbytes for nbytes, _ in told] == sorted({nbytes for nbytes, _ in told})
    assert len(told) == 3


def test_what_is_told_before_the_copy_is_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        _frame_before_the_event(monkeypatch)
        assert not all(is_there for _, is_there in told_of(gpu, monkeypatch))


def test_what_is_staged_shows_the_old_version_until_it_is_brought_and_leaves_the_host_alone(gpu: FakeGpu) -> None:
    shard = Shard(gpu, stages=True)
    shard.install(1)
    place = shard.tensor.data_ptr()
    shard.copy.read_begins()
    shard.host.fill_(2)
    shard.attachment.version = 2
    shard.copy.stage()
    assert (shard.copy.wants_stage, shard.copy.is_due, shard.seen()) == (False, True, [1.0])
    shard.host.fill_(77)
    shard.copy.bring_to_gpu(shard.copy.queued())
    assert (shard.seen(), shard.tensor.data_ptr(), shard.copy.version) == ([2.0], place, 2)


def test_a_version_that_comes_after_one_was_staged_is_staged_again(gpu: FakeGpu) -> None:
    shard = Shard(gpu, stages=True)
    shard.copy.read_begins()
    shard.host.fill_(1)
    shard.attachment.version = 1
    shard.copy.stage()
    shard.install(2)
    assert shard.seen() == [2.0]


def _no_wait_for(patch: pytest.MonkeyPatch) -> None:
    """The copies' stream waits for no other."""
    patch.setattr(FakeStream, "wait_for", lambda _, __: None)


def _wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Another stream than the caller's is waited for."""
    patch.setattr(streams, "caller_stream", lambda device: device.stream_of(77))


def _frame_before_the_event(patch: pytest.MonkeyPatch) -> None:
    """The agent is told before the copy is done: it digests the old bytes."""
    patch.setattr(FakeEvent, "wait", lambda _: None)


def _queued_after_the_copy(patch: pytest.MonkeyPatch) -> None:
    """What the caller had queued is looked at once the copy was given."""
    empty = {}

    def late(_: Queued, devices: Any) -> None:
        for device in devices:
            empty[device] = device.stream_of(99)
        _.streams = {device: device.stream_of(0) for device in devices}
        _.points = {device: stream.record() for device, stream in empty.items()}

    patch.setattr(Queued, "__init__", late)


Bug = Callable[[pytest.MonkeyPatch], None]


def _handed_over(shard: Shard) -> bool:
    shard.train(1.0)
    return shard.hand_over() == [1.0]


def _installed(shard: Shard) -> bool:
    before: dict[str, torch.Tensor] = {}
    shard.gpu.queue_read(shard.tensor, before, "w")
    shard.install(1)
    return shard.seen() == [1.0] and before["w"].unique().tolist() == [0.0]


@pytest.mark.parametrize("bug", [_no_wait_for, _wrong_stream, _frame_before_the_event, _queued_after_the_copy])
def test_a_planted_bug_of_publishing_is_found(monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        shard = Shard(gpu)
        bug(monkeypatch)
        try:
            is_right = _handed_over(shard)
        except DeviceRace:
            is_right = False
    assert not is_right


@pytest.mark.parametrize("bug", [_no_wait_for, _wrong_stream, _queued_after_the_copy])
def test_a_planted_bug_of_installing_is_found(monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        shard = Shard(gpu)
        bug(monkeypatch)
        try:
            is_right = _installed(shard)
        except DeviceRace:
            is_right = False
    assert not is_right


def test_memory_that_is_unpinned_while_a_copy_is_under_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        shard = Shard(gpu)
        shard.gpu.device.stream_of(0).copy(shard.host.data_ptr(), shard.tensor.data_ptr(), 4 * COUNT)
        assert shard.copy._pinned is not None
        with pytest.raises(DeviceRace, match="unpinning memory is not ordered"):
            shard.copy._pinned.close()


def test_without_the_bugs_all_of_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch, FakeDevice()) as gpu:
        assert _handed_over(Shard(gpu))
        assert _installed(Shard(gpu))
