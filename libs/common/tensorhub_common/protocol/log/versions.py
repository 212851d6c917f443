"""What happens to versions and to models: that they exist, can be read, and are kept."""

from tensorhub_common.protocol.log.events import ModelEvent


class VersionPublished(ModelEvent, frozen=True, kw_only=True, tag="version.published"):
    """The version exists: all shards of this replica hold it. `roots` by shard."""

    version: int
    replica: str
    roots: tuple[str, ...]


class VersionAvailable(ModelEvent, frozen=True, kw_only=True, tag="version.available"):
    """A holder of the version came back."""

    version: int
    replica: str


class VersionGone(ModelEvent, frozen=True, kw_only=True, tag="version.unavailable"):
    """The last ready replica of the version left."""

    version: int
    reason: str


class VersionRetired(ModelEvent, frozen=True, kw_only=True, tag="version.retired"):
    """The version can't be read any more, and can't come back: it was forgotten, or the model was rewound below it."""

    version: int
    reason: str = "forgotten"


class VersionPinned(ModelEvent, frozen=True, kw_only=True, tag="version.pinned"):
    """The version is kept until it is unpinned."""

    version: int


class VersionUnpinned(ModelEvent, frozen=True, kw_only=True, tag="version.unpinned"):
    """The version is kept no longer than the model's retention says."""

    version: int


class VersionKept(ModelEvent, frozen=True, kw_only=True, tag="version.kept"):
    """A replica that may not vanish holds this retained version."""

    version: int
    replica: str


class VersionExposed(ModelEvent, frozen=True, kw_only=True, tag="version.exposed"):
    """A crash took the last counting copy of this retained version. It counts again when a holder comes back."""

    version: int
    reason: str


class ModelRetention(ModelEvent, frozen=True, kw_only=True, tag="model.retention"):
    """The last `last` versions of the model are retained from now on."""

    last: int


class ModelRewound(ModelEvent, frozen=True, kw_only=True, tag="model.rewound"):
    """The model went back to `to`. What is published next is newer than `last`, which was the last published."""

    to: int
    last: int


class ModelDeleted(ModelEvent, frozen=True, kw_only=True, tag="model.deleted"):
    """The model is forgotten; its name is free."""
