"""A holder's memory of a GPU in the process of a worker that maps it: the lock ends behind what was queued.

The GPU is a lazy fake one, which does work only where it is waited for. Each planted bug in the order is found.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from tests.kit.waiting import until

from tensorhub import AgentUnavailable, TensorSpec
from tensorhub._agent.shards import AttachedShard, GivenSegment, Lent, ShardSpec
from tensorhub._tensors import device_memory
from tensorhub._tensors.description import describe
from tensorhub._tensors.installs import Mapped
from tensorhub_common.devices.device import Device, DeviceMemory
from tensorhub_common.devices.fake import DeviceRace, FakeDevice, Span
from tensorhub_common.layout.layout import segment_bytes
from tensorhub_common.runtime import segment_locks
from tensorhub_common.runtime.own_descriptors import OwnDescriptors

DESCRIBED = describe({"w": TensorSpec((1000,), torch.float32), "e": TensorSpec((0, 3), torch.float32)})
NBYTES = segment_bytes(DESCRIBED.layout)


class Holder:
    """One published memory, and a shard of this process that maps it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.memory = device, device.allocate(NBYTES)
        self.fd, self.lock_fd = self.memory.export(), os.memfd_create("lock", os.MFD_CLOEXEC)
        spec = ShardSpec(
            model="m", replica="r", shard=0, shards=1, spot=False, layout=b"", install="mapped", device=device.uuid
        )
        self.attachment = AttachedShard(spec)
        self.mapped = Mapped(DESCRIBED, self.attachment)
        self.seen: list[tuple[float, bool]] = []
        """What each queued kernel read, and whether the memory was lent then."""

    def publish(self, value: float, version: int = 1) -> None:
        """Write the memory, and have the shard show it."""
        array = (ctypes.c_float * 1000).from_address(self.memory.address)
        array[:] = [value] * 1000
        self.attachment.lend(Lent((os.dup(self.fd), segment_locks.lent(self.lock_fd)), version))
        self.mapped.show()

    @property
    def is_lent(self) -> bool:
        return segment_locks.is_lent(self.lock_fd)

    def queue_read(self) -> None:
        """Queue a kernel that reads the shard's tensor, and holds neither the tensor nor its storage."""
        address = self.mapped.tensors["w"].untyped_storage().data_ptr()

        def read() -> None:
            self.seen.append((ctypes.c_float.from_address(address).value, self.is_lent))

        self.device.stream_of(0).run("a forward pass", read, (Span(address, address + 4000, writes=False),))

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.lock_fd)


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Holder:
    device = FakeDevice()
    monkeypatch.setattr(device_memory, "device_named", lambda _: device)
    return Holder(device)


async def test_the_lock_is_held_until_what_was_queued_is_done(holder: Holder) -> None:
    holder.publish(7)
    assert (holder.mapped.version, holder.mapped.tensors["w"].unique().tolist()) == (1, [7])
    holder.queue_read()
    assert not holder.seen
    holder.mapped.let_go()
    assert holder.mapped.tensors["w"].unique().tolist() == [0]
    await until(lambda: not holder.is_lent, "no process maps it")
    assert holder.seen == [(7.0, True)]
    holder.close()


@contextmanager
def child_of_fork() -> Iterator[int]:
    """Have a child that does nothing within the block, as a data loader's worker that waits; yield its process id."""
    go_on, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(go_on, 1)
        os._exit(0)
    os.close(go_on)
    yield child
    os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_child_of_fork_has_no_part_in_the_lock(holder: Holder) -> None:
    holder.publish(7)
    with child_of_fork():
        holder.mapped.let_go()
        await until(lambda: not holder.is_lent, "no process maps it")
    holder.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_child_of_fork_keeps_no_memory_of_a_shard(holder: Holder) -> None:
    """It would not be the GPU's again once the shard is released."""
    spec = msgspec.structs.replace(holder.attachment.spec, install="in-place")
    shard = AttachedShard(spec)
    shard.take(GivenSegment(1, (os.dup(holder.fd), os.dup(holder.lock_fd))), None)
    kept = shard.kept[0].own.fds
    with child_of_fork() as child:
        await until(lambda: not any(Path(f"/proc/{child}/fd/{fd}").is_symlink() for fd in kept), "it has closed them")
        assert shard.kept[0].own.fds == kept
        assert all(os.fstat(fd) for fd in kept)
    shard.let_go()
    holder.close()


Unmap = Callable[[Device, DeviceMemory, OwnDescriptors | None], None]


def _lock_first(device: Device, memory: DeviceMemory, lock: OwnDescriptors | None) -> None:
    assert lock is not None
    lock.close()
    device.finish()
    memory.close()


def _no_wait(_: Device, memory: DeviceMemory, lock: OwnDescriptors | None) -> None:
    memory.close()
    assert lock is not None
    lock.close()


def _never_unmapped(device: Device, _: DeviceMemory, __: OwnDescriptors | None) -> None:
    device.finish()


@pytest.mark.parametrize("bug", [_lock_first, _no_wait, _never_unmapped])
def test_a_planted_bug_of_unmapping_is_found(holder: Holder, monkeypatch: pytest.MonkeyPatch, bug: Unmap) -> None:
    races: list[DeviceRace] = []

    def unmap(device: Device, memory: DeviceMemory, lock: OwnDescriptors | None) -> None:
        try:
            bug(device, memory, lock)
        except DeviceRace as why:
            races.append(why)

    monkeypatch.setattr(device_memory, "_unmap_soon", unmap)
    holder.publish(7)
    holder.queue_read()
    holder.mapped.let_go()
    assert races or holder.is_lent or holder.seen != [(7.0, True)]
    holder.device.finish()


def test_without_the_bugs_all_of_it_is_right(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_unmap_soon", device_memory._unmap)
    holder.publish(7)
    holder.queue_read()
    holder.mapped.let_go()
    assert (holder.is_lent, holder.seen) == (False, [(7.0, True)])


async def test_each_version_holds_its_own_lock_and_a_kept_view_keeps_it(holder: Holder) -> None:
    other = Holder(holder.device)
    holder.publish(1, 1)
    kept = holder.mapped.tensors["w"].view(-1)
    other.attachment, other.mapped = holder.attachment, holder.mapped
    other.publish(2, 2)
    assert (holder.mapped.version, holder.mapped.tensors["w"].unique().tolist()) == (2, [2])
    assert (kept.unique().tolist(), holder.is_lent, other.is_lent) == ([1], True, True)
    del kept
    await until(lambda: not holder.is_lent, "no process maps the first")
    assert other.is_lent


def test_memory_that_can_not_be_mapped_is_not_kept_and_changes_nothing(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter than said, or of a GPU that this process does not see: the lock and all descriptors go."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    short = os.memfd_create("short", os.MFD_CLOEXEC)
    holder.attachment.lend(Lent((short, segment_locks.lent(holder.lock_fd)), 1))
    with pytest.raises(AgentUnavailable, match=r"can't be mapped .*; read again, or register with install='in-place'"):
        holder.mapped.show()
    monkeypatch.undo()
    holder.attachment.spec = ShardSpec(
        **{name: getattr(holder.attachment.spec, name) for name in ShardSpec.__struct_fields__ if name != "device"},
        device="GPU-fake-99",
    )
    with pytest.raises(AgentUnavailable, match="no fake device 99"):
        holder.publish(1)
    assert (holder.is_lent, holder.mapped.version) == (False, None)
    assert holder.mapped.tensors["w"].unique().tolist() == [0]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
