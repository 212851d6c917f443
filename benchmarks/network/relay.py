"""A long line between two network devices: each frame comes out at the other end late, and no faster than its rate.

    python -m benchmarks.network.relay DEVICE DEVICE --mbit 200 --delay-ms 25 --queue-kib 2560

It runs in a namespace of its own between two others, for where the kernel has no `netem`. Frames wait in a queue with
a bound, as in a router: what finds it full is dropped. A line on standard input is answered by the counts, as JSON.

Always true: frames of one direction keep their order, and a frame is counted once, when it leaves.
"""

import argparse
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Final

FRAME_BYTES_MAX: Final = 65_600
READ_MAX: Final = 256
"""So many frames are taken from one device at a time."""

SOCKET_BYTES: Final = 16 * 1024 * 1024
"""What comes while the relay sleeps waits in the kernel."""

TURN_S: Final = 0.0005
"""While there are frames it turns so often; each comes later by about that much."""

ETHERNET_BYTES: Final = 14
IPV4: Final = b"\x08\x00"
TCP: Final = 6
OUTGOING: Final = 4
"""`PACKET_OUTGOING`: a frame that this host sends itself."""

PRIORITY: Final = -20
SO_RCVBUFFORCE: Final = 33
SOL_PACKET: Final = 263
PACKET_ADD_MEMBERSHIP: Final = 1
PACKET_MR_PROMISC: Final = 1


@dataclass(slots=True)
class Counts:
    """What has left at one end."""

    frames: int = 0
    nbytes: int = 0
    """Whole frames, headers included."""
    tcp_payload: int = 0
    """What TCP carries, what it sends again included."""
    dropped: int = 0


@dataclass(slots=True)
class Direction:
    """One way through the line."""

    taker: socket.socket
    giver: socket.socket
    bps: float
    delay_s: float
    queue_bytes_max: int
    counts: Counts = field(default_factory=Counts)
    _free_at: float = 0.0
    """When all that waits has been put on the line."""
    _line: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        """Take what has come; tells whether there was anything."""
        for number in range(READ_MAX):
            try:
                frame, where = self.taker.recvfrom(FRAME_BYTES_MAX)
            except BlockingIOError:
                return number > 0
            if where[2] == OUTGOING:
                continue
            begin = max(now, self._free_at)
            if (begin - now) * self.bps > self.queue_bytes_max:
                self.counts.dropped += 1
                continue
            self._free_at = begin + len(frame) / self.bps
            self._line.append((self._free_at + self.delay_s, frame))
        return True

    def give(self, now: float) -> None:
        """Let out what is due."""
        line, counts = self._line, self.counts
        while line and line[0][0] <= now:
            frame = line.popleft()[1]
            try:
                self.giver.send(frame)
            except OSError:
                counts.dropped += 1
                continue
            counts.frames += 1
            counts.nbytes += len(frame)
            counts.tcp_payload += tcp_payload(frame)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on the line."""
        return not self._line


def tcp_payload(frame: bytes) -> int:
    """Return how many bytes of TCP's payload an Ethernet frame carries; of anything but IPv4 it is 0."""
    if frame[12:14] != IPV4 or frame[ETHERNET_BYTES + 9] != TCP:
        return 0
    header = (frame[ETHERNET_BYTES] & 0x0F) * 4
    whole = int.from_bytes(frame[ETHERNET_BYTES + 2 : ETHERNET_BYTES + 4], "big")
    return whole - header - (frame[ETHERNET_BYTES + header + 12] >> 4) * 4


def opened(device: str) -> socket.socket:
    """Return a socket that takes and gives whole frames of a device."""
    ends = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
    ends.bind((device, 0))
    ends.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BYTES)
    # Frames for other hosts too.
    membership = struct.pack("iHH8s", socket.if_nametoindex(device), PACKET_MR_PROMISC, 0, b"")
    ends.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership)
    ends.settimeout(0)
    return ends


def run(one: Direction, other: Direction) -> None:
    """Relay until standard input ends."""
    selector = selectors.DefaultSelector()
    for each in (one.taker, other.taker, sys.stdin):
        selector.register(each, selectors.EVENT_READ)
    while True:
        idle = one.is_empty and other.is_empty
        if not idle:
            time.sleep(TURN_S)
        asked = any(key.fileobj is sys.stdin for key, _ in selector.select(None if idle else 0))
        now = time.monotonic()
        for each in (one, other):
            each.take(now)
            each.give(time.monotonic())
        if asked:
            if not sys.stdin.readline():
                return
            print(json.dumps([asdict(one.counts), asdict(other.counts)]), flush=True)


def main() -> None:
    """Read the options, say that the line stands, and relay."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.relay", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("devices", nargs=2)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--delay-ms", type=float, required=True, help="in each direction")
    parser.add_argument("--queue-kib", type=int, required=True)
    options = parser.parse_args()
    ends = [opened(device) for device in options.devices]
    made = (options.mbit * 1e6 / 8, options.delay_ms / 1e3, options.queue_kib * 1024)
    # A line does not get slower because the hosts at its ends are busy.
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    print("ready", flush=True)
    run(Direction(ends[0], ends[1], *made), Direction(ends[1], ends[0], *made))


if __name__ == "__main__":
    main()
