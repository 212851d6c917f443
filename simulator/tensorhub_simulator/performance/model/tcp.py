"""How fast one stream of a transport can be over a link with a round trip and loss. Pure.

TCP sends at most a window in a round trip, and where packets are lost at most what Mathis, Semke, Mahdavi and Ott gave
in "The macroscopic behavior of the TCP congestion avoidance algorithm" (1997): MSS / RTT · sqrt(3/2) / sqrt(p). Newer
congestion controls bear loss better; `loss` is then what it looks like to them. RDMA is used inside a site only, where
neither bounds it.
"""

from math import sqrt
from typing import Final

from tensorhub_simulator.performance.model.network import UNBOUND

MSS_BYTES: Final = 1448
"""An Ethernet frame's payload without the headers of IP and TCP with time stamps."""

FRAME_BYTES: Final = 1514
"""What the same frame takes of a wire that is shaped by frames."""

WIRE: Final = MSS_BYTES / FRAME_BYTES
"""So much of a wire's bytes is payload, over TCP."""

MATHIS: Final = sqrt(1.5)


def stream_bytes_s(window_bytes: int, rtt_s: float, loss: float) -> int:
    """Return the ceiling of one stream, in bytes a second."""
    if rtt_s <= 0:
        return UNBOUND
    by_window = window_bytes / rtt_s
    by_loss = MATHIS * MSS_BYTES / (rtt_s * sqrt(loss)) if loss > 0 else float(UNBOUND)
    return max(int(min(by_window, by_loss, UNBOUND)), 1)
