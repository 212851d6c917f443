"""Where in a job's log it stands that a shard's read is over: so what is heard of it afterwards counts no more. Pure.

Agents say who reads from them with beats, which come by another way than the log, and as rarely as they beat. Each
reader in them is named with the place in the log where its round was decided. The log has the last word: a read that
was decided before the entry by which its shard was filled, its round failed or was decided anew is over.

Always true: at most `readers_max` shards and as many replicas are known, those of which the log spoke last.
"""

from dataclasses import dataclass, field
from typing import TypeVar

from tensorhub_common.protocol.log.events import Event
from tensorhub_common.protocol.log.replicas import ReplicaReady
from tensorhub_common.protocol.log.rounds import RoundDecided, RoundFailed, RoundReopened
from tensorhub_common.protocol.log.shards import ShardFilled, ShardReleased
from tensorhub_planner.load.load import Reader
from tensorhub_planner.primitives.limits import Limits

_Whole = tuple[str, str, str]
"""A job, a model and a replica of it."""

K = TypeVar("K")


@dataclass(slots=True)
class Ended:
    """The last end of each shard's reads, as numbers of entries in its job's log."""

    limits: Limits
    _shards: dict[Reader, int] = field(default_factory=dict)
    _replicas: dict[_Whole, int] = field(default_factory=dict)

    def see(self, job: str, seq: int, event: Event) -> None:
        """Take what happened by the entry of this number."""
        match event:
            case ShardFilled() | ShardReleased():
                self.shard(Reader(job, event.model, event.replica, event.shard), seq)
            case ReplicaReady() | RoundFailed() | RoundReopened() | RoundDecided():
                _note(self._replicas, (job, event.model, event.replica), seq, self.limits.readers_max)
            case _:
                pass

    def shard(self, reader: Reader, seq: int) -> None:
        """Note that what was decided for a shard before this entry it does not read any more."""
        _note(self._shards, reader, seq, self.limits.readers_max)

    def forget(self, job: str) -> None:
        """Forget a job whose log is gone: the numbers of another one mean other entries."""
        self._shards = {reader: seq for reader, seq in self._shards.items() if reader.job != job}
        self._replicas = {whole: seq for whole, seq in self._replicas.items() if whole[0] != job}

    def is_over(self, reader: Reader, decided: int) -> bool:
        """Tell whether a read that was decided there has ended, as far as is known."""
        whole = (reader.job, reader.model, reader.replica)
        return decided < self._shards.get(reader, 0) or decided < self._replicas.get(whole, 0)


def _note(known: dict[K, int], key: K, seq: int, keys_max: int) -> None:
    known.pop(key, None)
    known[key] = seq
    if len(known) > keys_max:
        del known[next(iter(known))]
