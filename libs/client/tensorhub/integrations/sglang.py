"""SGLang: its scheduler processes load versions out of hub memory of their host. I/O.

The server is started with `--custom-weight-loader tensorhub.integrations.sglang.load_version`. A runner beside it
pauses it, and has it call the function. The bytes in hub memory are verified, and while they are mapped they
are not overwritten. SGLang's own loader takes from them what the rank needs.

Invariant: the model is written only once a whole, verified version is mapped. SGLang takes a loader that returns for
one that has loaded all, and ends its server where one raises. So an error is raised here: a server never goes on with
parts of two versions.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

import tensorhub
from tensorhub_common.errors import TensorHubError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorhub.sync.hub import Hub, Shard

MAP_S_MAX: Final = 30.0
"""The bound of mapping a version, in seconds: no byte of it moves."""

TABLES: Final = ".rotary_emb."
"""In the name of tables of positions, which a trainer's module may have as buffers and SGLang computes for itself."""


class _Model(Protocol):
    """A model class of SGLang."""

    def load_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> object:
        """Write a checkpoint's tensors into the rank's own."""


@dataclass
class _Source:
    """The connection of a process to the hub."""

    place: dict[str, Any]
    hub: "Hub"
    shard: "Shard"


_sources: list[_Source] = []
"""One at most: a process has one model."""


def load_version(model: _Model, named_tensors: "Sequence[tuple[str, torch.Tensor]]") -> None:
    """Load the version that the name of the only tensor tells of, as a runner writes it.

    Raises what `Shard.replicate` raises, while the model is untouched, and what the model's own loader raises.
    """
    ((told, _),) = named_tensors
    place = json.loads(told)
    version = place.pop("version")
    shard = _mapped(place, version)
    try:
        with torch.no_grad():
            model.load_weights((name, tensor) for name, tensor in shard.tensors.items() if TABLES not in name)
    finally:
        # The holder may overwrite its memory with the next version from here on.
        shard.let_go()


def _mapped(place: dict[str, Any], version: int) -> "Shard":
    """Map the version. A connection that was there before may be to an agent that is gone: it is made anew once."""
    if _sources and _sources[0].place == place:
        try:
            _sources[0].shard.replicate(version, timeout_s=MAP_S_MAX)
        except TensorHubError:
            leave()
        else:
            return _sources[0].shard
    leave()
    hub = tensorhub.connect(job=place["job"], agent=place["agent"])
    try:
        name = f"{place['replica']}-rank-{_rank()}"
        shard = hub.register(place["model"], hub.specs(place["model"]), replica=name, spot=True, install="mapped")
        shard.replicate(version, timeout_s=MAP_S_MAX)
    except BaseException:
        hub.close()
        raise
    _sources.append(_Source(place, hub, shard))
    return shard


def leave() -> None:
    """Leave the hub; the next version connects anew."""
    while _sources:
        _sources.pop().hub.close()


def _rank() -> int:
    """Return the number of this process among those of the server."""
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_one_of_many else 0
