"""A version's life as a readable transcript, out of the job's events."""

from collections.abc import Iterable, Iterator

import msgspec

from tensorhub_common.protocol.log.events import AgentJoined, AgentLost, AnyEvent, kind_of, model_of

_COMMON = frozenset({"cmd", "i", "k", "time", "by", "model", "kind"})


def story(events: Iterable[AnyEvent], model: str, version: int | None = None) -> Iterator[str]:
    """Yield a line for each event of the model, or of one version of it with the rounds that read it.

    Events of agents that join or are lost are included, since they explain the rest.
    """
    rounds: set[int] = set()
    for event in events:
        is_told = model_of(event) == model and (version is None or _is_about(event, version, rounds))
        if is_told or isinstance(event, AgentJoined | AgentLost):
            yield line(event)


def _is_about(event: AnyEvent, version: int, rounds: set[int]) -> bool:
    number = getattr(event, "round", None)
    if getattr(event, "version", None) == version:
        if number is not None:
            rounds.add(number)
        return True
    return number is not None and number in rounds


def line(event: AnyEvent) -> str:
    """Return one event as a line: sequence, part, kind, and what it says."""
    said = {key: value for key, value in msgspec.structs.asdict(event).items() if key not in _COMMON}
    sender = f"  by {event.by.lane}" if event.by is not None else ""
    words = " ".join(f"{key}={_short(value)}" for key, value in said.items() if value not in (None, (), ""))
    return f"{event.cmd:>6}.{event.i}/{event.k}  {kind_of(event):<20} {words}{sender}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 (a line fits a terminal)
