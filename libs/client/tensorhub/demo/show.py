"""What has been seen so far: a row for each replica, the loss, the notes, and at the end the verdict. Pure.

Always true: each happening changes the rows first and is told in notes after; the verdict is good only when every copy
was compared and equal, and all that the demo promises was seen.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import msgspec

from tensorhub.demo.comparison import Claim, Comparison
from tensorhub.demo.happenings import AnyHappening, Ended, Killed, Missed, Released, Started, Wreck
from tensorhub.demo.messages import (
    TRAINER,
    Held,
    Joined,
    Proved,
    Published,
    Rested,
    Said,
    Sealed,
    Source,
    Standby,
    Stepped,
    Trouble,
    Unpublished,
)
from tensorhub.demo.plot import LATECOMER, ROLLOUTS, VICTIM

MB: Final = 1e6
GB: Final = 1e9
MS: Final = 1e3


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the story. `facts` are the same for programs; their keys are stable."""

    at_s: float
    kind: str
    replica: str
    text: str
    is_event: bool = False
    """Out of the ordinary."""
    facts: dict[str, Any] = {}


@dataclass(slots=True)
class Read:
    """One update of a replica."""

    version: int
    nbytes: int
    wait_s: float
    gb_s: float | None
    sources: tuple[Source, ...]


@dataclass(slots=True)
class Row:
    """What is known of one replica."""

    replica: str
    state: str = ""
    pid: int | None = None
    version: int | None = None
    text: str = ""
    reads: list[Read] = field(default_factory=list)
    lives: int = 0
    proved: bool | None = None

    @property
    def last(self) -> Read | None:
        """Its last update."""
        return self.reads[-1] if self.reads else None


class Show:
    """The fold over all that happens."""

    def __init__(self, *, is_peaceful: bool = False) -> None:
        """Begin with nobody there. `is_peaceful`: it was not promised that somebody is killed."""
        self._is_peaceful = is_peaceful
        self.rows = {replica: Row(replica) for replica in (TRAINER, *ROLLOUTS)}
        self.rows[LATECOMER].state = "joins later"
        self.comparison = Comparison()
        self.losses: list[float] = []
        self.parameters = 0
        self.nbytes = 0
        self.published = 0
        self.wreck: Wreck | None = None
        self.is_back = False
        self._released: dict[int, float] = {}

    def take(self, replica: str, news: AnyHappening, at_s: float) -> list[Note]:
        """Take what happened `at_s` seconds after the beginning, and return what there is to tell."""
        row = self.rows[replica]
        match news:
            case Stepped():
                self.losses.append(news.loss)
                row.text = f"step {news.step}, loss {news.loss:.2f}"
                return [_note(at_s, "stepped", replica, row.text, **_facts(news))]
            case Released():
                self._released.setdefault(news.version, news.at)
                return []
            case Held():
                return [self._held(row, news, at_s)]
            case Said():
                row.text, row.state = news.text, "waiting"
                return [_note(at_s, "said", replica, f"says {news.text!r}", version=news.version, says=news.text)]
            case Proved():
                return [self._proved(row, news, at_s)]
            case Missed():
                return [_note(at_s, "missed", replica, "read faster than it could be killed", version=news.version)]
            case Started() | Ended() | Killed() | Wreck():
                return self._process(row, news, at_s)
            case _:
                return self._progress(row, news, at_s)

    # ------------------------------------------------------------------------------------------------- processes

    def _process(self, row: Row, news: Started | Ended | Killed | Wreck, at_s: float) -> list[Note]:
        replica = row.replica
        match news:
            case Started():
                row.pid, row.lives = news.pid, row.lives + 1
                row.state = "starting" if row.lives == 1 else "starting again"
                text = "starts" if row.lives == 1 else "starts again"
                return [_note(at_s, "started", replica, f"{text} (process {news.pid})", pid=news.pid)]
            case Killed():
                row.state, row.version = "KILLED", None
                text = (
                    f"killed {news.after_s * MS:.0f} ms into its read of version {news.version}: SIGKILL to {news.pid} "
                    f"and its agent {news.agent_pid}"
                )
                return [_note(at_s, "killed", replica, text, is_event=True, **_facts(news))]
            case Wreck():
                self.wreck = news
                end = "cut in the middle of the transfer" if news.is_mid_transfer else "not in the middle: once more"
                text = f"{news.written_bytes / MB:.0f} of {news.nbytes / MB:.0f} MB had been overwritten: {end}"
                facts = {**_facts(news), "mid_transfer": news.is_mid_transfer}
                return [_note(at_s, "wreck", replica, text, is_event=True, **facts)]
            case Ended():
                row.state = row.state if news.code == 0 else f"ended with {news.code}"
                text = "leaves" if news.code == 0 else f"ended with exit code {news.code}: {news.tail}"
                return [_note(at_s, "ended", replica, text, is_event=news.code != 0, code=news.code, tail=news.tail)]

    def _progress(self, row: Row, news: AnyHappening, at_s: float) -> list[Note]:
        replica = row.replica
        match news:
            case Standby():
                row.state = "standing by"
            case Joined():
                self.parameters, self.nbytes = news.parameters, news.nbytes
                row.state, row.version = "waiting", news.version
                return [_note(at_s, "joined", replica, "has both shards registered", version=news.version)]
            case Unpublished():
                row.state, row.version = "training", None
            case Sealed():
                row.state = "publishing"
                self.comparison.seal(news.version, news.digests)
            case Published():
                row.state, row.version = "published", news.version
                self.published += 1
                loss = "untrained" if news.loss is None else f"loss {news.loss:.2f}"
                text = f"published version {news.version} ({loss})"
                return [_note(at_s, "published", replica, text, version=news.version, loss=news.loss)]
            case Rested():
                row.state = "done"
            case Trouble():
                text = f"{news.error}: {news.message}"
                return [_note(at_s, "trouble", replica, text, is_event=True, error=news.error, message=news.message)]
        return []

    # ---------------------------------------------------------------------------------------------------- copies

    def _held(self, row: Row, held: Held, at_s: float) -> Note:
        published = self._released.get(held.version, held.began)
        wait_s = held.ended - max(held.began, published)
        moved = sum(source.nbytes for source in held.sources)
        gb_s = moved / GB / held.wire_s if held.wire_s else None
        read = Read(held.version, moved, wait_s, gb_s, held.sources)
        row.reads.append(read)
        row.version, row.state = held.version, "generating"
        equal = self.comparison.claim(Claim(row.replica, held.version, held.nbytes, held.digests))
        origin = origin_of(held.sources)
        text = f"holds version {held.version}: {moved / MB:.0f} MB from {origin}"
        text += f", {gb_s:.1f} GB/s, waited {wait_s * MS:.0f} ms" if gb_s is not None else ""
        kind, is_event = "held", False
        if row.replica == VICTIM and row.lives > 1 and not self.is_back:
            self.is_back, is_event, kind = True, True, "back"
            text = f"is back and {text}"
        elif row.replica == LATECOMER and len(row.reads) == 1:
            is_event, kind = True, "joined-late"
            text = f"joined late and {text}"
        if equal is False:
            text, is_event = f"{text}, WHICH IS NOT WHAT WAS PUBLISHED", True
        facts = {
            "version": held.version,
            "nbytes": moved,
            "gb_s": gb_s,
            "wait_s": wait_s,
            "sources": [msgspec.to_builtins(source) for source in held.sources],
            "equal": equal,
        }
        return _note(at_s, kind, row.replica, text, is_event=is_event, **facts)

    def _proved(self, row: Row, proved: Proved, at_s: float) -> Note:
        row.proved = self.comparison.claim(Claim(row.replica, proved.version, proved.nbytes, proved.digests))
        row.state = "equal" if row.proved else "DIFFERS"
        text = f"holds version {proved.version} at the end: {'equal' if row.proved else 'NOT EQUAL'}"
        return _note(at_s, "proved", row.replica, text, version=proved.version, equal=row.proved, nbytes=proved.nbytes)

    # --------------------------------------------------------------------------------------------------- verdict

    def faults(self) -> list[str]:
        """Return what was promised and not seen; empty when all is well."""
        found = [
            f"{each.replica} holds other bytes than version {each.version} in {', '.join(each.tensors[:3])}"
            for each in self.comparison.differences
        ]
        found += [
            f"{each.replica} holds version {each.version}, of which the trainer knows nothing"
            for each in self.comparison.open
        ]
        found += [f"{row.replica} was not compared at the end" for row in self.rows.values() if row.proved is None]
        if not self._is_peaceful:
            found += self._faults_of_blow()
        late = self.rows[LATECOMER].reads
        if not late or not late[0].sources or any(source.replica == TRAINER for source in late[0].sources):
            found.append(f"{LATECOMER} did not take its first weights from a peer")
        if not self.losses or self.losses[-1] >= self.losses[0]:
            found.append("the loss did not go down")
        return found

    def _faults_of_blow(self) -> list[str]:
        found = []
        if self.wreck is None or not self.wreck.is_mid_transfer:
            found.append(f"{VICTIM} was not killed in the middle of a transfer")
        if not self.is_back:
            found.append(f"{VICTIM} did not come back")
        return found

    def totals(self) -> list[dict[str, Any]]:
        """Return what there is to sum up about each replica."""
        return [_totals(row, self.comparison.equal.get(row.replica, 0)) for row in self.rows.values()]


def origin_of(sources: tuple[Source, ...]) -> str:
    """Name the replicas that bytes came from, each once."""
    return ", ".join(sorted({source.replica for source in sources})) or "its own memory"


def _totals(row: Row, equal: int) -> dict[str, Any]:
    rates = [read.gb_s for read in row.reads if read.gb_s is not None]
    sources = [source for read in row.reads for source in read.sources]
    from_trainer = sum(source.nbytes for source in sources if source.replica == TRAINER)
    return {
        "replica": row.replica,
        "version": row.version,
        "updates": len(row.reads),
        "nbytes": sum(read.nbytes for read in row.reads),
        "nbytes_from_trainer": from_trainer,
        "nbytes_from_peers": sum(source.nbytes for source in sources) - from_trainer,
        "gb_s_median": median(rates) if rates else None,
        "wait_s_median": median(read.wait_s for read in row.reads) if row.reads else None,
        "wait_s_max": max((read.wait_s for read in row.reads), default=None),
        "compared_equal": equal,
        "equal_at_end": row.proved,
    }


def _facts(news: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(news, name) for name in news.__struct_fields__}


def _note(at_s: float, kind: str, replica: str, text: str, *, is_event: bool = False, **facts: Any) -> Note:  # noqa: ANN401 (whatever JSON can hold)
    return Note(at_s=at_s, kind=kind, replica=replica, text=text, is_event=is_event, facts=facts)
