"""What a runner asks of an engine that is a server: streams of tokens, standing still, and another version.

Always true of a server:
- A stream ends with a reason, or raises. A clean end without a reason is not the end of a response.
- Once `stand_still` is back, all streams have ended, and no token is made until `go_on`.
- A version that `load` has brought is whole. After an error of `load` the server must not go on before another one.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.rollout.messages import RunEngine, Sampling

EndReason = Literal["stop", "length", "interrupted"]
"""`interrupted`: the server stood still, or somebody else has ended the stream."""


class ServerLost(TensorHubError):
    """The server does not answer, or can't be trusted any more: nothing runs there until a version is loaded anew."""


class ServerBusy(TensorHubError):
    """The server takes no more requests just now."""


class ServerUnfit(TensorHubError):
    """The server was started in a way that a runner can't work with; the message says which option to change."""


class Streamed(msgspec.Struct, frozen=True):
    """New tokens of one stream."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithms, one for each token."""
    reason: EndReason | None = None
    """Why it has ended; None: it goes on."""
    versions: tuple[str, ...] = ()
    """With the reason: the versions that the server takes all tokens of the stream to be of."""


class WeightSource(msgspec.Struct, frozen=True):
    """Where a server finds versions on its host."""

    job: str
    model: str
    replica: str
    """The runner's replica, which holds what is to be loaded."""
    agent: str
    """The socket of the agent of its host."""


class Server(Protocol):
    """One server. All methods raise `ServerLost` where it does not answer within their bounds."""

    async def check(self) -> RunEngine:
        """Return what it is. Raises `ServerUnfit` too."""

    async def is_healthy(self, version: int) -> bool:
        """Tell whether it generates, and with this version as far as it says. Raises nothing."""

    def generate(self, name: str, context: Sequence[int], sampling: Sampling, made: int) -> AsyncIterator[Streamed]:
        """Go on behind the context, of which the last `made` tokens are the response's; closing the iterator stops it.

        Raises `BadPrompt` for what this server can't generate from, and `ServerBusy`.
        """

    async def stand_still(self) -> None:
        """End all streams as `interrupted`, and make no token until `go_on`."""

    async def load(self, source: WeightSource, version: int) -> None:
        """Read a version, which the source holds, into the model. Only while it stands still."""

    async def go_on(self) -> None:
        """Make tokens again."""

    async def close(self) -> None:
        """Let go of the connections."""
