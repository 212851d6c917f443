"""Every error that TensorHub raises at its users.

The class name is also the code that travels on the bus and over the agent's socket (`from_code` turns it back), so
one word names one fault from the catalog's fold to the caller's `except`. Each message is one sentence or two: what was
wrong, and what to do.
"""


class TensorHubError(Exception):
    """The root of all errors of TensorHub."""

    @property
    def code(self) -> str:
        """The name that travels on the wire."""
        return type(self).__name__


class VersionUnavailable(TensorHubError):
    """No live replica holds the version that was asked for."""


class VersionConflict(TensorHubError):
    """The version can't be published: not newer, another one is still published, or the shards name several."""


class LayoutMismatch(TensorHubError):
    """The tensors don't fit those of the sibling shards, of the earlier registration or of the version's holders."""


class NotPublished(TensorHubError):
    """There is nothing published to unpublish."""


class NotFilled(TensorHubError):
    """The shard holds a part of a version only, so it can't be published."""


class DrainTimeout(TensorHubError, TimeoutError):
    """A mapped reader still holds the memory; it must not be overwritten. Call again."""


class RoundTimeout(TensorHubError, TimeoutError):
    """Not every shard of the replica joined the round in time."""


class IntegrityError(TensorHubError):
    """Bytes did not match the digest that the log keeps, from every source that was tried."""


class ReplicaConflict(TensorHubError):
    """The shard belongs to another live worker, or a call on it is already under way."""


class MemoryExhausted(TensorHubError):
    """The agent has no room for the shard's segment."""


class RetentionFull(TensorHubError):
    """A retained version has no room for a copy, so its last holder can't be overwritten."""


class AgentUnavailable(TensorHubError):
    """No agent answers."""


class RegistryUnavailable(TensorHubError):
    """No registry, or no NATS, answers within the bound."""


class JobGone(TensorHubError):
    """The job was deleted, and its name is not used again by accident."""


class InvalidName(TensorHubError):
    """A job, model, replica or agent name is not valid in a subject."""


class BadCommand(TensorHubError):
    """A command on the bus could not be read, or its sender may not say it."""


class StaleSender(TensorHubError):
    """The log knows a newer incarnation of the sender, or took it for lost: it must join again."""


class RolloutUnavailable(TensorHubError):
    """No rollout manager answers within the bound, or another trainer has attached to the consumer since."""


class NoInstance(TensorHubError):
    """No instance generates, and the caller asked not to wait for one."""


class BadPrompt(TensorHubError):
    """A prompt can't be generated from, or its id stands for other content already."""


class NotInThisVersion(TensorHubError):
    """The call is part of the interface, but this version of TensorHub can't do it yet."""


_BY_CODE: dict[str, type[TensorHubError]] = {kind.__name__: kind for kind in TensorHubError.__subclasses__()}
"""The errors of this module. A log repeats these codes, so a new one has a row in `protocol/log/levels.py`."""

for _kind in (TensorHubError, *_BY_CODE.values()):
    # A traceback names an error by the package that users import it from.
    _kind.__module__ = "tensorhub"


def from_code(code: str, message: str) -> TensorHubError:
    """Turn a code and message from the wire back into the error; an unknown code becomes the root class."""
    return _BY_CODE.get(code, TensorHubError)(message)


def public_code(error: TensorHubError) -> str:
    """Return the code that every release knows for an error: the bus has narrower classes of its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BY_CODE or kind is TensorHubError)


def gone(job: str) -> JobGone:
    """Return the error of each request about a deleted job."""
    return JobGone(
        f"job {job!r} was deleted: take another name, or let this one be used anew with 'tensorhub delete --job {job} "
        "--forget'"
    )
