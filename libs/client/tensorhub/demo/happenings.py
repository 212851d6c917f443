"""What happens to the demo's processes besides what they say themselves, as the showing process sees it."""

import msgspec

from tensorhub.demo.messages import SHARDS, AnyMessage


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The process was started."""

    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The process ended by itself. `tail` is the end of its log."""

    code: int
    tail: str


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """The log says that a version was published, at this time."""

    version: int
    at: float


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """The read was over before it could be cut; nobody was killed."""

    version: int


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """The process and its agent got SIGKILL, `after_s` seconds after the log had said that this read begins."""

    version: int
    pid: int
    agent_pid: int
    after_s: float


class Wreck(msgspec.Struct, frozen=True, kw_only=True):
    """What the killed process left: so much of its memory was overwritten, so many shards had been reported filled."""

    version: int
    written_bytes: int
    nbytes: int
    filled: int

    @property
    def is_mid_transfer(self) -> bool:
        """Whether the read had begun to write and was not done."""
        return 0 < self.written_bytes < self.nbytes and self.filled < SHARDS


AnyHappening = AnyMessage | Started | Ended | Released | Missed | Killed | Wreck
