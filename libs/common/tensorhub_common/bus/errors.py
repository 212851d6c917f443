"""How the bus can fail, as errors of our own.

No caller above the bus ever sees an exception of nats-py. What is uncertain is said to be so: after `NoBus` and
`NoAnswer` the other side may have done what was asked, so the caller may try again only where a repeat is harmless.
"""

from typing import Final

from tensorhub_common.errors import RegistryUnavailable, TensorHubError


class NoBus(RegistryUnavailable):
    """There is no connection to NATS, or it broke while an answer was awaited."""


class NotPermitted(RegistryUnavailable):
    """NATS does not let this user publish or subscribe there. Nothing was sent; asking again would not help."""


class NoResponder(TensorHubError):
    """No service listens on the subject of the request."""


class NoAnswer(TensorHubError):
    """Somebody listens, but no answer came within the bound."""


class Busy(TensorHubError):
    """The other side has as many questions waiting as it takes. Ask again a little later."""


class MessageTooLarge(TensorHubError):
    """The message is longer than NATS takes; large things go by digest, through the blob store."""


class StreamFailure(TensorHubError):
    """JetStream refused a request. `err_code` is its number, 0 when it gave none."""

    def __init__(self, message: str, err_code: int = 0) -> None:
        super().__init__(message)
        self.err_code = err_code


class WrongLastSequence(TensorHubError):
    """Another writer has appended since. `last_seq` is the last sequence in the stream; None when NATS does not say."""

    def __init__(self, message: str, last_seq: int | None) -> None:
        super().__init__(message)
        self.last_seq = last_seq


class LogFull(TensorHubError):
    """The stream has reached its stated limits, or NATS has no more room. Nothing was written."""


class LogMissing(TensorHubError):
    """The job has no log: the job was never opened, or its log was deleted."""

    __module__ = "tensorhub"


class LogGap(TensorHubError):
    """Entries that were asked for are no longer in the log."""

    __module__ = "tensorhub"


class LogShorter(TensorHubError):
    """The log ends before what was read from it: it is not the log that it was. Stop, and don't go on folding."""


class SnapshotBroken(TensorHubError):
    """A snapshot is not whole, or its bytes are not what the index says."""


class StreamMismatch(TensorHubError):
    """A stream of the expected name exists, but with other properties than the hub relies on."""


class BlobMissing(TensorHubError):
    """The blob store doesn't hold the blob."""


class BlobTooLarge(TensorHubError):
    """The blob is longer than the store takes."""


UNCERTAIN: Final = (NoBus, NoAnswer, NoResponder, StreamFailure)
"""After these it is unknown whether what was asked was done. All requests of the hub may be repeated."""
