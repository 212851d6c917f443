"""What a shard asks of its agent, and what an answer means when the connection broke in between.

A connection that breaks leaves open whether the agent has done what it was asked. After the shard is attached again,
the agent's word on what the shard holds settles that, or the same question is asked again; none of them does harm when
it is asked twice. No I/O here: the session carries it out.
"""

from dataclasses import dataclass
from typing import Final, TypedDict

import msgspec

from tensorhub_common.errors import NotPublished, TensorHubError, VersionConflict
from tensorhub_common.protocol.worker import Done, PublishCall, ReadCall, ShardCall


class Address(TypedDict):
    """What a frame gets each time that it is sent."""

    call: int
    handle: int
    timeout_s: float


UNSENT: Final[Address] = {"call": 0, "handle": 0, "timeout_s": 0.0}


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of a user's, however often it has to be sent. `before` and `now` are what the shard held and holds."""

    asked: ShardCall
    """The frame, but for its address."""

    def frame(self, call: int, handle: int, left_s: float, spent_s: float) -> ShardCall:  # noqa: ARG002 (a read's wait)
        """Return the frame to send, when `left_s` of the bound remain and `spent_s` have gone."""
        return msgspec.structs.replace(self.asked, call=call, handle=handle, timeout_s=left_s)

    def may_tear(self, install: str) -> bool:  # noqa: ARG002 (for those that override it)
        """Tell whether the memory that the tensors show may have a part of a version until the answer."""
        return False

    def holds(self, done: Done, now: int | None) -> int | None:
        """Return what the shard holds after this answer."""
        return now if done.version is None else done.version

    def settled(self, before: int | None, now: int | None) -> Done | None:  # noqa: ARG002 (for those that override it)
        """After a break, before it is asked again: return the answer if what the shard holds tells it."""
        return None

    def answered(self, done: Done, before: int | None, now: int | None) -> Done:  # noqa: ARG002
        """Asked again after a break and answered: return what both times together mean."""
        return done

    def excused(self, error: TensorHubError, before: int | None, now: int | None) -> Done | None:  # noqa: ARG002
        """Asked again after a break and refused: return the answer if the refusal says that it was done before."""
        return None


@dataclass(frozen=True, slots=True)
class PublishRequest(AgentCall):
    """Publish what the memory holds, as the frame's version or the next one."""

    asked: PublishCall

    def settled(self, before: int | None, now: int | None) -> Done | None:
        """It was published if the shard holds what was wanted; without a number, if it holds something newer."""
        if now is None:
            return None
        version = self.asked.version
        published = now == version if version is not None else before is None or now > before
        return Done(call=0, version=now) if published else None

    def excused(self, error: TensorHubError, before: int | None, now: int | None) -> Done | None:
        """What was asked before the break may have come to its end after the shard was attached again."""
        return self.settled(before, now) if isinstance(error, VersionConflict) else None


@dataclass(frozen=True, slots=True)
class UnpublishRequest(AgentCall):
    """Wait until the memory may be overwritten."""

    def holds(self, done: Done, now: int | None) -> int | None:  # noqa: ARG002
        """Return that it holds nothing."""
        return None

    def excused(self, error: TensorHubError, before: int | None, now: int | None) -> Done | None:  # noqa: ARG002
        """That nothing is published is what was wanted.

        It is asked again even though the shard is said to hold nothing: it may still be draining, and then its
        memory must not be overwritten yet.
        """
        return Done(call=0) if isinstance(error, NotPublished) else None


@dataclass(frozen=True, slots=True)
class ReadRequest(AgentCall):
    """Join the replica's round."""

    asked: ReadCall

    def may_tear(self, install: str) -> bool:
        """Only a read in place writes there."""
        return install == "in-place"

    def frame(self, call: int, handle: int, left_s: float, spent_s: float) -> ShardCall:
        """Return the frame to send: of a wish for newer what is left of its wait."""
        wait_s = None if self.asked.wait_s is None else max(0.0, self.asked.wait_s - spent_s)
        return msgspec.structs.replace(self.asked, call=call, handle=handle, timeout_s=left_s, wait_s=wait_s)

    def answered(self, done: Done, before: int | None, now: int | None) -> Done:
        """Nothing newer the second time: what the first one brought is the answer."""
        if self.asked.want == "newer" and done.version is None and now is not None and now != before:
            return Done(call=0, version=now, report=done.report)
        return done


@dataclass(frozen=True, slots=True)
class ReleaseRequest(AgentCall):
    """Drain the shard and free it. If it was gone already, attaching again has brought it back, empty, to be freed."""

    def holds(self, done: Done, now: int | None) -> int | None:  # noqa: ARG002
        """Return that it holds nothing."""
        return None
