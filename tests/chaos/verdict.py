"""Counts outcomes in a job's log: each command has exactly one whole group of events, in order. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol.log.codec import decode_event
from tensorhub_common.protocol.log.events import AnyEvent, ShardFilled, VersionPublished, kind_of

MSG_ID = "Nats-Msg-Id"


@dataclass(slots=True)
class LogVerdict:
    last: int = 0
    commands: dict[int, str] = field(default_factory=dict)
    """By sequence the command's id."""
    kinds: dict[str, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    """By command how many events of its group have come."""
    wrongs: list[str] = field(default_factory=list)
    roots: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _event: AnyEvent | None = None

    def read(self, entries: Iterable[StoredEntry]) -> None:
        for entry in entries:
            if entry.seq != self.last + 1:
                self.wrongs.append(f"entry {entry.seq} follows {self.last}")
            self.last = entry.seq
            # tensorhub.v1.<job>.<cmd or event>.…
            kind = entry.subject.split(".")[3]
            if kind == "cmd":
                self.commands[entry.seq] = entry.headers.get(MSG_ID, "")
            else:
                self._take(entry.seq, decode_event(entry.data))

    def _take(self, seq: int, event: AnyEvent) -> None:
        last, self._event = self._event, event
        kind = kind_of(event)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        said = f"event {seq} ({kind}, {event.i} of {event.k} for command {event.cmd})"
        if event.cmd not in self.commands:
            self.wrongs.append(f"{said} answers no command before it")
        if last is not None and last.i < last.k:
            if (event.cmd, event.i, event.k) != (last.cmd, last.i + 1, last.k):
                self.wrongs.append(f"{said} breaks into the group of command {last.cmd}, at {last.i} of {last.k}")
        elif event.i != 1 or self.groups.get(event.cmd):
            self.wrongs.append(f"{said} is a second group, or the middle of one")
        elif last is not None and event.cmd < last.cmd:
            self.wrongs.append(f"{said} comes after the group of command {last.cmd}")
        self.groups[event.cmd] = self.groups.get(event.cmd, 0) + 1
        self._vouch(said, event)

    def _vouch(self, said: str, event: AnyEvent) -> None:
        """Each shard of a version has one root, in whichever replica."""
        if isinstance(event, VersionPublished):
            if event.version in self.roots:
                self.wrongs.append(f"{said} publishes version {event.version} a second time")
            self.roots[event.version] = event.roots
        elif isinstance(event, ShardFilled) and self.roots[event.version][event.shard] != event.root:
            self.wrongs.append(f"{said} was filled with another root than version {event.version} has")

    @property
    def undecided(self) -> list[int]:
        return [seq for seq in self.commands if not self.groups.get(seq) or self._is_open(seq)]

    def _is_open(self, seq: int) -> bool:
        return self._event is not None and self._event.cmd == seq and self._event.i < self._event.k

    def lost(self, acknowledged: Mapping[str, int]) -> list[str]:
        """Say which acknowledged commands, by id and sequence, are not in the log exactly once and just there."""
        where: dict[str, list[int]] = {}
        for seq, msg_id in self.commands.items():
            where.setdefault(msg_id, []).append(seq)
        return [
            f"command {msg_id} was acknowledged at {seq} and stands at {where.get(msg_id, [])}"
            for msg_id, seq in acknowledged.items()
            if where.get(msg_id, []) != [seq]
        ]
