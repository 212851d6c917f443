"""An agent of threads, a socket and memfds: it speaks the worker's frames, and fails at those that a test tells it."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard
from tests.kit.waiting import until

import tensorhub
from tensorhub import AsyncHub, AsyncShard, TensorSpec
from tensorhub_common.errors import (
    LayoutMismatch,
    NotPublished,
    ReplicaConflict,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.layout.layout import Layout, difference, segment_bytes
from tensorhub_common.protocol import worker as w
from tensorhub_common.protocol.log.commands import PROTOCOL

Key = tuple[str, str, int]


@dataclass
class FakeShard:
    key: Key
    shards: int
    layout: Layout
    fd: int
    version: int | None = None
    owner: "FakeWorker | None" = None


@dataclass(eq=False)
class FakeWorker:
    sock: socket.socket
    handles: dict[int, FakeShard] = field(default_factory=dict)
    muted: bool = False

    def tell(self, frame: w.Frame, fd: int | None = None) -> None:
        if self.muted:
            return
        body = msgspec.msgpack.encode(frame)
        data = struct.pack(">I", len(body)) + body
        with contextlib.suppress(OSError):
            if fd is None:
                self.sock.sendall(data)
            else:
                sent = socket.send_fds(self.sock, [data], [fd])
                self.sock.sendall(data[sent:])


Hook = Callable[[FakeWorker, Any], object]
"""Sees the frames of some kinds first; what it returns False for is answered by the fake itself."""


class FakeAgent:
    """Its shards outlive its connections, and its process by `restart`, as a real agent's do."""

    def __init__(self, path: Path, nats: str = "nats://127.0.0.1:1") -> None:
        self.path = path
        self.nats = nats
        self.protocol = PROTOCOL
        self.shards: dict[Key, FakeShard] = {}
        self.versions: dict[tuple[str, int], bytes] = {}
        self.last: dict[str, int] = {}
        self.frames: list[w.Frame] = []
        self.hooks: dict[type[w.Frame], Hook] = {}
        self.attached = 0
        self._lock = threading.RLock()
        self._workers: list[FakeWorker] = []
        self._listening: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.start()

    # ---------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(self.path))
        sock.listen()
        self._listening = sock
        self._begin(self._accept, sock)

    def stop(self) -> None:
        """Die: nobody listens any more, and every connection ends."""
        sock, self._listening = self._listening, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.path.unlink(missing_ok=True)
        self.drop()

    def drop(self) -> None:
        """End every connection, and live on."""
        with self._lock:
            for worker in self._workers:
                with contextlib.suppress(OSError):
                    worker.sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Lose all memory, as an agent that restarts on another machine would."""
        with self._lock:
            for shard in self.shards.values():
                os.close(shard.fd)
            self.shards.clear()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(5)
        self.forget()

    def _begin(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                worker = FakeWorker(sock)
                with self._lock:
                    self._workers.append(worker)
                self._begin(self._serve, worker)

    def _serve(self, worker: FakeWorker) -> None:
        decoder = msgspec.msgpack.Decoder(w.FromWorker)
        with contextlib.suppress(OSError, EOFError):
            while True:
                (length,) = struct.unpack(">I", _exactly(worker.sock, 4))
                frame = decoder.decode(_exactly(worker.sock, length))
                with self._lock:
                    self.frames.append(frame)
                    hook = self.hooks.get(type(frame))
                    if hook is None or hook(worker, frame) is False:
                        self.answer(worker, frame)
        with self._lock:
            self._workers.remove(worker)
            for shard in self.shards.values():
                if shard.owner is worker:
                    shard.owner = None
        worker.sock.close()

    # -------------------------------------------------------------------------------------------- faults

    def hold(self, kind: type[w.Frame]) -> "Held":
        """Keep frames of this kind from the agent."""
        held = Held(self, kind)
        self.hooks[kind] = lambda worker, frame: held.frames.append((worker, frame))
        return held

    def break_at(self, kind: type[w.Frame], *, after: bool) -> None:
        """Let the connection break at the next frame of this kind: `after` the agent did what it asks, or before."""

        def hook(worker: FakeWorker, frame: Any) -> None:
            del self.hooks[kind]
            if after:
                worker.muted = True
                self.answer(worker, frame)
            self.drop()

        self.hooks[kind] = hook

    def refuse(self, kind: type[w.Frame], error: type[Exception], times: int = 1, **about: Any) -> None:
        """Refuse so many frames of this kind."""
        left = iter(range(times))

        def hook(worker: FakeWorker, frame: Any) -> bool:
            if next(left, None) is None:
                return False
            worker.tell(w.Failed(call=frame.call, error=error.__name__, message="not now", **about))
            return True

        self.hooks[kind] = hook

    # ------------------------------------------------------------------------------------------- answers

    def answer(self, worker: FakeWorker, frame: Any) -> None:
        """What the fake does when no hook stands in its way."""
        try:
            match frame:
                case w.Attach():
                    self.attached += 1
                    worker.tell(w.Attached(protocol=self.protocol, agent="agent-0", incarnation=1, nats=self.nats))
                case w.RegisterCall():
                    self._register(worker, frame)
                case w.Loaded():
                    pass
                case w.PublishCall():
                    self._publish(worker, worker.handles[frame.handle], frame)
                case w.UnpublishCall():
                    self._unpublish(worker, worker.handles[frame.handle], frame)
                case w.ReadCall():
                    self._read(worker, worker.handles[frame.handle], frame)
                case w.ReleaseCall():
                    self._release(worker, worker.handles.pop(frame.handle), frame)
        except TensorHubError as error:
            worker.tell(w.Failed(call=frame.call, error=error.code, message=str(error)))

    def _register(self, worker: FakeWorker, call: w.RegisterCall) -> None:
        key = (call.model, call.replica, call.shard)
        layout = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(call.layout), type=Layout)
        shard, fresh = self.shards.get(key), False
        if shard is None:
            fd, fresh = os.memfd_create("-".join(map(str, key))), True
            os.ftruncate(fd, max(4096, segment_bytes(layout)))
            shard = self.shards[key] = FakeShard(key, call.shards, layout, fd)
        elif shard.owner is not None:
            raise ReplicaConflict(f"{key} has a live worker: release it there")
        elif shard.layout != layout:
            raise LayoutMismatch(f"{key} stands with other tensors: {difference(shard.layout, layout)}")
        shard.owner = worker
        handle = max(worker.handles, default=0) + 1
        worker.handles[handle] = shard
        nbytes = segment_bytes(layout)
        worker.tell(
            w.Registered(call=call.call, handle=handle, nbytes=nbytes, version=shard.version, fresh=fresh), shard.fd
        )

    def _publish(self, worker: FakeWorker, shard: FakeShard, call: w.PublishCall) -> None:
        model, last = shard.key[0], self.last.get(shard.key[0], 0)
        version = last + 1 if call.version is None else call.version
        if shard.version != version:
            if shard.version is not None:
                raise VersionConflict(f"version {shard.version} is published: unpublish {shard.version} first")
            if version <= last:
                raise VersionConflict(f"version {version} is not newer than {last}")
            shard.version = self.last[model] = version
            self.versions[model, version] = self.bytes_of(shard)
        worker.tell(w.HoldingChanged(handle=call.handle, version=version))
        worker.tell(w.Done(call=call.call, version=version))

    def _unpublish(self, worker: FakeWorker, shard: FakeShard, call: w.UnpublishCall) -> None:
        if shard.version is None:
            raise NotPublished(f"{shard.key} has nothing published: publish first")
        shard.version = None
        worker.tell(w.HoldingChanged(handle=call.handle, version=None))
        worker.tell(w.Done(call=call.call))

    def _read(self, worker: FakeWorker, shard: FakeShard, call: w.ReadCall) -> None:
        model = shard.key[0]
        version = call.want if isinstance(call.want, int) else self.last.get(model)
        if call.want == "newer" and (version is None or version <= (shard.version or 0)):
            worker.tell(w.Done(call=call.call))
            return
        if version is None or (model, version) not in self.versions:
            raise VersionUnavailable(f"{call.want} of model {model} has no live holder")
        data = self.versions[model, version]
        os.pwrite(shard.fd, data, 0)
        shard.version = version
        worker.tell(w.HoldingChanged(handle=call.handle, version=None))
        worker.tell(w.Progress(call=call.call, done_bytes=len(data) // 2, total_bytes=len(data)))
        worker.tell(w.HoldingChanged(handle=call.handle, version=version))
        source = w.SourceReport(agent="agent-0", replica="trainer", transport="local", nbytes=len(data), why="nearest")
        report = w.ReadReport(nbytes=len(data), wire_s=0.1, total_s=0.2, pieces=1, retried=0, kept=0, sources=(source,))
        worker.tell(w.Done(call=call.call, version=version, report=report))

    def _release(self, worker: FakeWorker, shard: FakeShard, call: w.ReleaseCall) -> None:
        self.shards.pop(shard.key, None)
        os.close(shard.fd)
        worker.tell(w.Done(call=call.call))

    def bytes_of(self, shard: FakeShard) -> bytes:
        return os.pread(shard.fd, max(1, segment_bytes(shard.layout)), 0)

    def calls(self, kind: type[w.Frame]) -> list[Any]:
        with self._lock:
            return [frame for frame in self.frames if isinstance(frame, kind)]


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


@dataclass
class Held:
    """Frames of one kind, kept from the agent until `let_go`."""

    agent: FakeAgent
    kind: type[w.Frame]
    frames: list[tuple[FakeWorker, Any]] = field(default_factory=list)

    async def first(self) -> None:
        """Wait until there is one."""
        await until(lambda: self.frames)

    def let_go(self) -> None:
        """Let the agent have them now, and all later ones."""
        self.agent.hooks.pop(self.kind, None)
        for worker, frame in self.frames:
            self.agent.answer(worker, frame)


async def trainer(hub: AsyncHub, **tensors: torch.Tensor) -> AsyncShard:
    return await hub.register("policy", tensors or {"w": torch.ones(4)}, replica="trainer")


async def engine(hub: AsyncHub) -> AsyncShard:
    return await hub.register("policy", {"w": TensorSpec((4,), "float32")}, replica="rollout")


@contextlib.asynccontextmanager
async def restarted(agent: FakeAgent, hub: AsyncHub) -> AsyncIterator[AsyncHub]:
    """End a worker without a release, and yield its successor's hub."""
    await hub._session.close()
    again = await tensorhub.connect_async(agent=agent.path)
    await until(lambda: all(shard.owner is None for shard in agent.shards.values()))
    try:
        yield again
    finally:
        agent.hooks.clear()
        await again._session.close()
